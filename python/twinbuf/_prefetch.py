"""Overlap for any iterable: a thread fetches the next items while one is used."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import copy
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._streams import Streams, Upload, as_tensors, streams_of
from .errors import ForkedError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_log = logging.getLogger("twinbuf")

# A wait of this many seconds is woken by Ctrl-C on systems where only a wait with a time-out is (Windows).
_INTERRUPTIBLE = 0.05 if sys.platform == "win32" else None

# How long the interpreter's exit waits for a thread that is inside the iterable.
_EXIT_S = 1.0


def prefetch(
    iterable: Iterable[T], device: str | torch.device | Streams | None = None, depth: int = 2
) -> Prefetcher[T]:
    """Fetch the next items of an iterable in a thread while one is used.

    The items, their order, and the errors are those of the iterable.

    Parameters
    ----------
    iterable
        A ``DataLoader``, a generator, or anything else that can be iterated. An item must stay as it is when
        later ones are fetched, unless a device is given: then it is copied first.
    device
        Where tensors and arrays are sent, a `Batch` too, however deep they are in dicts, lists, tuples and
        dataclasses. They go through page-locked memory that is reused, on a stream of their own. The
        current stream waits for them when they are handed over. ``"cpu"`` makes tensors of arrays. Default:
        items are not touched, and torch is not needed.
    depth
        How many items are fetched ahead of the one in use. Default 2: one ready, one on its way.

    Returns
    -------
    Prefetcher
        An iterable that has the length, the attributes and the state of ``iterable``.

    Raises
    ------
    ValueError
        If ``depth`` is less than 1.
    RuntimeError
        If there is no such device.

    Notes
    -----
    The fetching thread starts at ``iter()``: call that before you load a checkpoint, and the first batch is
    ready when it is needed. It ends with the iterable, or when the iterator is dropped, as by ``break``.

    Handing an item over takes tens of microseconds: fetch in turn what is fetched faster than that.

    Overlap needs an iterable that releases the GIL: reading, decoding and numpy do, loops in Python do not.

    Random numbers from a *global* generator are drawn by both threads in an order that varies. Give the
    sampler and the transforms a generator of their own (``DataLoader(generator=...)``).

    Examples
    --------
    >>> list(prefetch(n * n for n in range(4)))
    [0, 1, 4, 9]
    """
    return Prefetcher(iterable, device, depth)


class Prefetcher(Generic[T]):
    """An iterable whose next items are fetched by a thread. Made by :func:`prefetch`.

    Attributes that it does not have itself are those of the iterable.
    """

    def __init__(
        self, iterable: Iterable[T], device: str | torch.device | Streams | None = None, depth: int = 2
    ) -> None:
        if depth < 1:
            raise ValueError(f"prefetch: depth of at least 1 wanted, found {depth}")
        self._iterable = iterable
        self._depth = depth
        self._streams = None if device is None else streams_of(device)
        # Arrays become tensors of host memory.
        self._convert = device is not None and self._streams is None
        self._position = Position()
        self._last: weakref.ref[Run[T]] | None = None
        # Of an iterable that is an iterator: it cannot start again, and neither can this.
        self._only: Items[T] | None = None

    def __iter__(self) -> Iterator[T]:
        """Start to fetch.

        Waits for the thread of an iteration that was left early: the iterable is used by one thread at a
        time.
        """
        if self._only is not None:
            return self._only
        self._join()
        iterator = iter(self._iterable)
        upload = None if self._streams is None else Upload(self._streams)
        if upload is not None:
            upload.start()
        run: Run[T] = Run(iterator, self._depth, upload, self._convert, _copies(self._iterable))
        position = self._position = Position(run)
        items = Items(run, upload, position)
        self._last = weakref.ref(run)
        if iterator is self._iterable:
            self._only = items
        run.start()
        return items

    def __len__(self) -> int:
        """Return the number of items, if the iterable has one."""
        return len(self._iterable)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._iterable, name)

    def __repr__(self) -> str:
        return f"prefetch({self._iterable!r}, depth={self._depth})"

    @property
    def state_dict(self) -> Callable[[], Any]:
        """Return the state of the iterable after the last item that the caller received.

        Items that were fetched ahead are not counted: they are fetched again after `load_state_dict`.

        Raises
        ------
        AttributeError
            If the iterable has no ``state_dict``.
        """
        state_of: Callable[[], Any] = self._iterable.state_dict  # type: ignore[attr-defined]
        return lambda: copy.deepcopy(self._position.state) if self._position.ahead() else state_of()

    @property
    def load_state_dict(self) -> Callable[[Any], None]:
        """Set the state of the iterable; it takes effect at the next ``iter()``.

        Raises
        ------
        AttributeError
            If the iterable has no ``load_state_dict``.
        """
        load = self._iterable.load_state_dict  # type: ignore[attr-defined]

        def load_state_dict(state: Any) -> None:
            self.close()
            load(state)
            self._position = Position()
            self._only = None

        return load_state_dict

    def close(self) -> None:
        """Stop to fetch and wait for the thread. Items that were fetched ahead are dropped."""
        run = self._last() if self._last is not None else None
        if run is not None:
            run.stop()
            run.join()

    def _join(self) -> None:
        run = self._last() if self._last is not None else None
        if run is not None and run.stopped:
            run.join()


def _copies(iterable: object) -> Callable[[], Any] | None:
    """Return what makes a copy of the state: the iterable may hand out what it goes on to change."""
    states: Callable[[], Any] | None = getattr(iterable, "state_dict", None)
    return None if states is None else lambda: copy.deepcopy(states())


class Items(Generic[T]):
    """The iterator that the caller has. The thread does not know it, so that dropping it ends the thread."""

    def __init__(self, run: Run[T], upload: Upload | None, position: Position) -> None:
        self._run = run
        self._upload = upload
        self._position = position
        weakref.finalize(self, run.stop).atexit = False  # `_at_exit` stops all of them

    def __iter__(self) -> Items[T]:
        return self

    def __next__(self) -> T:
        entry = self._run.take()
        if entry is None:
            self._position.finish()
            raise StopIteration
        self._position.state = entry.state
        if entry.error is not None:
            error, entry = entry.error, None
            try:
                raise error
            finally:
                del error  # else its traceback holds it
        item: T = entry.item if self._upload is None else self._upload.receive(entry.item)
        return item

    def loading(self) -> tuple[float, float]:
        """Return the seconds of the thread in the iterable, and those that it waited for the caller."""
        return self._run.busy, self._run.waiting


class Position:
    """The state of the iterable after the item that the caller has, while the thread is ahead of it."""

    def __init__(self, run: Run[Any] | None = None) -> None:
        self.state: Any = None if run is None else run.first_state
        self._run = run

    def ahead(self) -> bool:
        """Return whether the state is the one here, and not the iterable's own."""
        return self._run is not None

    def finish(self) -> None:
        """Note that the caller has received everything."""
        if self._run is not None and not self._run.stopped:
            self._run = None


class _Entry:
    """What the thread hands over: an item or an error, and the state of the iterable after it."""

    __slots__ = ("error", "item", "state")

    def __init__(self, item: Any, error: BaseException | None, state: Any) -> None:
        self.item = item
        self.error = error
        self.state = state


class Run(Generic[T]):
    """One iteration: the thread, and the queue between it and the caller."""

    def __init__(
        self,
        iterator: Iterator[T],
        depth: int,
        upload: Upload | None,
        convert: bool,
        states: Callable[[], Any] | None,
    ) -> None:
        self._iterator: Iterator[T] | None = iterator
        self._depth = depth
        self._upload = upload
        self._convert = convert
        self._states = states
        self.first_state = self._state()
        self._ready: deque[_Entry] = deque()
        # A lock that its owner may take again: the collector can run `stop` in any thread, at any place.
        self._changed = threading.Condition(threading.RLock())
        self._asked = False  # the caller waits
        self._failed = False  # the last entry is an error, and the caller has not asked again
        self._ended = False
        self.stopped = False
        self.busy = 0.0
        self.waiting = 0.0
        self._pid = os.getpid()
        self._mode = _torch_mode()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work,), name="twinbuf-prefetch", daemon=True
        )

    def start(self) -> None:
        _runs.add(self)
        self._thread.start()

    def take(self) -> _Entry | None:
        """Wait for the next entry; None after the last."""
        if os.getpid() != self._pid:
            raise ForkedError(
                f"this iteration was started in process {self._pid}, and threads do not survive a fork: "
                f"call iter() in process {os.getpid()}"
            )
        with self._changed:
            self._asked = True
            self._changed.notify_all()
            try:
                while not self._ready:
                    if self._ended or self.stopped:
                        return None
                    self._changed.wait(_INTERRUPTIBLE)
                entry = self._ready.popleft()
            finally:
                self._asked = False
            self._changed.notify_all()
            return entry

    def stop(self) -> None:
        """Let the thread end as soon as it is out of the iterable."""
        if os.getpid() != self._pid:
            return  # the thread is in the parent, and so may be the lock
        with self._changed:
            self.stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _work(self) -> None:
        try:
            with self._mode(), self._upload.using() if self._upload else contextlib.nullcontext():
                while self._room() and (entry := self._fetch()) is not None:
                    with self._changed:
                        if not self.stopped:
                            self._ready.append(entry)
                        del entry  # from now on the item is the caller's alone
                        self._changed.notify_all()
                self._close()
        except BaseException as error:  # of the device: the iterable's own are caught where they arise
            with self._changed:
                self._ready.append(_Entry(None, error, self.first_state))
        finally:
            with self._changed:
                self._iterator = self._states = None  # the caller may keep this
                self._ended = True
                self._changed.notify_all()

    def _room(self) -> bool:
        """Wait until one more item may be fetched; False if none is wanted."""
        start = time.perf_counter()
        with self._changed:
            while not self.stopped:
                # After an error the caller decides whether to go on.
                if self._asked and not self._ready if self._failed else len(self._ready) < self._depth:
                    self._failed = False
                    self.waiting += time.perf_counter() - start
                    return True
                self._changed.wait()
        return False

    def _fetch(self) -> _Entry | None:
        """Fetch one item, or the error instead of it; None at the end of the iterable."""
        assert self._iterator is not None
        start = time.perf_counter()
        item: Any = None
        failure: BaseException | None = None
        try:
            item = next(self._iterator)
            if self._convert:
                item = as_tensors(item)
            elif self._upload is not None:
                item = self._upload.send(item)
        except StopIteration:
            return None
        except BaseException as error:
            item, failure = None, error
            self._failed = True
        entry = _Entry(item, failure, self._state())
        self.busy += time.perf_counter() - start
        return entry

    def _state(self) -> Any:
        return None if self._states is None else self._states()

    def _close(self) -> None:
        """Close a generator that was left early, in the thread that ran it."""
        if self.stopped and isinstance(self._iterator, Generator):
            try:
                self._iterator.close()
            except Exception:
                _log.exception("prefetch: closing %r failed", self._iterator)


def _torch_mode() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what gives a thread the gradient mode of this one; it does nothing where torch is not in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        return contextlib.nullcontext
    if torch.is_inference_mode_enabled():
        return lambda: torch.inference_mode()
    enabled = torch.is_grad_enabled()
    return lambda: torch.set_grad_enabled(enabled)


_runs: weakref.WeakSet[Run[Any]] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """End the threads before the interpreter's own objects go: one inside native code could crash."""
    runs = list(_runs)
    for run in runs:
        run.stop()
    end = time.monotonic() + _EXIT_S
    for run in runs:
        run.join(max(0.0, end - time.monotonic()))
