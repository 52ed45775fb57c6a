"""Copies to a device: page-locked slots that are reused, a side stream, and events that order both sides.

The edges, each of which a test removes to see the batches go wrong:

========================  =============================================================================
what waits                for what
========================  =============================================================================
the side stream           the caller's current stream when the iteration starts (:meth:`Upload.start`)
filling a slot            the copy that last read this slot (``slot.copied.synchronize()``)
the copy                  the fill: it is enqueued after the fill has returned
the next item             the copy, where that reads the iterable's own page-locked memory
the caller's stream       the copy (``copied.wait(current)``)
reuse of device memory    the caller's stream (``record_stream``): a batch may be kept for any time
========================  =============================================================================

`Download` copies the other way. Its side stream waits for the caller's stream before each copy; who reads
the slot waits for the copy; the memory that it copies is kept for the side stream.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy

from ._twinbuf import Batch
from .errors import LoaderError, OptionError

if TYPE_CHECKING:
    import torch

ALIGN = 256  # bytes; what torch's own allocators align to


# Variables in which launchers put the number of a process on its machine.
_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

# CU_STREAM_CAPTURE_MODE_RELAXED and CU_MEMHOSTREGISTER_PORTABLE, of the driver API.
_RELAXED, _PORTABLE = 2, 1


class Accelerator:
    """Torch's streams and memory of one device. The tests pass an object with these methods."""

    def __init__(self, device: torch.device) -> None:
        import torch

        found = torch.accelerator.current_accelerator(check_available=True)
        count = torch.accelerator.device_count()
        if found is None or found.type != device.type or (device.index or 0) >= count:
            there = f"{count} of {found.type}" if found else "no accelerator"
            raise RuntimeError(f"device: wanted {device}, found {there}")
        self._torch = torch
        self._device: Any = torch.device(device.type, _index(torch, device))
        self._cuda = torch.cuda if device.type == "cuda" else None
        self._driver: Any = None
        if self._cuda is not None:
            with contextlib.suppress(OSError):
                self._driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")

    def side(self) -> Any:
        """Make a new stream."""
        return (self._cuda or self._torch).Stream(device=self._device)

    def current(self) -> Any:
        """Return the current stream of the calling thread."""
        if self._cuda is None:
            return self._torch.accelerator.current_stream(self._device)
        with self._cuda.device(self._device):
            if self._cuda.is_current_stream_capturing():
                raise LoaderError(
                    "wanted a stream that is not being captured into a graph: use the batch on the stream "
                    "that launches it"
                )
        return self._cuda.current_stream(self._device)

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Make ``stream`` the current one of the calling thread."""
        # In the default mode a wait for a copy would end the capture of a CUDA graph by another thread.
        mode = ctypes.c_int(_RELAXED)
        if self._driver is not None:
            self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            # This also sets the thread's device.
            with stream if self._cuda is None else self._cuda.stream(stream):
                yield
        finally:
            if self._driver is not None:
                self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def event(self) -> torch.Event:
        """Make an event."""
        # `blocking`: a thread that synchronizes would otherwise spin. `torch.Event` ignores it on CUDA.
        if self._cuda is not None:
            return self._cuda.Event(blocking=True)  # type: ignore[no-any-return]
        return self._torch.Event(self._device, blocking=True)

    def host(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked bytes."""
        # Make this device the current one: otherwise torch would open a context on device 0 to page-lock.
        side = self.side()
        with self.using(side):
            # torch's allocator rounds up to a power of two. Page-lock other sizes by the driver, not by the
            # runtime: the runtime would keep the error of a failed call, and torch would raise it later.
            if self._driver is not None and nbytes & (nbytes - 1):
                memory = self._torch.frombuffer(mmap.mmap(-1, nbytes), dtype=self._torch.uint8)
                start = ctypes.c_void_p(memory.data_ptr())
                if self._driver.cuMemHostRegister_v2(start, ctypes.c_size_t(nbytes), _PORTABLE) == 0:
                    weakref.finalize(memory, self._unregister, side, start).atexit = False
                    return memory
            return self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu", pin_memory=True)

    def _unregister(self, side: Any, start: ctypes.c_void_p) -> None:
        with self.using(side):
            self._driver.cuMemHostUnregister(start)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate on the device, for the current stream."""
        return self._torch.empty_like(tensor, device=self._device, requires_grad=False)

    def copy(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Enqueue a copy on the current stream."""
        out.copy_(tensor, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of a tensor that is freed from being reused before ``stream`` is done with it."""
        tensor.record_stream(stream)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on the device already."""
        return bool(tensor.device == self._device)

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in page-locked memory."""
        return tensor.is_pinned()

    def move(self, item: Any, non_blocking: bool) -> Any:
        """Move an object by its own ``to``, on the current stream."""
        return item.to(self._device, non_blocking=True) if non_blocking else item.to(self._device)


def _index(torch: Any, device: Any) -> int:
    """Return the number of the device. If the program has not chosen one, it is the rank on this machine."""
    if device.index is not None:
        return int(device.index)
    current = int(torch.accelerator.current_device_index())
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "")
    if current == 0 and rank.isdecimal() and int(rank) < torch.accelerator.device_count():
        return int(rank)
    return current


def streams_of(device: Any) -> Accelerator | None:
    """Return the streams of a device, which may be such an object itself; None for host memory."""
    if hasattr(device, "side"):
        return device  # type: ignore[no-any-return]
    import torch

    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        wanted = 'a device of torch, such as "cuda:1"'
        raise OptionError(f"device: wanted {wanted}, found {device!r}") from error
    return None if device.type == "cpu" else Accelerator(device)


def home(array: Any) -> Accelerator | None:
    """Return the streams of the device where a tensor is; None for host memory."""
    return _of_device(array.device) if getattr(array, "is_cpu", True) is False else None


_of_device = functools.cache(streams_of)


@dataclass
class _Slot:
    """Page-locked bytes, and the event after the last copies out of them."""

    copied: torch.Event
    bytes: torch.Tensor | None = None

    def reserve(self, nbytes: int, streams: Accelerator) -> torch.Tensor:
        """Wait for the last copy out of the slot, and make it large enough."""
        self.copied.synchronize()
        if self.bytes is None or self.bytes.numel() < nbytes:
            self.bytes = None  # free the old bytes before the allocation
            self.bytes = streams.host(nbytes)
        return self.bytes


@dataclass
class Sent:
    """An item on its way to the device."""

    item: Any
    copied: torch.Event
    on_device: list[torch.Tensor]
    late: bool


@dataclass(frozen=True)
class _Late:
    """An object that is moved when it is handed over."""

    item: Any
    pinned: bool


@dataclass
class _Copies:
    """The copies of one item: each source, its place on the device and its offset in the slot."""

    streams: Accelerator
    bounced: list[tuple[Any, torch.Tensor, int]] = field(default_factory=list)
    direct: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    on_device: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0
    late: bool = False

    def plan(self, leaf: Any) -> Any:
        """Return a leaf's tensor on the device, and add its copy to these."""
        import torch

        if type(leaf) in (torch.Tensor, torch.nn.Parameter):
            if self.streams.owns(leaf):
                self.on_device.append(leaf)
                return leaf
            plain = leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_quantized
            if plain and not leaf.requires_grad:
                return self._place(leaf, leaf)
        elif (like := _array_like(leaf)) is not None:
            return self._place(leaf, like)
        elif not _moves_itself(leaf):
            return leaf
        # A tensor of another layout or with a gradient, or an object of another library: its own `to` moves
        # it, on the caller's stream.
        self.late = True
        pins = not isinstance(leaf, torch.Tensor) and callable(getattr(leaf, "pin_memory", None))
        return _Late(leaf.pin_memory() if pins else leaf, pins)

    def _place(self, leaf: Any, like: torch.Tensor) -> torch.Tensor:
        out = self.streams.empty_like(like)
        self.on_device.append(out)
        if leaf is like and self.streams.pinned(like) and like.stride() == out.stride():
            self.direct.append((like, out))
        else:
            self.bounced.append((leaf, out, self.nbytes))
            self.nbytes += -(-out.numel() * out.element_size() // ALIGN) * ALIGN
        return out


class Upload:
    """Sends items to a device through two page-locked slots.

    :meth:`start` and :meth:`receive` run in the caller's thread, :meth:`send` in the thread that makes the
    items, inside :meth:`using`.
    """

    def __init__(self, streams: Accelerator) -> None:
        self._streams = streams
        self._side = streams.side()
        self._slots = deque([_Slot(streams.event()), _Slot(streams.event())])
        # The event after all that the caller had enqueued when it got its last item.
        self._used = streams.event()

    def start(self, copy_stream: bool = True) -> None:
        """Let the side stream wait for what the caller has enqueued: the iterable may use its results.

        Without a copy stream, the caller's stream takes the place of the side stream from now on.
        """
        current = self._streams.current()
        if not copy_stream:
            self._side = current
        _after(current, self._streams).wait(self._side)

    def using(self) -> AbstractContextManager[Any]:
        """Make the side stream current: what the iterable itself enqueues on the device goes there too."""
        return self._streams.using(self._side)

    def send(self, item: Any) -> Sent:
        """Enqueue the copies of all tensors and arrays in ``item``. None of these needs a gradient.

        The thread may be the caller's, so none of its modes is changed: Ctrl-C could leave it so.
        """
        copies = _Copies(self._streams)
        moved = _change(copies.plan, item)
        slot = self._slots[0]
        if copies.bounced:
            self._slots.rotate()
            host = slot.reserve(copies.nbytes, self._streams)
        for source, out, offset in copies.bounced:
            nbytes = out.numel() * out.element_size()
            place = host[offset : offset + nbytes].view(out.dtype).as_strided(out.shape, out.stride())
            _fill(place, source)
            self._streams.copy(out, place)
        for source, out in copies.direct:
            self._streams.copy(out, source)
        copied = _after(self._side, self._streams)
        if copies.bounced:
            slot.copied = copied
        if copies.direct:
            # The iterable may fill this memory again when it is asked for the next item.
            copied.synchronize()
        return Sent(moved, copied, copies.on_device, copies.late)

    def catch_up(self) -> None:
        """Let the caller wait for the work on all items but the last.

        If it only enqueues work, it would go on, and the memory that this work uses would have no limit.
        """
        with self._streams.using(self._streams.current()):
            # If the wait fails, the next call does not repeat it.
            used, self._used = self._used, self._streams.event()
            used.synchronize()

    def receive(self, sent: Sent) -> Any:
        """Let the caller's current stream wait for the copies, and return the item."""
        self.catch_up()
        current = self._streams.current()
        self._used = _after(current, self._streams)
        sent.copied.wait(current)
        for tensor in sent.on_device:
            self._streams.keep(tensor, current)
        if not sent.late:
            return sent.item

        def move(part: Any) -> Any:
            return self._streams.move(part.item, part.pinned) if isinstance(part, _Late) else part

        return map_leaves(move, sent.item)


class Download:
    """Copies tensors from a device, through two page-locked slots in turn."""

    def __init__(self, streams: Accelerator) -> None:
        self.streams = streams
        # The event after each copy, and the bytes that it fills. At most two, as there are two slots.
        self.late: deque[tuple[torch.Event, Any]] = deque()
        self._side = streams.side()
        self._slots = deque([_Slot(streams.event()), _Slot(streams.event())])

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return room in the slot whose bytes are in ``late`` no more."""
        # Not in turn: Ctrl-C may have cut `send` off anywhere.
        self._slots.rotate(any(copied is self._slots[0].copied for copied, _ in self.late))
        nbytes = tensor.numel() * tensor.element_size()
        host = self._slots[0].reserve(nbytes, self.streams)
        return host[:nbytes].view(tensor.dtype).view(tensor.shape)

    def send(self, tensor: torch.Tensor, place: torch.Tensor, filled: Any) -> None:
        """Enqueue the copy into ``place``, after what the caller's stream has been given so far.

        What that stream is given next may change the tensor: it copies it on the device first.
        """
        current = self.streams.current()  # refuses a capture before anything is enqueued
        rows = self.streams.empty_like(tensor)
        self.streams.copy(rows, tensor)
        _after(current, self.streams).wait(self._side)
        with self.streams.using(self._side):
            self.streams.copy(place, rows)
        self.streams.keep(rows, self._side)
        copied = self._slots[0].copied = _after(self._side, self.streams)
        self.late.append((copied, filled))


def _after(stream: Any, streams: Accelerator) -> torch.Event:
    """Return the event after what a stream has been given so far."""
    event = streams.event()
    event.record(stream)
    return event


def _change(change: Callable[[Any], Any], item: Any) -> Any:
    """Return an item with its leaves changed, and with batches as their tensors, changed too."""

    def of(leaf: Any) -> Any:
        # Not `of` again: a function that refers to itself keeps what it made until a garbage collection.
        return map_leaves(change, leaf.torch()) if isinstance(leaf, Batch) else change(_imported(leaf))

    return map_leaves(of, item)


def _imported(leaf: Any) -> Any:
    """Return an array of a library other than numpy as a tensor of the same memory, if torch has its type."""
    import torch
    from torch.utils.dlpack import from_dlpack

    is_own = isinstance(leaf, (torch.Tensor, type)) or type(leaf).__module__.partition(".")[0] == "numpy"
    if not is_own and hasattr(leaf, "__dlpack__"):
        # For a type that cannot be exported each library raises another one of these.
        with contextlib.suppress(BufferError, RuntimeError, TypeError, ValueError):
            return from_dlpack(leaf)
    return leaf


def _moves_itself(leaf: Any) -> bool:
    """Return whether to call the object's own ``to``: a container only if it has ``pin_memory`` as well."""
    import torch

    if isinstance(leaf, type) or not callable(getattr(leaf, "to", None)):
        return False
    contains = isinstance(leaf, (Mapping, list, tuple)) or dataclasses.is_dataclass(leaf)
    return isinstance(leaf, torch.Tensor) or not contains or callable(getattr(leaf, "pin_memory", None))


def _fill(place: torch.Tensor, source: Any) -> None:
    import torch

    if isinstance(source, torch.Tensor):
        place.copy_(source)
    else:
        numpy.copyto(place.numpy(), source)  # takes any strides, and releases the GIL


def _array_like(leaf: Any) -> torch.Tensor | None:
    """Return a tensor of the array's shape and type that takes no memory, or None if there is none."""
    import torch

    if isinstance(leaf, numpy.ndarray):
        with contextlib.suppress(TypeError):  # strings, objects, and types of numbers that torch lacks
            dtype = torch.from_numpy(numpy.empty(0, leaf.dtype.newbyteorder("="))).dtype
            return torch.empty(leaf.shape, dtype=dtype, device="meta")
    return None


def as_tensors(item: Any) -> Any:
    """Return ``item`` with its arrays as tensors of the same memory; of a copy where torch cannot use it."""
    import torch

    def change(leaf: Any) -> Any:
        if _array_like(leaf) is None:
            return leaf
        # torch goes forward, by whole elements.
        steps = all(step >= 0 and step % leaf.itemsize == 0 for step in leaf.strides)
        usable = steps and leaf.flags.writeable and leaf.dtype.isnative
        return torch.from_numpy(leaf if usable else leaf.astype(leaf.dtype.newbyteorder("=")))

    return _change(change, item)


def map_leaves(change: Callable[[Any], Any], item: Any) -> Any:
    """Return ``item`` with every leaf replaced by ``change(leaf)``.

    ``change`` is called with each object on the way down but numbers, text, bytes and None, containers too.
    It returns its argument unchanged where it has nothing to replace. Containers without a replaced leaf are
    returned as they are, the others are copied: the caller's own objects never change.
    """
    if item is None or isinstance(item, (str, bytes, bytearray, memoryview, int, float, complex)):
        return item
    if (changed := change(item)) is not item:
        return changed
    keys: Sequence[Any]
    if isinstance(item, Mapping):
        keys, values = list(item.keys()), list(item.values())
    elif isinstance(item, (tuple, list)):
        keys, values = range(len(item)), list(item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        keys = [field.name for field in dataclasses.fields(item) if hasattr(item, field.name)]
        values = [getattr(item, name) for name in keys]
    else:
        return item
    parts = [map_leaves(change, value) for value in values]
    if all(new is old for new, old in zip(parts, values, strict=True)):
        return item
    if isinstance(item, tuple):
        # `_make` is of a named tuple.
        return item._make(parts) if hasattr(item, "_make") else type(item)(parts)
    pairs = zip(keys, parts, strict=True)
    if isinstance(item, Mapping) and not isinstance(item, MutableMapping):
        return type(item)(dict(pairs))  # type: ignore[call-arg]
    # Not `dataclasses.replace`: it runs `__init__`, which may do anything. Frozen dataclasses are copied too.
    other: Any = copy.copy(item)
    for key, part in pairs:
        if isinstance(item, (list, MutableMapping)):
            other[key] = part
        else:
            object.__setattr__(other, key, part)
    return other
