"""Data made by code, in lockstep with what consumes it: the next round is made while one is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias, TypeVar

from ._drive import called, starter
from ._loop import Loop
from ._twinbuf import _Items
from ._values import instance_of, path_or_none, text_of, whole_or_none

if TYPE_CHECKING:
    from ._twinbuf import _Rounds

T = TypeVar("T")
Hook: TypeAlias = Callable[[int], object]

_ENDLESS = 2**64 - 1


def generate(
    make: Callable[[int], T],
    *,
    before: Callable[[int], object] | None = None,
    after: Callable[[int], object] | None = None,
    rounds: SupportsIndex | None = None,
    name: str = "",
    trace: str | os.PathLike[str] | None = None,
) -> _Rounds[T]:
    """Make each round in a thread while the one before it is used: self-play, simulators.

    Parameters
    ----------
    make
        Called with the number of the round, in the thread; returns what the loop gets.
    before
        Called with the number of each round before that round is made, in the loop's thread, while ``make``
        does not run. Copy new weights for ``make`` here: round ``n + 1`` always has what the loop has learned
        up to round ``n - 1``. After Ctrl-C in it, it is called again for the same round.
    after
        Called with the number of each round when the loop is done with it, the last one too, in the loop's
        thread: when the loop asks for the next round. ``make`` may be running. Save or log here. After Ctrl-C
        in it, it is called again for the same round. It is not called for the round in which a loop is left.
    rounds
        How many there are. Default: no end.
    name
        The name of the loop in its report and trace.
    trace
        A file for a Chrome trace of both threads in the first five rounds.

    Returns
    -------
    Iterator
        The rounds, in order. What ``make``, ``before`` or ``after`` raises arrives in place of the next one,
        and ends them. Threads may share the iterator: one at a time calls ``before`` and ``after`` and takes
        the next round. ``break`` waits for nothing: a round that is being made is finished in the thread, and
        dropped. ``report()`` tells where the time went, with ``before`` and ``after`` as compute, and
        ``close()`` ends them.

    Raises
    ------
    OptionError
        If ``rounds`` is not from 0 to 2**64 - 1, if ``trace`` is empty, or if it or ``name`` cannot be
        encoded.
    FileError
        If the file of ``trace`` cannot be written.

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
    name, trace, found = text_of("name", name), path_or_none("trace", trace), whole_or_none("rounds", rounds)
    limit = _ENDLESS if found is None else found
    for argument, function in (("before", before), ("after", after)):
        if function is not None:
            instance_of(argument, Callable, function, "a function")
    numbers = map(partial(called, "make", instance_of("make", Callable, make, "a function")), count())
    items: _Items[T] = _Items(
        (numbers, None, None), 1, rounds=limit, waits=before is None, name=name or None, trace=trace
    )
    starter(items, name or "twinbuf-generate")()
    return items if before is None and after is None else _Hooked(items, before, after, limit)


class _Hooked(Loop[T]):
    """The rounds of `generate` with ``before`` or ``after``."""

    def __init__(self, items: _Items[T], before: Hook | None, after: Hook | None, rounds: int) -> None:
        super().__init__(items, None if before is None else self._received)
        self._before, self._after, self._rounds = before, after, rounds
        self._line = {}
        # The rounds for which they were called.
        self._asked = self._done = 0
        # What `before` raised, in place of the round.
        self._failed: Exception | None = None

    def _asks(self) -> None:
        if self._after is not None and self._done < self._count:
            try:
                called("after", self._after, self._count - 1)
            except Exception:
                self._done = self._count
                self.close()
                raise
            self._done = self._count
        self._ask(self._count + 1)
        if self._failed is not None and self._asked == self._count + 1:
            self.close()  # Ctrl-C may cut it off: the next call closes again
            # No name of this frame, to which its traceback refers, and no call: Ctrl-C would lose it.
            try:
                raise self._failed
            finally:
                self._failed = None

    def _received(self, item: T) -> T:
        self._ask(self._count + 2)
        return item

    def _ask(self, rounds: int) -> None:
        """Call `before` for the next round, unless it was called for so many, and then let it begin."""
        if self._before is not None and not self._closed and self._asked < min(rounds, self._rounds):
            try:
                called("before", self._before, self._asked)
            except Exception as raised:
                self._failed = raised
            self._asked += 1
            if self._failed is None:
                self._items.grant(self._asked)
