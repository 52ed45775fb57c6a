"""Measures where the time of any loop goes, without changing what it does."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice, repeat
from typing import Any, Generic, TypeVar

from ._prefetch import Around, Prefetcher
from ._report import Report
from ._twinbuf import _Recorder
from ._values import path_or_none, text_of
from .errors import LoaderTimeoutError

T = TypeVar("T")


def watch(
    iterable: Iterable[T], name: str = "", *, trace: str | os.PathLike[str] | None = None
) -> Watched[T]:
    """Measure how long a loop waits for its items, and how long it uses them.

    At the end of a loop, also if it is left early, the report is printed to the standard error stream, once
    items have come: the share of waiting, the accelerator utilization (AU), and if overlap may pay, the line
    to change and what that saves at most.

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
        An iterable with the length and public attributes of ``iterable``, and ``report()`` at any time.

    Notes
    -----
    Times are wall-clock times of the thread that runs the loop. Nothing is synchronized: where steps only
    enqueue work on a device, the time that the device needs shows as compute at the line that waits for it,
    as ``loss.item()`` does, and what the device still does while the loop waits for an item counts as
    waiting.

    For a `Loader`, `prefetch`, `generate` or `stream`, it is the report of that.

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

    Public attributes that it does not have itself are those of the iterable, but ``send`` and ``throw``.
    """

    def __init__(
        self, iterable: Iterable[T], name: str, line: str, trace: str | os.PathLike[str] | None
    ) -> None:
        self._iterable = iterable
        self._name, self._line = text_of("name", name), line
        # That of a loop of this package. An iterable of the program may have a `report` for something else.
        ours = any(kind.__module__.startswith("twinbuf.") for kind in type(iterable).__mro__)
        self._own: Callable[[], Report] | None = getattr(iterable, "report", None) if ours else None
        workers = getattr(iterable, "num_workers", 0)
        ahead = isinstance(workers, int) and workers > 0 and not isinstance(iterable, Prefetcher)
        self._recorder = _Recorder(name=name or None, trace=path_or_none("trace", trace), workers=ahead)
        self._epochs = count()

    def __iter__(self) -> Iterator[T]:
        """Start an epoch."""
        return _Epoch(self, next(self._epochs))

    def report(self) -> Report:
        """Return where the time went up to now, in all epochs."""
        return self._own() if self._own else self._recorder.report(self._name, self._line)


class _Epoch(Generic[T]):
    """Hands on the items of an epoch as they are. After Ctrl-C the next call has the item that came."""

    # Whether the report was printed: until the epoch has begun, as if it was; and whether for an error.
    _ended, _failed = True, False

    def __init__(self, watched: Watched[T], epoch: int) -> None:
        start = time.perf_counter()
        self._watched, self._epoch, self._step = watched, epoch, 0
        self._came: list[T] = []
        self._pid = os.getpid()
        # `iter` is called once, as a loop does: it may start again.
        self._items = map(next, repeat(watched._begin()))
        # The time of `iter` is a wait for the first item.
        self._begun, self._ended = time.perf_counter() - start, False

    def __iter__(self) -> _Epoch[T]:
        return self

    def __next__(self) -> T:
        self._watched._recorder.asked(self._begun)
        self._begun = 0.0
        # A list for each call: threads may share the iterator, and wait here at once.
        came, self._came = self._came, []
        try:
            # One call from C: an item that comes is in the list before any signal is handled.
            came.extend(islice(self._items, not came))
            if not came:
                raise StopIteration
            self._watched._recorder.received(self._epoch, self._step)
            # From here to the end nothing is called, so no signal is handled.
            item, *came = came
            self._step += 1
            self._ended = self._ended and not self._failed  # after an error the iterator has gone on
            return item
        except Exception as raised:
            if not isinstance(raised, LoaderTimeoutError):  # the next call waits again
                self._end(not isinstance(raised, StopIteration))
            raise
        finally:
            self._came += came

    def close(self) -> None:
        self._items, self._came = map(next, ()), []
        self._end()

    def _end(self, failed: bool = False) -> None:
        """End the epoch, and print the report, of several errors only for the first one."""
        # A forked child must not end its parent's loop.
        if not self._ended and not (failed and self._failed) and self._pid == os.getpid():
            self._ended, self._failed = True, failed
            self._watched._recorder.ended()
            if (report := self._watched.report()).batches and sys.stderr is not None:
                with contextlib.suppress(OSError, ValueError):  # closed: the program has trained all the same
                    print(report, file=sys.stderr)

    def __del__(self) -> None:
        self._end()


class _Stateful(Watched[T]):
    """A `Watched` of an iterable with a state. Trainers look for these methods in the class."""

    def state_dict(self) -> Any:
        """Return the state of the iterable."""
        return self._iterable.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Set the state of the iterable."""
        self._iterable.load_state_dict(state)  # type: ignore[attr-defined]
