"""Rounds made by code: in order, in lockstep with the weights, and with nothing left behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
import types
from typing import Any

import pytest
from conftest import in_a_fork, in_threads, wait_for_threads

import twinbuf as tb


@pytest.mark.parametrize("rounds", [0, 1, 2, 20])
def test_each_round_has_the_weights_of_two_before(rounds: int) -> None:
    weight, copy, seen = [0], [0], []
    threads = set()

    def before(number: int) -> None:
        threads.add(threading.get_ident())
        copy[0] = weight[0]

    def make(number: int) -> tuple[int, int]:
        assert threading.get_ident() not in threads
        return number, copy[0]

    for games in tb.generate(make, before=before, rounds=rounds):
        seen.append(games)
        weight[0] += 1
    assert seen == [(number, max(0, number - 1)) for number in range(rounds)]
    assert threads <= {threading.get_ident()}


def test_no_round_is_made_before_the_loop_asks() -> None:
    for _ in range(20):
        asked = threading.Event()
        rounds = tb.generate(lambda number, asked=asked: asked.is_set(), rounds=3)
        # Many chances for a thread that would not wait.
        for _ in range(20):
            time.sleep(0)
        asked.set()
        assert list(rounds) == [True] * 3


def test_the_next_round_is_made_while_one_is_used() -> None:
    meet = threading.Barrier(2, timeout=300)

    def make(number: int) -> int:
        if number:
            meet.wait()
        return number

    for number in tb.generate(make, rounds=5):
        if number < 4:
            meet.wait()  # the loop and the next round are at work


def test_nothing_is_made_while_before_runs() -> None:
    making = threading.Lock()

    def make(number: int) -> int:
        with making:
            return number

    def before(number: int) -> None:
        assert making.acquire(blocking=False)
        making.release()

    assert sum(tb.generate(make, before=before, rounds=200)) == 19900


@pytest.mark.parametrize("where", ["make", "before"])
def test_an_error_takes_the_place_of_its_round(where: str) -> None:
    def fail(number: int) -> int:
        if number == 3:
            raise OSError("lost")
        return number

    rounds = tb.generate(**{"make": int, where: fail}, rounds=9)
    got = [next(rounds) for _ in range(3)]
    with pytest.raises(OSError, match="lost"):
        next(rounds)
    assert got == [0, 1, 2]
    with pytest.raises(StopIteration):
        next(rounds)


def test_leaving_early_ends_the_thread() -> None:
    for number in tb.generate(int):
        if number == 3:
            break
    wait_for_threads()


def test_it_is_known_to_watch() -> None:
    items = tb.watch(tb.generate(lambda number: sum(range(1000)), rounds=9))
    assert len(list(items)) == 9
    report = items.report()
    assert report.overlap and report.load > 0 and report.batches == 9
    assert "9 rounds" in str(report)


def test_ctrl_c_in_before_takes_nothing_away() -> None:
    asked, interrupts = [], [2, 2, 3]

    def before(number: int) -> None:
        asked.append(number)
        if interrupts and interrupts[0] == number:
            interrupts.pop(0)
            raise KeyboardInterrupt

    rounds = tb.generate(int, before=before, rounds=5)
    got = []
    while len(got) < 5:
        with contextlib.suppress(KeyboardInterrupt):
            got.append(next(rounds))
    assert got == [0, 1, 2, 3, 4] and list(rounds) == []
    assert asked == [0, 1, 2, 2, 2, 3, 3, 4]


def test_after_runs_when_the_loop_is_done_with_a_round_with_the_last_one_too() -> None:
    calls: list[Any] = []
    hooks = {name: lambda number, name=name: calls.append((name, number)) for name in ("before", "after")}
    rounds = tb.generate(int, rounds=3, **hooks)
    for number in rounds:
        calls.append(number)
    assert list(rounds) == []
    order = [("before", 0), ("before", 1), 0, ("after", 0), ("before", 2), 1, ("after", 1), 2, ("after", 2)]
    assert calls == order
    calls.clear()
    for number in tb.generate(int, after=calls.append, rounds=3):
        if number == 1:
            break
    assert calls == [0]


def test_ctrl_c_and_errors_in_after() -> None:
    asked, raised = [], [KeyboardInterrupt(), KeyboardInterrupt()]

    def after(number: int) -> None:
        asked.append(number)
        if number == 1 and raised:
            raise raised.pop()
        if number == 3:
            raise OSError("full")

    rounds, got = tb.generate(int, after=after), []
    with pytest.raises(OSError, match="full"):
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                got.append(next(rounds))
    assert got == [0, 1, 2, 3] and asked == [0, 1, 1, 1, 2, 3]
    assert list(rounds) == []


@pytest.mark.parametrize("hooks", [{}, {"before": int}, {"after": int}])
def test_rounds_that_are_closed_twice_stay_closed(hooks: dict[str, Any]) -> None:
    rounds = tb.generate(int, **hooks)
    assert next(rounds) == 0
    rounds.close()
    rounds.close()
    assert list(rounds) == []


def test_before_is_called_for_no_round_that_close_has_ended() -> None:
    asked = list[int]()
    rounds = tb.generate(int, before=asked.append)
    rounds.close()
    assert list(rounds) == asked == []


def test_an_interrupted_close_keeps_the_error_of_before() -> None:
    def before(number: int) -> None:
        if number == 1:
            raise ValueError("mine")

    rounds: Any = tb.generate(int, before=before)
    assert next(rounds) == 0
    close, cut = rounds.close, [KeyboardInterrupt()]

    def close_once_cut_off() -> None:
        if cut:
            raise cut.pop()
        close()

    rounds.close = close_once_cut_off
    with pytest.raises(KeyboardInterrupt):
        next(rounds)
    with pytest.raises(ValueError, match="mine"):
        next(rounds)


def test_an_interrupt_after_any_call_keeps_the_error_of_before() -> None:
    """After one of them the rounds came to their end instead."""

    def before(number: int) -> None:
        if number == 1:
            raise ValueError("mine")

    def interrupt(frame: types.FrameType, event: str, _: object) -> None:
        # After a call the interpreter handles signals.
        if event == "c_return" and frame.f_code.co_filename.endswith("_generate.py") and not left.pop():
            raise KeyboardInterrupt

    for calls in itertools.count():
        rounds, left = tb.generate(int, before=before), [False, *[True] * calls]
        assert next(rounds) == 0
        sys.setprofile(interrupt)
        try:
            with pytest.raises((KeyboardInterrupt, ValueError)) as raised:
                next(rounds)
        finally:
            sys.setprofile(None)
        if raised.type is ValueError:
            break
        with pytest.raises(ValueError, match="mine"):
            next(rounds)
    assert calls > 0


@pytest.mark.parametrize("hooks", [("before",), ("after",), ("before", "after")])
def test_threads_that_share_the_rounds_call_each_hook_once_and_in_order(hooks: tuple[str, ...]) -> None:
    calls: dict[str, list[int]] = {"before": [], "after": []}
    inside: list[int] = []

    def hook(name: str, number: int) -> None:
        inside.append(number)
        time.sleep(0.0005)  # another thread runs
        assert inside == [number], "two threads call hooks"
        inside.clear()
        calls[name].append(number)

    of = {name: functools.partial(hook, name) for name in hooks}
    rounds, got = tb.generate(int, rounds=30, **of), []
    in_threads(4, lambda _: got.extend(rounds))
    assert sorted(got) == list(range(30))
    assert all(calls[name] == list(range(30)) for name in hooks)


def test_a_forked_process_waits_for_no_thread_that_it_has_not() -> None:
    go, stay = threading.Event(), threading.Event()
    rounds = tb.generate(int, after=lambda number: (go.set(), stay.wait()))
    thread = threading.Thread(target=lambda: (next(rounds), next(rounds)))
    thread.start()
    go.wait()

    def refuses() -> int:
        stay.set()
        with pytest.raises(tb.ForkedError):
            next(rounds)
        return 3

    assert in_a_fork(refuses) == 3
    stay.set()
    thread.join()


def test_a_forked_process_calls_no_hook() -> None:
    called: list[int] = []
    rounds = tb.generate(int, before=called.append, after=called.append)
    assert next(rounds) == 0
    before = list(called)

    def refuses() -> int:
        with pytest.raises(tb.ForkedError):
            next(rounds)
        return 3 if called == before else 4

    assert in_a_fork(refuses) == 3
