"""The loader's report: figures, text, picture, trace."""

import json
from collections.abc import Callable
from pathlib import Path

import twinbuf as tb


def test_figures_text_picture_and_trace(numbers: Callable[..., tb.Loader], tmp_path: Path) -> None:
    loader = numbers(name="train", trace=tmp_path / "both.json")
    assert "Nothing was measured" in str(loader.report())
    for batch in loader.epochs(3):
        sum(batch.numpy().ravel().tolist())
    report = loader.report()
    assert (report.name, report.epochs, report.batches, report.bytes) == ("train", 3, 48, 64 * 32 * 3)
    assert report.overlap
    assert 0 < report.wait + report.compute <= report.wall * 1.001
    assert str(report).startswith("3 epochs, 48 batches")
    assert "host_depth" not in str(report)
    figures = json.loads(json.dumps(report.to_dict()))
    assert figures["batches"] == 48
    assert figures["verdict"] == report.verdict
    html = report._repr_html_()
    assert html.startswith("<div>")
    assert "wait" in html
    assert [(step.epoch, step.step) for step in report.steps] == [(e, s) for e in range(3) for s in range(16)]
    report.trace(tmp_path / "steps.json")
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    assert [event["name"] for event in events[1:5]] == ["wait", "compute"] * 2
    loader.close()
    rows = {event.get("name") for event in json.loads((tmp_path / "both.json").read_text())}
    assert "disk_load" in rows


def test_the_steps_are_the_whole(numbers: Callable[..., tb.Loader]) -> None:
    def differs() -> float:
        loader = numbers()
        for batch in loader.epochs(3):
            sum(batch.numpy().ravel().tolist())
        report = loader.report()
        return abs(sum(step.wait + step.compute for step in report.steps) / report.wall - 1)

    # Two clocks, between whose readings other programs may run.
    assert any(differs() < 0.2 for _ in range(100))


def test_long_runs_keep_the_newest_steps(numbers: Callable[..., tb.Loader]) -> None:
    loader = numbers()
    for _ in loader.epochs(70):
        pass
    steps = loader.report().steps
    assert (len(steps), steps[-1].epoch, steps[-1].step) == (1024, 69, 15)
