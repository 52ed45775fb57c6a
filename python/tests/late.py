"""A device that runs as late as it may: streams are queues, and memory is reused at once.

It has the same interface as torch's streams in `twinbuf._streams`, and the same code runs on it. Its
memory is that of the CPU. What is enqueued runs when somebody waits for it, or when its stream is the eager
one: with the side stream late a copy that nobody waits for is seen to be missing, with the caller's stream
late a buffer that is reused too early is seen to be overwritten.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

POISON = 0xA5

# The operations that can be left out, one for each edge.
EDGES = ("start", "slot", "fill", "direct", "wait", "keep")


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class LateStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], object]] = deque()
        self.enqueued = 0
        self.done = 0


class LateEvent:
    def __init__(self, device: Late) -> None:
        self._device = device
        self._stream: LateStream | None = None
        self._at = 0

    def record(self, stream: LateStream) -> None:
        with self._device.lock:
            self._stream, self._at = stream, stream.enqueued

    def wait(self, stream: LateStream) -> None:
        edge = "start" if stream is not self._device.main else "wait"
        self._device.log.append((edge, stream.name))
        if self._device.without != edge:
            self._device.enqueue(stream, lambda: self._device.run_to(self))

    def synchronize(self) -> None:
        self._device.log.append(("synchronize", ""))
        if self._device.without not in ("slot", "direct"):
            self._device.run_to(self)


class Late:
    """The device. `eager` is the stream that runs at once, as far as it need not wait: "main", "side" or
    none."""

    def __init__(self, eager: str, without: str = "") -> None:
        self.eager, self.without = eager, without
        self.main = LateStream("main")
        self.sides: list[LateStream] = []
        self.lock = threading.RLock()
        self.log: list[tuple[str, str]] = []
        self._current = threading.local()
        self._free: list[tuple[torch.Tensor, LateStream | None, int]] = []
        self._kept: dict[int, list[LateStream]] = {}
        self.memory: dict[int, torch.Tensor] = {}
        self.hosts = 0
        self.page_locked: list[torch.Tensor] = []
        # The sources of copies that have not run.
        self._read: list[torch.Tensor] = []

    # What `Upload` calls.

    def side(self) -> LateStream:
        self.sides.append(LateStream("side"))
        return self.sides[-1]

    def current(self) -> LateStream:
        return getattr(self._current, "stream", self.main)

    @contextlib.contextmanager
    def using(self, stream: LateStream) -> Iterator[None]:
        before, self._current.stream = self.current(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def event(self) -> LateEvent:
        return LateEvent(self)

    def host(self, nbytes: int) -> torch.Tensor:
        self.hosts += 1
        self.page_locked.append(torch.full((nbytes + 64,), POISON, dtype=torch.uint8))
        # As real ones are: at a multiple of 64.
        start = -self.page_locked[-1].data_ptr() % 64
        return self.page_locked[-1][start : start + nbytes]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        with self.lock:
            raw = self._take(nbytes)
            layout = torch.empty_like(tensor, device="meta")
            # Makes a storage that uses this memory. The last view frees the storage.
            out = torch.frombuffer(raw.numpy(), dtype=torch.uint8)[:nbytes]
            out = out.view(tensor.dtype).as_strided(layout.shape, layout.stride())
            self.memory[_key(out)] = raw
            weakref.finalize(out.untyped_storage(), self._release, _key(out), raw, self.current())
        return out

    def copy(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        target, source = self._address(out), self._address(tensor)
        self.log.append(("copy", self.current().name))

        def run() -> None:
            del self._read[next(at for at, each in enumerate(self._read) if each is source)]
            target.copy_(source)

        with self.lock:
            self._read.append(source)
            self.enqueue(self.current(), run)

    def keep(self, tensor: torch.Tensor, stream: LateStream) -> None:
        self.log.append(("keep", stream.name))
        if self.without != "keep":
            with self.lock:
                self._kept.setdefault(_key(tensor), []).append(stream)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided and _key(tensor) in self.memory

    def pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        inside = any(0 <= at - each.data_ptr() < each.numel() for each in self.page_locked)
        return inside or getattr(tensor, "in_page_locked_memory", False)

    def move(self, item: Any, non_blocking: bool) -> Any:
        self.log.append(("move", self.current().name))
        return item.to("cpu", non_blocking=True) if non_blocking else item.to("cpu")

    # What the tests call.

    def kernel(self, tensor: torch.Tensor, use: Callable[[torch.Tensor], None]) -> None:
        """Enqueue a read of the tensor on the current stream."""
        address = self._address(tensor)
        self.enqueue(self.current(), lambda: use(address.clone()))

    def reads(self, start: int, nbytes: int) -> bool:
        """Return whether a copy that has not run reads these bytes of host memory."""
        with self.lock:
            each = [(read.data_ptr(), read.numel() * read.element_size()) for read in self._read]
        return any(at < start + nbytes and start < at + size for at, size in each)

    def finish(self) -> None:
        """Run everything, the eager stream first."""
        streams = [self.main, *self.sides]
        for stream in streams if self.eager == "main" else reversed(streams):
            self._run(stream, stream.enqueued)

    def _address(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a kernel has: an address on the device, and no object that keeps its memory."""
        raw = self.memory.get(_key(tensor))
        if raw is None:
            return tensor.detach()
        at = tensor.data_ptr() - raw.data_ptr()
        flat = raw[at : at + tensor.numel() * tensor.element_size()].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    # How it runs.

    def enqueue(self, stream: LateStream, operation: Callable[[], object]) -> None:
        with self.lock:
            stream.queue.append(operation)
            stream.enqueued += 1
            if stream.name == self.eager:
                self._run(stream, stream.enqueued)

    def run_to(self, event: LateEvent) -> None:
        with self.lock:
            if event._stream is not None:
                self._run(event._stream, event._at)

    def _run(self, stream: LateStream, end: int) -> None:
        with self.lock:
            while stream.done < end:
                stream.queue.popleft()()
                stream.done += 1

    # Memory: of a freed tensor at once for the stream that allocated it, unless another one is to be waited
    # for.

    def _take(self, nbytes: int) -> torch.Tensor:
        for index, (raw, reader, at) in enumerate(self._free):
            if raw.numel() >= nbytes and (reader is None or reader.done >= at):
                del self._free[index]
                return raw
        return torch.full((max(nbytes, 1),), POISON, dtype=torch.uint8)

    def _release(self, key: int, raw: torch.Tensor, owner: LateStream) -> None:
        with self.lock:
            del self.memory[key]
            readers = self._kept.pop(key, [])
            reader = next((each for each in readers if each is not owner), None)
            self._free.append((raw, reader, reader.enqueued if reader else 0))
