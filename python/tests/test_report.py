"""The report: figures, text, page, predictions, trace."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import twinbuf as tb


def test_figures_text_page_and_trace(numbers: Callable[..., tb.Loader], tmp_path: Path) -> None:
    loader = numbers(name="train", trace=tmp_path / "both.json")
    assert "Nothing was measured" in str(loader.report())
    for batch in loader.epochs(3):
        sum(batch.numpy().ravel().tolist())
    report = loader.report()
    assert (report.name, report.epochs, report.batches, report.bytes) == ("train", 3, 48, 64 * 32 * 3)
    assert (report.overlap, report.depth, report.workers, report.kept) == (True, 3, 1, 0)
    assert 0 < report.wait + report.compute <= report.wall * 1.001
    assert str(report).startswith("train: 3 epochs, 48 batches")
    figures = json.loads(json.dumps(report.to_dict()))
    assert figures["batches"] == 48
    assert figures["verdict"] == report.verdict
    report.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "<svg" in page
    assert "host_depth" not in str(report) + report.advice + page
    loader.close()
    rows = {event.get("name") for event in json.loads((tmp_path / "both.json").read_text())}
    assert "disk_load" in rows


def test_predictions(numbers: Callable[..., tb.Loader]) -> None:
    loader = numbers()
    assert loader.report().predict(depth=2) is None and loader.report().recommended() is None
    for batch in loader.epochs(3):
        sum(batch.numpy().ravel().tolist())
    report = loader.report()
    for options in ({}, {"depth": 4}, {"workers": 2}, {"overlap": False}):
        found = report.predict(**options)
        assert found is not None
        assert all(getattr(found, name) == value for name, value in options.items())
        assert found.batches == 48 and found.measured > 0 and found.wall > 0
        assert found.gain == pytest.approx(1 - found.wall / found.measured)
    for name, most in (("depth", 8), ("workers", 64)):
        assert report.predict(**{name: most}) is not None
        wanted = "1 to 64" if name == "workers" else "1 or more"  # slots have no upper limit
        for number in (0, most + 1) if name == "workers" else (0,):
            with pytest.raises(tb.OptionError, match=f"^{name}: wanted {wanted}, found {number}$"):
                report.predict(**{name: number})
        with pytest.raises(tb.OptionError, match=f"^{name}: wanted a whole number from 0 .*, found -1$"):
            report.predict(**{name: -1})
    recommended = report.recommended()
    assert recommended is None or recommended.gain >= 0.03


def test_a_page_that_cannot_be_written(numbers: Callable[..., tb.Loader], tmp_path: Path) -> None:
    path = tmp_path / "missing" / "report.html"
    with pytest.raises(FileNotFoundError, match=f'^"{path}": No such file') as caught:
        numbers().report().save(path)
    assert isinstance(caught.value, tb.FileError)
    assert (caught.value.path, caught.value.errno) == (path, errno.ENOENT)
