"""Data made by code, in lockstep with what consumes it: the next round is made while one is used."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, TypeVar

from ._prefetch import prefetch

T = TypeVar("T")


def generate(
    make: Callable[[int], T], *, before: Callable[[int], object] | None = None, rounds: int | None = None
) -> Iterator[T]:
    """Make each round in a thread while the one before it is used: self-play, simulators.

    Parameters
    ----------
    make
        Called with the number of the round, in the thread; returns what the loop gets.
    before
        Called with the number of the round before it is made, in the loop's thread, while nothing is made:
        the place to hand new weights to ``make``. In every run round ``n + 1`` is made with what the loop has
        learned from round ``n - 1``.
    rounds
        How many there are. Default: no end.

    Returns
    -------
    Iterator
        The rounds, in order. What ``make`` or ``before`` raises arrives in place of the round, and ends it.

    Raises
    ------
    ValueError
        If ``rounds`` is negative.

    Examples
    --------
    >>> weight, copy = [1], [0]
    >>> def publish(round):
    ...     copy[0] = weight[0]
    >>> for games in generate(lambda round: [round, copy[0]], before=publish, rounds=4):
    ...     print(games)
    ...     weight[0] *= 2
    [0, 1]
    [1, 1]
    [2, 2]
    [3, 4]
    """
    if rounds is not None and rounds < 0:
        raise ValueError(f"generate: 0 rounds or more wanted, found {rounds}")
    return _Rounds(make, before, rounds)


class _Gate:
    """Lets the thread make one round at a time."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._closed = False
        self.busy = 0.0

    def open(self) -> None:
        self._permits.release()

    def close(self) -> None:
        self._closed = True
        self._permits.release()

    def rounds(self, make: Callable[[int], T], rounds: int | None) -> Iterator[T]:
        for number in count() if rounds is None else range(rounds):
            self._permits.acquire()
            if self._closed:
                return
            start = time.perf_counter()
            try:
                made = make(number)
            finally:
                self.busy += time.perf_counter() - start
            yield made
            del made


class _Rounds(Generic[T]):
    """The iterator that the caller has; dropping it ends the thread."""

    def __init__(
        self, make: Callable[[int], T], before: Callable[[int], object] | None, rounds: int | None
    ) -> None:
        self._gate = _Gate()
        self._before = before
        self._rounds = rounds
        self._asked = 0
        self._error: Exception | None = None
        self._items = iter(prefetch(self._gate.rounds(make, rounds), depth=1))
        weakref.finalize(self, self._gate.close)

    def __iter__(self) -> _Rounds[T]:
        return self

    def __next__(self) -> T:
        if self._asked == 0:
            self._ask()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        item = next(self._items)
        self._ask()
        return item

    def loading(self) -> tuple[float, float]:
        """Return the seconds in ``make``, for `watch`; it does not use the second figure."""
        return self._gate.busy, 0.0

    def _ask(self) -> None:
        """Let the next round be made, with an error of `before` in its place."""
        if self._asked == self._rounds:
            return
        try:
            if self._before is not None:
                self._before(self._asked)
        except BaseException as error:
            self._gate.close()
            if not isinstance(error, Exception):
                raise
            if isinstance(error, StopIteration):
                # It would end the loop as if there were no more rounds (PEP 479).
                stop, error = error, RuntimeError("before raised StopIteration")
                error.__cause__ = stop
            self._error = error
        self._asked += 1
        self._gate.open()
