"""Watching a loop: what it measures, what it says, and that it changes nothing."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import Rewinding, in_threads, run_program, saved, spans
from sets import Gated, loader_of

import twinbuf as tb


class Loads:
    """Items that each take a while, without the GIL."""

    def __init__(self, length: int, seconds: float = 0.0) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            time.sleep(self.seconds)
            yield number


def use(items: Any, seconds: float) -> None:
    for _ in items:
        time.sleep(seconds)


def test_a_loop_in_turn_is_told_what_a_thread_gains(capsys: pytest.CaptureFixture[str]) -> None:
    items = tb.watch(Loads(20, 0.01))
    assert len(items) == 20
    use(items, 0.01)
    report = items.report()
    assert (report.epochs, report.batches, report.overlap) == (1, 20, False)
    assert report.wall == pytest.approx(report.wait + report.compute)
    assert report.load == pytest.approx(report.wait, rel=0.2)
    printed = capsys.readouterr().err
    assert printed == f"{report}\n"
    assert "test_watch.py:" in printed and "put `tb.prefetch(...)` in place of `tb.watch(...)`" in printed
    assert "It saves at most " in printed
    assert "overlap(" not in printed and "loader" not in printed


def test_what_happens_before_the_first_item_is_asked_for_does_not_count() -> None:
    items = tb.watch(Loads(2))
    iterator = iter(items)
    time.sleep(0.2)
    use(iterator, 0.0)
    assert items.report().wall < 0.2


def test_the_time_of_iter_does() -> None:
    class Slow:
        def __iter__(self) -> Iterator[int]:
            time.sleep(0.05)
            return iter([1, 2])

    items = tb.watch(Slow())
    assert list(items) == [1, 2]
    assert items.report().wait >= 0.05


class Cell:
    loop: Iterator[Any]
    itself: Cell


@pytest.mark.parametrize("around", [iter, tb.prefetch])
def test_a_loop_that_the_collector_frees_is_reported(around: Any, capsys: pytest.CaptureFixture[str]) -> None:
    items: list[Any] = [0, 1, 2]
    watched = tb.watch(around(items))
    # The collector empties what is older first: what is watched before the loop over it is freed.
    cell = Cell()
    cell.itself, cell.loop = cell, iter(watched)
    items.append(cell)
    assert next(cell.loop) == 0
    alive = weakref.ref(watched)
    del items, watched, cell
    gc.collect()
    assert alive() is None
    assert capsys.readouterr().err.startswith("1 epoch, 1 batch in")


def test_an_error_of_the_iterable_passes(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        use(tb.watch(failing(), name="valid"), 0.0)
    assert capsys.readouterr().err.startswith("valid: 1 epoch, 1 batch in")


def test_a_loop_that_goes_on_after_an_error_is_reported_at_its_end(capsys: Any) -> None:
    class Fails(Rewinding):
        def __next__(self) -> int:
            if (number := super().__next__()) in (2, 4, 6):
                raise OSError
            return number

    items = iter(tb.watch(Fails(9)))
    assert next(items) == 1
    with pytest.raises(OSError):
        next(items)
    assert capsys.readouterr().err.startswith("1 epoch, 1 batch in")
    # One report is enough for all errors.
    for number in (3, 5):
        assert next(items) == number
        with pytest.raises(OSError):
            next(items)
    assert capsys.readouterr().err == ""
    assert list(items) == [7, 8, 9]
    assert "epochs, 6 batches in" in capsys.readouterr().err


def test_a_thread_that_gets_the_last_item_after_the_end_prints_no_second_report(capsys: Any) -> None:
    def wait() -> Iterator[int]:
        yield 0
        inside.set()
        go.wait(60)
        yield 1

    inside, go = threading.Event(), threading.Event()
    items = iter(tb.watch(wait()))
    assert next(items) == 0
    with ThreadPoolExecutor(1) as other:
        last = other.submit(next, items)
        assert inside.wait(60)
        items.close()
        go.set()
        assert last.result() == 1
    assert list(items) == []
    assert capsys.readouterr().err.count("epoch") == 1


def test_a_wait_with_a_limit_is_no_end_of_the_loop(capsys: Any) -> None:
    """The report came at the first limit, and none at the end."""
    data = Gated(4)
    items = iter(tb.watch(loader_of(data, 4).epochs(1, timeout=0.01)))
    assert next(items).step == 0
    for _ in range(2):
        with pytest.raises(TimeoutError):
            next(items)
    assert capsys.readouterr().err == ""
    data.go.set()
    with contextlib.suppress(StopIteration):
        while True:
            with contextlib.suppress(TimeoutError):
                next(items)
    assert capsys.readouterr().err.startswith("1 epoch, 2 batches")


@pytest.mark.parametrize("raised", [None, ZeroDivisionError, KeyboardInterrupt])
def test_a_loop_that_is_left_early_is_reported(
    raised: type[BaseException] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        for item in items:
            if item == 2 and raised:
                raise raised("of the loop")
            if item == 2:
                break

    items = tb.watch(Loads(5))
    # The iterator is dropped while the exception leaves the function.
    with pytest.raises(raised, match="of the loop") if raised else contextlib.nullcontext():
        train()
    assert items.report().batches == 3
    assert capsys.readouterr().err.startswith("1 epoch, 3 batches in")


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [Broken(), closed(), None])
def test_a_report_that_cannot_be_printed_ends_no_loop(
    stream: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    items = tb.watch(Loads(3))
    for epoch in range(2):
        assert list(items) == [0, 1, 2]
        assert items.report().epochs == epoch + 1
    for _ in items:
        break
    assert capsys.readouterr() == ("", "")


def test_threads_that_share_the_iterator_get_each_item_once() -> None:
    all_wait = threading.Barrier(3)

    def wait(number: int) -> int:
        if number < 3:
            all_wait.wait(300)
        return number

    items, got = iter(tb.watch(map(wait, range(100)))), list[int]()
    in_threads(3, lambda _: got.extend(items))
    assert sorted(got) == list(range(100))


class Bare:
    """Its iterator has no ``__iter__``, which a loop does not call."""

    class Numbers:
        next, last = 0, 3

        __next__ = Rewinding.__next__

    def __iter__(self) -> Any:
        return self.Numbers()


@pytest.mark.parametrize("around", [tb.watch, tb.prefetch, lambda items: tb.prefetch(tb.watch(items))])
@pytest.mark.parametrize("iterable", [lambda: Rewinding(3), Bare])
def test_iter_is_called_once_as_a_loop_does(iterable: Any, around: Any) -> None:
    items = around(iterable())
    for _ in range(2):
        assert list(zip(items, range(9), strict=False)) == [(1, 0), (2, 1), (3, 2)]


def test_it_is_on_demand_and_epochs_add_up() -> None:
    items = tb.watch(Loads(10))
    assert str(items.report()) == "Nothing was measured."
    for number in items:
        if number == 1:
            assert items.report().batches == 2
    assert items.report().batches == 10
    assert list(items) == list(items) == list(range(10))
    assert (items.report().epochs, items.report().batches) == (3, 30)


def test_workers_that_decide() -> None:
    loads = Loads(20, 0.01)
    loads.num_workers = 2  # type: ignore[attr-defined]
    items = tb.watch(loads)
    use(items, 0.001)
    report = items.report()
    assert report.overlap
    assert report.verdict == "LoadBound"
    assert "The workers of the iterable make them: start more, or make loading cheaper: " in report.advice


def test_a_report_of_the_programs_own_is_something_else() -> None:
    class Own(Loads):
        def report(self, path: str) -> None:
            raise AssertionError("called")

    items = tb.watch(Own(2))
    assert list(items) == [0, 1] and items.report().batches == 2


def test_what_has_a_report_is_asked_for_it(tmp_path: Any) -> None:
    data = saved(tmp_path / "x.npy", np.zeros((64, 4), "float32"))
    for overlap in (True, False):
        loader = tb.Loader(data, tb.Plan(data, batch=4), overlap=overlap)
        for watched in (lambda: loader, lambda: loader.epoch(1)):  # noqa: B023
            items = tb.watch(watched())
            assert len([batch.release() for batch in items]) == 16
            assert items.report().to_dict() == loader.report().to_dict()
        assert items.report().overlap == overlap and items.report().batches == 32
    items = tb.watch(tb.prefetch(Loads(9), depth=4))
    assert len(list(items)) == 9
    assert (items.report().batches, items.report().depth) == (9, 4)


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


def test_the_trace(tmp_path: Any) -> None:
    items = tb.watch(Loads(3), name="train", trace=tmp_path / "trace.json")
    use(items, 0.0)
    del items
    gc.collect()
    found = spans(tmp_path / "trace.json")
    assert [event["args"]["step"] for event in found["train"]] == [0, 1, 2]
    assert [event["args"]["step"] for event in found["queue_wait"][:3]] == [0, 1, 2]


FORKED = """
import os, sys, twinbuf as tb
for item in tb.watch(range(20), "mine"):
    if item == 3:
        if (child := os.fork()) == 0:
            sys.exit(0)
        os.waitpid(child, 0)
"""


def test_a_forked_process_does_not_report_the_loop() -> None:
    code, _, errors = run_program(FORKED)
    assert code == 0 and errors.count("mine") == 1, errors
