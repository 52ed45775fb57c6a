"""Overlap for any iterable: a thread fetches the next items while one is used."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType, WrapperDescriptorType
from typing import TYPE_CHECKING, Any, Generic, Self, SupportsIndex, TypeVar

from ._drive import InTurn, ahead, starter
from ._loop import Loop
from ._report import Report
from ._streams import Accelerator, Upload, as_tensors, streams_of
from ._twinbuf import _Items, _Thread
from ._values import path_or_none, seconds_or_none, text_of, warn, whole
from .errors import LoaderTimeoutError, OptionError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# The largest `depth`: a place for each item is allocated at the start.
_MOST = 1 << 16


def prefetch(
    iterable: Iterable[T],
    *,
    device: str | torch.device | Accelerator | None = None,
    depth: SupportsIndex = 2,
    name: str = "",
    trace: str | os.PathLike[str] | None = None,
) -> Prefetcher[T]:
    """Fetch the next items of an iterable in a thread while one is used.

    The items, their order, and the errors are those of the iterable.

    Parameters
    ----------
    iterable
        A ``DataLoader``, a generator, or anything else that can be iterated. An item must stay as it is when
        later ones are fetched, but for the tensors and arrays that the thread copies to an accelerator.
    device
        Where tensors and arrays are sent, those of batches too, however deep they are in dicts, lists,
        tuples and dataclasses: a `Batch` becomes what its ``torch()`` returns. They are copied from
        page-locked memory on a separate stream, and the current stream waits for them when they are handed
        over. Tensors with a gradient, of another device or of a subclass, sparse and quantized ones, and
        other objects with a method ``to`` are then moved by that. Arrays of a type that torch lacks stay.
        ``"cpu"`` makes tensors of arrays. Default: items are not touched, and torch is not needed.
    depth
        How many items are fetched ahead of the one in use, up to 65 536. Default 2: one ready, one on its
        way.
    name
        The name of the loop in its report and trace.
    trace
        A file for a Chrome trace of both threads, in the last iteration.

    Returns
    -------
    Prefetcher
        An iterable that has the length, public attributes and state of ``iterable``, and ``report()``.

    Raises
    ------
    OptionError
        If ``depth`` is not from 1 to 65 536, if torch does not know ``device``, if ``trace`` is empty, or if
        it or ``name`` cannot be encoded.
    RuntimeError
        If there is no such device.

    Notes
    -----
    The fetching thread starts at ``iter()``: call that before you load a checkpoint, and the first batch is
    read meanwhile. It ends with the iterable, or when the iterator is dropped, as by ``break`` if the next
    loop starts again.

    After a ``break``, a generator, a file, or another iterator whose ``__iter__`` is just ``return self``
    goes on after the last item that the loop received. Keep the `prefetch` for that: when it is dropped, what
    it fetched ahead is lost, and a generator is closed. An iterator whose ``__iter__`` does more is taken to
    start again, as it does in a plain loop: what was fetched ahead is dropped, and that is logged once. So
    it is dropped, but nothing is logged, where the iterable is no iterator and yet keeps its place, such as a
    ``tempfile.NamedTemporaryFile``: keep one ``iter(prefetch(...))``.

    Batches of a `Loader` keep their slots while they wait here. With slots of 16 MiB or more it has only 2:
    give it a ``depth`` of 5, or do without `prefetch`, because a `Loader` reads ahead itself.

    Overlap needs a side that releases the GIL: reading, decoding, most of numpy do, loops in Python do not.

    The thread has the context variables, the gradient mode and the current CUDA device of the caller of
    ``iter()``. It has not its autocast, nor its default device.

    Around a loader that accelerate prepared, gradient accumulation and ``gather_for_metrics`` see how far the
    loop is. Do not give ``prepare`` the `prefetch`: it would not see the end of an epoch. Around a generator
    over such a loader they see no loader, or how far the thread is.

    Random numbers from a *global* generator are drawn by both threads in an order that varies. Give the
    sampler and the transforms a separate generator (``DataLoader(generator=...)``).

    Examples
    --------
    >>> list(prefetch(n * n for n in range(4)))
    [0, 1, 4, 9]
    """
    kind: type[Prefetcher[T]] = _Stateful if hasattr(iterable, "state_dict") else Prefetcher
    return kind(iterable, device=device, depth=whole("depth", depth), name=name, trace=trace)


class Around(Generic[T]):
    """An object around an iterable, with the length and the attributes of that."""

    _iterable: Iterable[T]
    # Whether all loops share one iterator, as where the iterable is one itself.
    _shared = False

    def __new__(cls, *given: Any, **options: Any) -> Self:
        if len(given) + len(options) < 4:  # those that the functions give
            raise TypeError(f"{cls.__name__}: wanted `prefetch(iterable)` or `watch(iterable)`, found a call")
        return super().__new__(cls)

    def _begin(self) -> Iterator[T]:
        inner = self._iterable
        iterator = iter(inner)
        self._shared = inner._shared if isinstance(inner, Around) else iterator is inner
        return iterator

    def __len__(self) -> int:
        """Return the number of items, if the iterable has one."""
        return len(self._iterable)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        # A generator has no length, and is true.
        return bool(self._iterable)

    def __getattr__(self, name: str) -> Any:
        # `send` and `throw` would take items of a generator away from the thread.
        if name.startswith("_") or name in ("send", "throw"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._iterable, name)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"{type(self).__name__}: cannot be pickled or copied: copy what it is around")


class Prefetcher(Around[T]):
    """An iterable whose next items are fetched by a thread. Made by :func:`prefetch`.

    Public attributes that it does not have itself are those of the iterable, but ``send`` and ``throw``.
    """

    def __init__(self, iterable: Iterable[T], *, device: Any, depth: int, name: str, trace: Any) -> None:
        if not 1 <= depth <= _MOST:
            raise OptionError(f"depth: wanted from 1 to {_MOST}, found {depth}")
        self._iterable = iterable
        self._depth = depth
        self._prepared = _set_aside(iterable)
        self._streams = None if device is None else streams_of(device)
        # Whether the device is host memory: arrays become tensors there.
        self._convert = device is not None and self._streams is None
        self._name, self._trace = text_of("name", name), path_or_none("trace", trace)
        self._epochs = 0
        # The state, if any, after the last item that the loop received, in a list. Empty: that is the
        # iterable's present state, because the loop came to the end.
        self._place: list[Any] = []
        # Why the iterable has no state, though its class has the method.
        self._stateless = ""
        self._items: Callable[[], Any] = lambda: None
        # The thread of the last iteration.
        self._thread = _Thread()
        self._pid = os.getpid()
        # The only iterator, if the iterable is an iterator that goes on, and what starts its thread, until it
        # has: Ctrl-C or an error may cut that off.
        self._only: tuple[_Items[T] | Loop[T], list[Callable[[], None]]] | None = None
        self._turn = InTurn("iter() was called")
        # The iterator of the last iteration, if there can be a weak reference to it.
        self._last: Callable[[], Iterator[T] | None] = lambda: None
        self._told = False

    def __iter__(self) -> Iterator[T]:
        """Start fetching, or go on.

        Waits for the thread of an iteration whose iterator was dropped, as by ``break``: the iterable is
        then used by one thread at a time.
        """
        self._join(0)  # refuses the thread itself: a loop whose turn it is may wait for that
        loop, starts = self._turn(self._loop)
        for begin in starts:
            begin()
        starts.clear()
        return loop

    def _loop(self) -> tuple[_Items[T] | Loop[T], list[Callable[[], None]]]:
        """Return the loop, and what starts its thread, which can be called again; empty once it has."""
        if self._only is not None and not self._items().ended:
            return self._only
        # With persistent workers a `DataLoader` has one iterator: no thread may be in it at `iter`.
        shared = self._shared or getattr(self._iterable, "persistent_workers", False)
        if shared or self._items() is None:
            self._replace()
        iterator = self._begin()
        if iterator is self._last():
            self._replace()
            shared = self._shared = True
        if shared and self._shared and self._place and not self._told:
            self._told = True
            warn(
                f"prefetch: a loop over the {type(self._iterable).__name__} was left early, and the next "
                "one has the same iterator: if that does not start again, items that were fetched ahead are "
                "lost. To go on, keep one `iter(prefetch(...))`; to start again without this line, call "
                "`close()` first"
            )
        upload = None if self._streams is None else Upload(self._streams)
        if upload is not None:
            upload.start()
        states, state, stateless = _copies(self._iterable)
        place, thread, pid = [state], _Thread(self._thread), os.getpid()
        send = as_tensors if self._convert else upload.send if upload else None
        items: _Items[T] = _Items(
            (_marked(self._iterable, iterator) if self._prepared else iterator, send, states),
            self._depth,
            place=place,
            thread=thread,
            name=self._name or None,
            trace=self._trace,
            epoch=self._epochs,
        )
        loop: _Items[T] | Loop[T] = items
        if self._prepared:
            loop = Loop(items, partial(self._receive, upload))
            loop._over = self._leave
        elif upload is not None:
            loop = Loop(items, upload.receive)
        latest, only = weakref.ref(items), self._shared and _goes_on(self._iterable)
        with contextlib.suppress(TypeError):
            self._last = weakref.ref(iterator)
        begun = loop, [starter(items, self._name or "twinbuf-prefetch", upload)]
        # From here to the end nothing is called: Ctrl-C leaves this iteration out, or whole.
        self._place, self._stateless, self._thread, self._pid = place, stateless, thread, pid
        self._items, self._epochs = latest, self._epochs + 1
        self._only = begun if only else None
        return begun

    def _receive(self, upload: Upload | None, found: Any) -> T:
        """Return an item of a loader of accelerate, which takes this for the loader that the loop is in."""
        item, self.end_of_dataloader, self.remainder = found if upload is None else upload.receive(found)
        # Of loops at once, the one that began last counts.
        if self not in self.gradient_state.dataloader_references:
            self.gradient_state._add_dataloader(self)
        return item  # type: ignore[no-any-return]

    def _leave(self) -> None:
        for loader in (self, *self._prepared):
            self.gradient_state._remove_dataloader(loader)

    def __repr__(self) -> str:
        return f"prefetch({self._iterable!r}, depth={self._depth})"

    def report(self) -> Report:
        """Return where the time went up to now, in all epochs."""
        return self._thread.report(self._name)  # type: ignore[no-any-return]

    def close(self, *, timeout: float | None = 1.0) -> None:
        """Stop fetching for the loop that began last, and wait for its thread.

        Items that were fetched ahead are dropped. After ``timeout`` seconds in the iterable the thread is
        left behind: this raises `LoaderTimeoutError`. None waits as long as it takes.
        """
        limit, items = seconds_or_none("timeout", timeout), self._items()
        self._shared, self._last = False, lambda: None
        if items is not None:
            items.close()
        if not self._join(limit):
            raise LoaderTimeoutError(f"prefetch: wanted an end of the iterable's item within {timeout} s")

    def _replace(self) -> None:
        if (items := self._items()) is not None and not items.ended:
            items.replace()
        self._join()

    def _join(self, timeout: float | None = None) -> bool:
        return self._pid != os.getpid() or self._thread.join(timeout)


class _Stateful(Prefetcher[T]):
    """A `Prefetcher` of an iterable with a state. Trainers look for these methods, in the class too."""

    def state_dict(self) -> Any:
        """Return the state of the iterable after the last item that the caller received.

        Items that were fetched ahead are not counted: they are fetched again after `load_state_dict`.
        """
        if not self._place:
            return self._iterable.state_dict()  # type: ignore[attr-defined]
        if self._stateless:
            raise AttributeError(self._stateless)
        return copy.deepcopy(self._place[0][0])

    def load_state_dict(self, state: Any) -> None:
        """Set the state of the iterable; it takes effect at the next ``iter()``."""
        load = self._iterable.load_state_dict  # type: ignore[attr-defined]
        self._replace()  # a loop that goes on must not take this for its end
        self.close(timeout=None)
        load(state)
        self._place, self._only = [], None


def _goes_on(iterator: Any) -> bool:
    """Return whether ``iter()`` leaves an iterator where it is.

    C's do, and those whose ``__iter__`` is ``return self``. Others may start again.
    """
    while isinstance(iterator, Around):
        iterator = iterator._iterable
    method = type(iterator).__iter__
    if isinstance(method, FunctionType):
        return method.__code__.co_code == Loop.__iter__.__code__.co_code
    return isinstance(method, WrapperDescriptorType)


class _Aside:
    """accelerate's ``GradientState`` for a loader. It leaves out what a thread ahead begins and ends."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        if name == "_state":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._state, name)

    def _add_dataloader(self, loader: Any) -> None:
        if not ahead.get():
            self._state._add_dataloader(loader)

    def _remove_dataloader(self, loader: Any) -> None:
        if not ahead.get():
            self._state._remove_dataloader(loader)


def _set_aside(iterable: Any) -> tuple[Any, ...]:
    """Return the loader of accelerate that the iterable is, or is around, if any. Give that an `_Aside`."""
    while isinstance(iterable, Around):
        iterable = iterable._iterable
    if not hasattr(state := getattr(iterable, "gradient_state", None), "_add_dataloader"):
        return ()
    iterable.gradient_state = state if isinstance(state, _Aside) else _Aside(state)
    return (iterable,)


def _marked(loader: Any, iterator: Iterator[Any]) -> Iterator[tuple[Any, bool, int]]:
    """Yield each item with what accelerate reads of its loader while the item is used."""
    for item in iterator:
        yield item, loader.end_of_dataloader, loader.remainder


def _copies(iterable: Any) -> tuple[Callable[[], Any] | None, Any, str]:
    """Return a function that copies the iterable's state, which it may change later in place, and a copy.

    Each copy is in a list, because a state may be None.

    None, None and why if there is no state: a loader of accelerate has the method also around a loader that
    has it not.
    """
    states = getattr(iterable, "state_dict", None)
    if states is None:
        return None, None, "the iterable has no `state_dict`"
    try:
        return lambda: [copy.deepcopy(states())], [copy.deepcopy(states())], ""
    except AttributeError as error:
        return None, None, str(error) or "`state_dict` of the iterable raised AttributeError"
