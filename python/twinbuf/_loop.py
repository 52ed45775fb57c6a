"""The iterator of a loop in whose thread Python code runs for each item: functions of the program, or torch.

It is in Python, so that there is no frame of Rust below those functions when the interpreter ends their
thread.

A `Sender` gives it the batches of a `Loader` or the groups of a `stream` on a device. A thread reads into
slots, which are page-locked for a loader. With overlap a second thread enqueues copies of these slots on a
side stream while the loop uses the batch before. The loop's stream waits for the copies.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._drive import InTurn, Turn, called, make_one, starter, wait_in
from ._streams import Accelerator, Sent, Upload, streams_of
from ._twinbuf import _Items, _Thread

if TYPE_CHECKING:
    from ._loader import Loader
    from ._report import Report
    from ._twinbuf import _Taken

T = TypeVar("T")


class Loop(Generic[T]):
    """Hands out the items of `_Items`, or the batches of a loader.

    An item that is taken and not handed out goes back, unless ``map`` failed for it: after Ctrl-C the next
    call has it again.
    """

    # What sends the items to a device, where it has them from, and what starts its thread.
    _sender: Sender | None = None
    _batches: Any = None
    _closed = False
    _start: Callable[[], None] | None = None
    # Called at the end.
    _over: Callable[[], None] | None = None
    # Where threads that share the iterator wait, if one at a time is to call functions of the program.
    _line: dict[Turn, None] | None = None

    def __init__(
        self,
        items: Any,
        receive: Callable[[Any], Any] | None = None,
        make: Callable[[], bool] | None = None,
        map: Callable[[Any], Any] | None = None,
    ) -> None:
        """``make`` makes an item in this thread, and returns whether one was wanted."""
        self._items, self._receive, self._make, self._map = items, receive, make, map
        # How many were handed out.
        self._count = 0

    def __iter__(self) -> Loop[T]:
        return self

    def __next__(self) -> T:
        taken: _Taken | None = None
        line, mine, waited = self._line, None, None
        try:
            if line is not None:
                self._items.check()  # the loop whose turn it is may wait for this thread
                mine = Turn()
                wait_in(line, mine)
            self._asks()
            # `spent` leaves out the time in `_make`: reads, also those of other threads, have no limit.
            since = spent = 0.0
            try:
                while (taken := self._items.take(waited)) is None:
                    spent += 0.0 if waited is None else monotonic() - since
                    waited = spent if self._make is None or not self._make() else None
                    since = monotonic()
            except Exception as raised:
                over = isinstance(raised, StopIteration)
                cut = over and self._sender is not None and self._items.is_closed
                if over and self._over is not None:
                    self._over()
                if self._sender is not None:
                    self._sender.ended(whole=over and not cut)
                if not cut:
                    raise
            if taken is None:  # another thread has closed or replaced it meanwhile
                return self._gone()  # type: ignore[no-any-return]
            try:
                found = taken.item
                if self._receive is not None:
                    found = called("code that moves an item", self._receive, found)
                if self._map is not None:
                    try:
                        found = called("map", self._map, found)
                    except Exception:
                        self._count += 1  # it does not come again: it would fail again
                        taken.back(again=False)
                        raise
                self._count += 1
                # From here to the end nothing is called, so no signal is handled.
                taken.handed_out = True
                return found  # type: ignore[no-any-return]
            except BaseException:
                taken.back(again=True)
                raise
        finally:
            if line is not None and mine in line:
                del line[mine]

    def _asks(self) -> None:
        if (start := self._start) is not None:
            start()
            self._start = None
        if self._sender is not None:
            if self._items.is_closed:
                self._gone()
            if not self._items.ended:
                self._sender.catch_up()
            self._sender.recorder.asked()

    def _gone(self) -> Any:
        """Raise why there is no item: this was closed, or another thread closed or replaced what it reads."""
        return next(iter(()) if self._closed else self._batches)

    def __del__(self) -> None:
        if self._sender is not None:
            self._sender.ended(whole=False)

    def report(self) -> Report:
        return self._items.report()  # type: ignore[no-any-return]

    def close(self) -> None:
        # Set first, so that a thread in `__next__` ends its loop. Ctrl-C may cut the rest off: call again.
        self._closed = True
        if self._batches is not None:
            self._batches.close()
        self._items.close()


class Epochs(Loop[T]):
    """The batches of a loader with ``map``, with a device, or with code of the program but no overlap."""

    def __init__(self, loader: Loader[Any], epochs: Any) -> None:
        super().__init__(None, None, loader._make, loader._map)
        self._loader, self._epochs = loader, epochs
        self._begins = InTurn()

    def _asks(self) -> None:
        if self._items is None:
            self._begins(self._begin)
        super()._asks()

    def _begin(self) -> None:
        if self._items is not None:  # another thread was first
            return
        epochs, sender = self._epochs, self._loader._sender
        if not epochs.has_begun:
            self._loader._stop_sending()
        epochs.begin()
        if sender is None:
            self._items = epochs
        else:
            source: Any = epochs if self._make is None else Loop(epochs, None, self._make)
            sender.begin(self, source, epochs._sent, epochs._position)

    def __len__(self) -> int:
        return max(0, self._epochs.all() - self._count)  # type: ignore[no-any-return]

    def report(self) -> Report:
        return self._loader.report()

    def close(self) -> None:
        if self._items is not None:
            super().close()
        self._epochs.close()


def sender(device: Any, depth: int) -> Sender | None:
    """Return the object that sends batches to the device; None if that is host memory."""
    # The text "cpu" needs no torch.
    streams = None if isinstance(device, str) and device == "cpu" else streams_of(device)
    if streams is None:
        return None
    import torch

    return Sender(streams, "device" if streams is device else str(torch.device(device)), depth)


class Sender:
    """Sends the batches of one loader, or the groups of one stream, which calls these methods.

    With overlap, each iteration has its own thread.
    """

    # What measures the loop: a row of the loader's or stream's trace.
    recorder: Any
    # Whether a thread sends ahead of the loop, and on a stream of its own.
    overlap = copy_stream = True

    def __init__(self, streams: Accelerator, device: str, depth: int) -> None:
        self.device, self.depth = device, depth
        self._streams = streams
        # Shared by all iterations, so that they reuse its slots.
        self._upload = Upload(streams)
        # The position after the last batch that the loop received. Empty: that is the loader's own position.
        self.place: list[Any] = []
        # Without overlap, the batch that is being sent.
        self._kept: list[Any] = []
        self._items: Callable[[], _Items[Any] | None] = lambda: None
        self._thread = _Thread()
        self._pid = os.getpid()

    def slots(self, count: int, nbytes: int) -> list[tuple[int, Any]] | None:
        """Return page-locked memory for the loader's slots: its addresses, and what owns it.

        A copy to the device reads it directly, without a bounce buffer. None: torch's has another size.
        """
        made = [self._streams.host(nbytes).zero_() for _ in range(count)]
        fit = all(memory.numel() == nbytes for memory in made)
        return [(memory.data_ptr(), memory) for memory in made] if fit else None

    def begin(
        self,
        loop: Loop[Any],
        batches: Any,
        is_sent: Callable[[], None],
        position: Callable[[], Any] | None = None,
    ) -> None:
        """Let the loop have the batches. ``is_sent`` ends the time of a batch's copy."""
        upload = self._upload
        upload.start(self.copy_stream)
        recorded: Any = None

        def send(batch: Any) -> Sent:
            with upload.using():
                sent = upload.send(batch.torch())
            is_sent()
            sent.item = batch._moved(sent.item)
            return sent

        def receive(sent: Sent) -> Any:
            nonlocal recorded
            batch = upload.receive(sent)
            if batch._place != recorded:  # not once more after Ctrl-C
                recorded = batch._place
                self.recorder.received(*recorded)
            return batch

        self.place = [position()] if position else []
        self._thread, self._kept = _Thread(), []
        items: _Items[Any] = _Items(
            (batches, send, position),
            self.depth - 1,
            place=self.place,
            thread=self._thread,
            overlap=self.overlap,
        )
        self._items = weakref.ref(items)
        loop._batches, loop._sender, loop._receive = batches, self, receive
        if self.overlap:
            loop._make, loop._start = None, starter(items, "twinbuf-upload", upload)
        else:
            loop._make = partial(InTurn(), partial(make_one, items.worker(), self._kept))
        # The last step: before it, Ctrl-C undoes all.
        loop._items = items

    def last(self) -> Any:
        """Return the position after the last batch that the loop received, or None: the loader's own."""
        return next(iter(self.place), None)

    def at(self) -> Any:
        """Return the position of a loop under way, None if there is none."""
        items = self._items()
        return None if items is None or items.is_closed else self.last()

    def catch_up(self) -> None:
        """Wait for the device, as part of the use of the last batch. A forked child has no device."""
        if self._pid == os.getpid():
            self._upload.catch_up()

    def ended(self, whole: bool) -> None:
        """The loop got an error, has had its last batch, or nothing refers to it any more.

        After the last batch, the thread writes the end of its trace when it lets go of the loader or stream.
        Wait up to 1 s, so that a program which drops that then has the whole trace.
        """
        if self._pid == os.getpid():
            self.recorder.ended()
            if whole:
                self._thread.join(1.0)

    def stop(self, timeout: float | None = None) -> bool:
        """Let the thread end as soon as it has the batch that it waits for.

        Wait for that up to ``timeout`` seconds. Return whether it has ended.
        """
        if (items := self._items()) is not None:
            items.close()
        self._kept.clear()  # it would hold its slot as long as the old loop
        return bool(self._thread.join(timeout))
