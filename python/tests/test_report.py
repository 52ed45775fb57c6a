"""The report: figures, text, page, trace."""

import errno
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
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


def test_the_text_says_what_to_try_in_the_words_of_python(numbers: Callable[..., tb.Loader]) -> None:
    loader = numbers(overlap=False)
    for _ in loader.epochs(3):
        time.sleep(0.001)
        np.zeros(1 << 14).sum()
    report = loader.report()
    assert str(report) == f"{report}" and str(report).endswith(report.advice)
    assert 2 <= len(str(report).splitlines()) <= 5
    tables = f"{report:#}"
    assert tables.startswith(str(report)) and "\nstage " in tables and "\nepoch " in tables
    with pytest.raises(ValueError, match='wanted "" or "#", found ">10"'):
        format(report, ">10")
    assert "from_env" not in tables and "(`" not in tables.replace("(`TWINBUF_", "")


def test_a_page_that_cannot_be_written(numbers: Callable[..., tb.Loader], tmp_path: Path) -> None:
    path = tmp_path / "missing" / "report.html"
    with pytest.raises(FileNotFoundError, match=f'^"{path}": No such file') as caught:
        numbers().report().save(path)
    assert isinstance(caught.value, tb.FileError)
    assert (caught.value.path, caught.value.errno) == (path, errno.ENOENT)
