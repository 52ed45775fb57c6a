"""The report: figures, text, page, trace."""

import errno
import html
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import model_of, run_program, spans
from sets import Numbers, loader_of

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
    assert page.startswith("<!DOCTYPE html>") and "<svg" in page and "<pre>train: 3 epochs" in page
    assert "host_depth" not in str(report) + report.advice + page
    loader.close()
    assert "disk_load" in spans(tmp_path / "both.json")


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


def test_a_page_has_names_as_text(tmp_path: Path) -> None:
    """Those of a file and of a loop."""
    code = """
import time
def slow():
    for number in range(20):
        time.sleep(0.001)
        yield number
watched = tb.watch(slow(), name="<x&copy=1>")
for _ in watched:
    time.sleep(0.001)
"""
    space = {"tb": tb}
    exec(compile(code, "<a&lt;`b>", "exec"), space)
    report: tb.Report = space["watched"].report()  # type: ignore[attr-defined]
    report.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    text = html.unescape(re.sub("<[^>]*>", "", page))
    assert "\nTry: <a&lt;`b>:7: put `tb.prefetch(...)` in place of `tb.watch(...)`" in report.advice
    assert text.count(report.advice) == 2 and "<x&copy=1>: " in text, page


@pytest.mark.parametrize("overlap", [True, False])
def test_a_closed_loader_has_completed_its_trace(overlap: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with loader_of(Numbers(64), 8, overlap=overlap, trace=path) as loader:
        assert len([*loader]) == 8
    assert len(spans(path)["disk_load"]) == 8
    del loader


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize(
    "make", [lambda: tb.prefetch([1, 2]), lambda: tb.generate(int), lambda: loader_of(Numbers(64), 8)]
)
def test_the_last_use_of_a_loop_that_is_left_counts(make: Callable[[], Any], within: bool) -> None:
    loop = make()
    for _ in loop:
        time.sleep(0.02)
        if within:
            loop.close()
        break
    loop.close()
    assert loop.report().compute >= 0.02


def test_a_page_that_cannot_be_written(numbers: Callable[..., tb.Loader], tmp_path: Path) -> None:
    path = tmp_path / "missing" / "report.html"
    with pytest.raises(FileNotFoundError, match=f'^"{path}": No such file') as caught:
        numbers().report().save(path)
    assert isinstance(caught.value, tb.FileError)
    assert (caught.value.path, caught.value.errno) == (path, errno.ENOENT)


def test_a_finalizer_reports_what_was_measured(numbers: Callable[..., tb.Loader], tmp_path: Path) -> None:
    """At the end of the program, as the finalizer of a trainer does. It said "Nothing was measured."."""
    numbers()  # makes the file
    model_of(tmp_path, {f"w{layer}": torch.zeros(8) for layer in range(4)})
    code = """
import twinbuf as tb
from sets import Numbers, loader_of

class Trainer:
    def __init__(self):
        files, self.me = tb.Records.open_npy("numbers.npy"), self
        self.loops = [
            loader_of(files, 4),
            loader_of(files, 4, overlap=False),
            loader_of(Numbers(64), 4),
            tb.stream(tb.Tensors.open("model.safetensors"), lambda name: int(name[1])),
            tb.prefetch(range(16)),
            tb.watch(range(16)),
        ]
    def fit(self):
        for loop in self.loops:
            for _ in range(3):
                for _ in loop:
                    pass
        self.broken = iter(self.loops[0])
        next(self.broken)
    def __del__(self):
        print([loop.report().batches for loop in self.loops])
        print([str(loop.report())[:8] for loop in self.loops])
        states = [loop.state_dict() for loop in self.loops[:3]]
        print([(state["epoch"], state["step"]) for state in states])
        try:
            self.loops[0].load_state_dict({**states[0], "version": 99})
        except tb_error as error:
            print(error)

tb_error = tb.CheckpointError
trainer = Trainer()
trainer.fit()
"""
    _, out, errors = run_program(code, cwd=tmp_path)
    lines = out.splitlines()
    assert lines[:1] == [str([49, 48, 48, 12, 48, 48])], errors
    assert lines[1] == str(["4 epochs", *5 * ["3 epochs"]]), lines
    assert lines[2] == "[(3, 1), (3, 0), (3, 0)]" and "version" in lines[3], lines
    assert "Error" not in errors
