"""Measures where the time of any loop goes, without changing what it does."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ._prefetch import Prefetcher
from ._twinbuf import _Recorder
from .report import Report

T = TypeVar("T")

# From this speedup on a change is worth naming: runs differ by less by themselves. The same as in Rust.
_WORTH_IT = 1.05

# The depth of `prefetch` whose gain is foretold, its default.
_DEPTH = 2

# Seconds to hand an item from one thread to another; more where processors are busy.
_HAND_OFF = 50e-6


def watch(iterable: Iterable[T], name: str = "") -> Watched[T]:
    """Measure how long a loop waits for its items, and how long it uses them.

    At the end of the loop, also if it is left early, the report is printed to the standard error stream: the
    share of waiting, the accelerator utilization (AU), what overlap can gain, and the line to change.

    Parameters
    ----------
    iterable
        What the loop iterates over. Its items are handed on as they are.
    name
        The name of the loop in the report, if there are several.

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

    The gain is foretold for loading that releases the GIL, as reading, decoding and numpy do. Python code
    that holds it gains less; worker processes help there. Where loading and use both keep processors busy,
    and there may not be enough of them, the gain is a range: two processors often share a core, and how much
    they slow each other down shows only side by side. ``watch(prefetch(...))`` measures that.

    Examples
    --------
    >>> squares = watch(n * n for n in range(4))
    >>> sum(squares)
    14
    >>> squares.report().batches
    4
    """
    frame = sys._getframe(1)
    return Watched(iterable, name, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")


class Watched(Generic[T]):
    """An iterable that is measured. Made by :func:`watch`.

    Attributes that it does not have itself are those of the iterable.
    """

    def __init__(self, iterable: Iterable[T], name: str, line: str) -> None:
        self._iterable = iterable
        self._record = _Record(name, line, _workers(iterable), _own_report(iterable))
        self._record.depth = isinstance(iterable, Prefetcher)

    def __iter__(self) -> Iterator[T]:
        """Start an epoch."""
        return _Items(self._iterable, self._record)

    def __len__(self) -> int:
        """Return the number of items, if the iterable has one."""
        return len(self._iterable)  # type: ignore[arg-type]

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")
        return getattr(self._iterable, attribute)

    def report(self) -> Report:
        """Return where the time went up to now, in all epochs."""
        return self._record.report()


def _processors() -> int:
    """Return how many processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _workers(iterable: object) -> int:
    """Return how many workers a `DataLoader` has; those of a prefetched one are behind its thread."""
    workers = getattr(iterable, "num_workers", 0)
    return workers if isinstance(workers, int) and not isinstance(iterable, Prefetcher) else 0


def _own_report(iterable: object) -> Callable[[], Report] | None:
    """Return what makes the report of a `Loader`: it knows what its reading took."""
    report: Callable[[], Report] | None = getattr(iterable, "report", None)
    if isinstance(iterable, Prefetcher) or not callable(report) or not isinstance(report(), Report):
        return None
    return report


class _Items(Generic[T]):
    """One epoch."""

    def __init__(self, iterable: Iterable[T], record: _Record) -> None:
        start = time.perf_counter()
        self._iterator = iter(iterable)
        self._epoch = _Epoch(record, time.perf_counter() - start, getattr(self._iterator, "loading", None))
        # Of `break`, too: the iterator is dropped then. Not at exit, where the standard streams may be gone.
        self._end = weakref.finalize(self, self._epoch.end)
        self._end.atexit = False

    def __iter__(self) -> _Items[T]:
        return self

    def __next__(self) -> T:
        self._epoch.ask()
        try:
            item = next(self._iterator)
        except BaseException:
            self._end()
            raise
        self._epoch.receive()
        return item


@dataclass
class _Record:
    """What was measured, in all epochs."""

    name: str
    line: str
    workers: int
    own: Callable[[], Report] | None
    loop: _Recorder = field(default_factory=lambda: _Recorder(time.perf_counter()))
    epochs: int = 0
    load: float = 0.0
    wait_cpu: float = 0.0  # of the loop's thread
    process_cpu: float = 0.0  # of all threads, waiting or not
    overlapped: float = 0.0
    prefetched: bool = False
    depth: bool = False

    def report(self) -> Report:
        figures = self.loop.figures()
        wall, wait = figures["wall"], figures["wait"]
        blocked = wait - self.wait_cpu
        load = self.load if self.prefetched else wait
        if self.workers and blocked > self.wait_cpu and blocked > (1 - 1 / _WORTH_IT) * wall:
            load = wall  # the workers are busy all the time, or as good as that
        own = self.own() if self.own is not None else None
        ahead = self.prefetched or self.workers > 0 or (own is not None and own.overlap)
        figures |= {
            "name": self.name,
            "epochs": self.epochs,
            "load": load if own is None else own.load,
            "overlap": ahead,
            "with_prefetch": None if ahead or own is not None else self.overlapped,
        }
        if figures["with_prefetch"] is not None:
            # Two processors may share a core, which shows nowhere, and then the work of both sides may take
            # as long side by side as one after the other.
            least = min(wall, self.process_cpu / max(1.0, _processors() / 2))
            figures["with_prefetch_at_worst"] = max(self.overlapped, least)
        advice = self._advice(Report(advice="", **figures)) if own is None else own.advice
        return Report(advice=advice, **figures)

    def _advice(self, report: Report) -> str:
        gain = report.remaining_speedup
        if report.verdict == "Unmeasured":
            return "Nothing was measured."
        if report.with_prefetch is not None and report.wall > _WORTH_IT * report.with_prefetch:
            held = ""
            if self.wait_cpu > 0.5 * report.wait:
                held = " If loading is Python code that holds the GIL, use worker processes instead."
            return f"{self.line}: put `tb.prefetch(...)` in place of `tb.watch(...)`.{held}"
        if gain > _WORTH_IT and 2 * report.first_wait > report.wall - report.ideal:
            return "Most of that is the wait for the first batch: call `iter()` before other preparations."
        if self.prefetched and gain > _WORTH_IT and report.compute > 2 * report.load:
            return "The thread runs late: other programs, or Python code of this one, keep it from running."
        if self.depth and gain > _WORTH_IT:
            return "Raise the `depth` of `prefetch`: single batches take longer than the others."
        if self.workers and gain > _WORTH_IT:
            return f"{self.line}: put `tb.prefetch(...)` around it: the loop unpacks what the workers made."
        if self.workers and report.verdict == "LoadBound":
            return (
                f"The workers decide: raise `num_workers`, which is {self.workers}, or make loading cheaper."
            )
        return {
            "ComputeBound": "The compute decides: no loader makes this faster.",
            "LoadBound": "The loading decides: make it cheaper, or use several processes.",
        }.get(report.verdict, "The stages are balanced: only making both faster helps.")


class _Epoch:
    """One pass over the iterable: what is measured between asking, receiving and asking again."""

    def __init__(
        self, record: _Record, begun: float, loading: Callable[[], tuple[float, float]] | None
    ) -> None:
        self._record = record
        self._begun = begun  # seconds that `iter` took: a part of the wait for the first item
        self._loading = loading
        self._loaded = 0.0
        self._step = -1
        self._asked = False
        self._cpu = 0.0
        self._process_cpu: float | None = None
        self._times = record.loop.times()
        self._ahead = _Ahead()

    def ask(self) -> None:
        """The loop wants an item: it is done with the one before."""
        record = self._record
        record.loop.ask(time.perf_counter() - self._begun)
        if self._process_cpu is None:
            self._process_cpu = time.process_time()
            record.epochs += 1
        self._ahead.use(self._since()[1])
        self._begun, self._asked = 0.0, True
        self._cpu = time.thread_time()

    def receive(self) -> None:
        """The loop has an item."""
        self._step += 1
        self._record.loop.receive(self._record.epochs - 1, self._step, time.perf_counter())
        self._waited()

    def end(self) -> None:
        """The iterable has ended or failed, or the loop has left it."""
        self._record.loop.end(time.perf_counter())
        if self._asked:
            self._waited()
        report = self._record.report()
        if report.batches:
            print(report, file=sys.stderr)

    def _since(self) -> tuple[float, float]:
        """Return the seconds that the loop waited and computed since the last call."""
        (wait, compute), self._times = self._times, self._record.loop.times()
        return self._times[0] - wait, self._times[1] - compute

    def _waited(self) -> None:
        self._asked = False
        record = self._record
        record.wait_cpu += time.thread_time() - self._cpu
        assert self._process_cpu is not None
        cpu, self._process_cpu = self._process_cpu, time.process_time()
        record.process_cpu += self._process_cpu - cpu
        before = self._ahead.wall
        self._ahead.load(self._since()[0])
        record.overlapped += self._ahead.wall - before
        if self._loading is not None:
            record.prefetched = True
            loaded = self._loading()[0]
            record.load += loaded - self._loaded
            self._loaded = loaded


class _Ahead:
    """The same loads and uses, with the loads in a thread that is up to two items ahead: a simulation."""

    def __init__(self) -> None:
        self.wall = 0.0  # when the caller received the last item
        self._loaded = 0.0
        self._free = 0.0  # when the caller asks for the next item
        self._taken: deque[float] = deque([0.0] * _DEPTH, maxlen=_DEPTH)

    def load(self, seconds: float) -> None:
        self._loaded = max(self._loaded, self._taken[0]) + seconds
        self.wall = self._free = max(self._loaded, self._free) + _HAND_OFF
        self._taken.append(self.wall)

    def use(self, seconds: float) -> None:
        self._free += seconds
