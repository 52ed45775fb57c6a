"""Watching a loop: what it measures, what it foretells, and that it changes nothing."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest

import twinbuf as tb
from twinbuf import _prefetch, _watch


class Clock:
    """Stands in for the module `time`: time passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cpu = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu

    process_time = thread_time

    def sleep(self, seconds: float, cpu: bool = False) -> None:
        self.now += seconds
        self.cpu += seconds if cpu else 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_watch, "time", clock)
    return clock


class Loads:
    """Loading takes the times given, and finding that there are no more takes `end`."""

    def __init__(self, clock: Clock, loads: list[float], end: float = 0.0, cpu: bool = False) -> None:
        self.clock, self.loads, self.end, self.cpu = clock, loads, end, cpu

    def __len__(self) -> int:
        return len(self.loads)

    def __iter__(self) -> Iterator[int]:
        for number, seconds in enumerate(self.loads):
            self.clock.sleep(seconds, self.cpu)
            yield number
        self.clock.sleep(self.end)


def use(clock: Clock, items: Any, seconds: float) -> None:
    for _ in items:
        clock.sleep(seconds)


def test_the_times_of_a_loop(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    items = tb.watch(Loads(clock, [4.0, 1.0, 1.0, 1.0], end=0.5))
    assert len(items) == 4
    use(clock, items, 3.0)
    report = items.report()
    assert (report.epochs, report.batches) == (1, 4)
    assert report.wall == pytest.approx(19.5)
    assert (report.wait, report.compute) == (pytest.approx(7.5), pytest.approx(12.0))
    assert report.au == pytest.approx(9.0 / 12.5)  # without the first step, 7 s
    assert report.ideal == pytest.approx(12.0)
    assert report.remaining_speedup == pytest.approx(19.5 / 12.0)
    # The first load, and then the longer of each load and its use.
    assert report.with_prefetch == pytest.approx(4.0 + 4 * 3.0, rel=1e-3)
    printed = capsys.readouterr().err
    assert printed == f"{report}\n"
    assert "waited 38%, AU 0.720" in printed and "ComputeBound" in printed
    assert "gain at most 1.62 x, `prefetch` 1.22 x." in printed
    assert "test_watch.py:" in printed and "put `tb.prefetch(...)` in place of `tb.watch(...)`." in printed
    assert "GIL" not in printed


def test_epochs_add_up_and_what_lies_between_them_does_not_count(clock: Clock) -> None:
    items = tb.watch(Loads(clock, [1.0, 1.0]))
    for _ in range(3):
        use(clock, items, 1.0)
        clock.sleep(50.0)
    report = items.report()
    assert (report.epochs, report.batches, report.wall) == (3, 6, pytest.approx(12.0))
    assert report.with_prefetch == pytest.approx(3 * 3.0, rel=1e-3)
    assert report.verdict == "Balanced"
    assert [(step.epoch, step.step) for step in report.steps] == [(e, s) for e in range(3) for s in range(2)]


def test_what_happens_before_the_first_item_is_asked_for_does_not_count(clock: Clock) -> None:
    items = tb.watch(Loads(clock, [1.0, 1.0]))
    iterator = iter(items)
    clock.sleep(50.0)
    use(clock, iterator, 1.0)
    assert items.report().wall == pytest.approx(4.0)


def test_a_loop_that_is_left_early_is_reported(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    items = tb.watch(Loads(clock, [1.0] * 100))
    for number in items:
        clock.sleep(2.0)
        if number == 4:
            break
    gc.collect()
    assert items.report().wall == pytest.approx(15.0)
    assert capsys.readouterr().err.startswith("5 batches in 15.000 s, waited 33%")


def test_an_error_of_the_iterable_passes(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        use(clock, tb.watch(failing(), name="valid"), 1.0)
    assert capsys.readouterr().err.startswith("valid: 1 batch in")


def test_it_is_on_demand(clock: Clock) -> None:
    items = tb.watch(Loads(clock, [1.0] * 10))
    assert str(items.report()) == "Nothing was measured."
    for number in items:
        clock.sleep(1.0)
        if number == 1:
            assert items.report().batches == 2
    assert items.report().batches == 10


@pytest.mark.parametrize(
    ("load", "use_", "wanted"),
    [
        ([1.0] * 20, 10.0, "put `tb.prefetch"),
        ([0.1] * 20, 10.0, "no loader makes this faster"),
        ([10.0] * 20, 0.1, "The loading decides"),
        ([2e-5] * 20, 2e-5, "The stages are balanced"),  # a hand-off takes longer
    ],
)
def test_the_advice_names_the_line_only_where_it_helps(
    clock: Clock, load: list[float], use_: float, wanted: str
) -> None:
    items = tb.watch(Loads(clock, load))
    use(clock, items, use_)
    assert wanted in items.report().advice


def test_loading_by_the_processor_is_told_of_the_gil(clock: Clock) -> None:
    items = tb.watch(Loads(clock, [1.0] * 20, cpu=True))
    use(clock, items, 1.0)
    assert "GIL" in items.report().advice


@pytest.mark.parametrize(
    ("processors", "cpu", "least", "told"),
    [
        (2, True, 1.0, "`prefetch` 1.00 to 1.90 x."),  # they may share a core
        (3, True, 1.5, "`prefetch` 1.50 to 1.90 x."),
        (4, True, 1.904, "`prefetch` 1.90 x."),
        (2, False, 1.904, "`prefetch` 1.90 x."),
    ],
)
def test_the_gain_is_a_range_where_processors_may_be_too_few(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, processors: int, cpu: bool, least: float, told: str
) -> None:
    monkeypatch.setattr(_watch, "_processors", lambda: processors)
    items = tb.watch(Loads(clock, [1.0] * 20, cpu=cpu))
    for _ in items:
        clock.sleep(1.0, cpu)
    report = items.report()
    assert report.wall == pytest.approx(40.0)
    assert report.wall / report.with_prefetch == pytest.approx(1.904, rel=1e-3)
    assert report.wall / report.with_prefetch_at_worst == pytest.approx(least, rel=1e-3)
    assert told in str(report)


def test_workers_that_decide(clock: Clock) -> None:
    loads = Loads(clock, [1.0] * 20)
    loads.num_workers = 2  # type: ignore[attr-defined]
    items = tb.watch(loads)
    use(clock, items, 1.0)
    report = items.report()
    assert report.overlap and report.with_prefetch is None
    assert report.remaining_speedup == 1.0
    assert "raise `num_workers`, which is 2" in report.advice


def test_workers_whose_batches_the_loop_unpacks(clock: Clock) -> None:
    loads = Loads(clock, [1.0] * 20, cpu=True)
    loads.num_workers = 2  # type: ignore[attr-defined]
    items = tb.watch(loads)
    use(clock, items, 2.0)
    report = items.report()
    assert report.remaining_speedup == pytest.approx(1.5)
    assert "put `tb.prefetch(...)` around it" in report.advice


def test_a_prefetched_loop_has_the_loads_of_the_thread(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each thread has a clock of its own: they run side by side in any way.
    threads = Clock()
    monkeypatch.setattr(_prefetch, "time", threads)
    items = tb.watch(tb.prefetch(Loads(threads, [2.0] * 50)))
    use(clock, items, 3.0)
    report = items.report()
    assert report.overlap and report.with_prefetch is None
    assert (report.load, report.wall) == (pytest.approx(100.0), pytest.approx(150.0))


def test_a_loader_is_asked_for_its_own_report(tmp_path: Any) -> None:
    np = pytest.importorskip("numpy")
    np.save(tmp_path / "x.npy", np.zeros((64, 4), "float32"))
    data = tb.Records.open_npy(tmp_path / "x.npy")
    for overlap in (True, False):
        loader = tb.Loader(data, tb.Plan(data, batch=4), overlap=overlap)
        items = tb.watch(loader)
        assert len([batch.release() for batch in items]) == 16
        report = items.report()
        assert report.batches == 16 and report.overlap == overlap and report.with_prefetch is None
        assert report.load == loader.report().load > 0
        assert report.advice == loader.report().advice


def test_items_and_attributes_are_those_of_the_iterable() -> None:
    class Item:
        pass

    class Items:
        batch_size = 3

        def __iter__(self) -> Iterator[Item]:
            return (Item() for _ in range(3))

    items = tb.watch(Items())
    assert items.batch_size == 3
    iterator = iter(items)
    item = next(iterator)
    alive = weakref.ref(item)
    del item
    assert alive() is None
    with pytest.raises(TypeError):
        len(items)


def test_the_trace_and_the_picture(clock: Clock, tmp_path: Any) -> None:
    items = tb.watch(Loads(clock, [1.0, 2.0]), name="<train>")
    use(clock, items, 3.0)
    report = items.report()
    report.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("wait", 0.0, 1e6),
        ("compute", 1e6, 3e6),
        ("wait", 4e6, 2e6),
        ("compute", 6e6, 3e6),
    ]
    page = ElementTree.fromstring(report._repr_html_())
    svg = page[0]
    assert svg.tag.endswith("svg")
    texts = [each.text for each in svg if each.tag.endswith("text")]
    assert texts == ["as it was", "with prefetch", "at best", "last 2 steps"]
    assert "&lt;train&gt;" in report._repr_html_()
    assert report.to_dict()["with_prefetch"] == pytest.approx(7.0, rel=1e-3)


def test_the_simulation_is_what_a_thread_two_ahead_does() -> None:
    def reference(loads: list[float], uses: list[float]) -> float:
        loaded, taken, free = 0.0, [], 0.0
        for number, load in enumerate(loads):
            room = taken[number - 2] if number >= 2 else 0.0
            loaded = max(loaded, room) + load
            taken.append(max(loaded, free))
            free = taken[-1] + uses[number]
        return free

    loads = [1.0, 5.0, 1.0, 1.0, 7.0, 0.5, 0.5, 3.0]
    uses = [2.0, 2.0, 9.0, 1.0, 1.0, 4.0, 0.1, 2.0]
    ahead = _watch._Ahead()
    for load, used in zip(loads, uses, strict=True):
        ahead.load(load)
        ahead.use(used)
    ahead.load(0.0)
    assert ahead.wall == pytest.approx(reference(loads, uses), rel=1e-3)
