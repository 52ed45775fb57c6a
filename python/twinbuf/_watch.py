"""Measures where the time of any loop goes, without changing what it does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

from ._prefetch import Around, Prefetcher
from ._twinbuf import Report, _Recorder, _Watch

T = TypeVar("T")


def watch(
    iterable: Iterable[T], name: str = "", *, trace: str | os.PathLike[str] | None = None
) -> Watched[T]:
    """Measure how long a loop waits for its items, and how long it uses them.

    At the end of the loop, also if it is left early, the report is printed to the standard error stream: the
    share of waiting, the accelerator utilization (AU), the line to change, and what that saves at most.

    Parameters
    ----------
    iterable
        What the loop iterates over. Its items are handed on as they are.
    name
        The name of the loop in the report, if there are several.
    trace
        A file for a Chrome trace of the first five epochs of the loop.

    Returns
    -------
    Watched
        An iterable with the length and the attributes of ``iterable``, and ``report()`` at any time.

    Notes
    -----
    Times are wall-clock times of the thread that runs the loop. Nothing is synchronized: where steps only
    enqueue work on a device, the time that the device needs shows as compute at the line that waits for it,
    as ``loss.item()`` does, and what the device still does while the loop waits for an item counts as
    waiting.

    What iterates over a `Loader`, `prefetch` or `generate` gets the report of that.

    Examples
    --------
    >>> squares = watch(n * n for n in range(4))
    >>> sum(squares)
    14
    >>> squares.report().batches
    4
    """
    frame = sys._getframe(1)
    folder, file = os.path.split(frame.f_code.co_filename)
    # A cell of a notebook is a temporary file.
    cell = os.path.basename(folder).startswith("ipykernel_") or file.startswith("<ipython-input")
    line = f"{'the cell, line ' if cell else file + ':'}{frame.f_lineno}"
    kind: type[Watched[T]] = _Stateful if hasattr(iterable, "state_dict") else Watched
    return kind(iterable, name, line, trace)


class Watched(Around[T]):
    """An iterable whose loop is measured. Made by :func:`watch`.

    Attributes that it does not have itself are those of the iterable.
    """

    def __init__(
        self, iterable: Iterable[T], name: str, line: str, trace: str | os.PathLike[str] | None
    ) -> None:
        self._iterable = iterable
        self._name, self._line = name, line
        self._own: Callable[[], Any] | None = getattr(iterable, "report", None)
        if not callable(self._own) or not isinstance(self._own(), Report):
            self._own = None
        workers = getattr(iterable, "num_workers", 0)
        ahead = isinstance(workers, int) and workers > 0 and not isinstance(iterable, Prefetcher)
        self._recorder = _Recorder(name=name, trace=trace, workers=ahead)
        self._epochs = 0

    def __iter__(self) -> Iterator[T]:
        """Start an epoch."""
        self._epochs += 1
        items: _Watch[T] = _Watch(self._iterable, self._recorder, self._epochs - 1, self._end())
        return items

    def report(self) -> Report:
        """Return where the time went up to now, in all epochs."""
        if self._own is not None:
            report: Report = self._own()
            return report
        return self._recorder.report(self._name, self._line)

    def _end(self) -> Generator[None, None, None]:
        """Return a generator that ends an epoch and prints the report when it is closed."""
        try:
            yield
        finally:
            self._recorder.ended()
            if (report := self.report()).batches:
                print(report, file=sys.stderr)


class _Stateful(Watched[T]):
    """A `Watched` of an iterable with a state. Trainers look for these methods in the class."""

    def state_dict(self) -> Any:
        """Return the state of the iterable."""
        return self._iterable.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Set the state of the iterable."""
        self._iterable.load_state_dict(state)  # type: ignore[attr-defined]
