"""Batches of a `Loader` or groups of a `stream` on a device.

A thread reads into slots, which are page-locked for a loader. With overlap a second thread enqueues copies of
these slots on a side stream while the loop uses the batch before. The loop's stream waits for the copies.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from ._drive import InTurn, make_one, start
from ._loop import Loop
from ._prefetch import around
from ._streams import Accelerator, Sent, Upload, streams_of
from ._twinbuf import _Items, _Thread


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
        self._thread = _Thread()
        items: _Items[Any] = _Items(
            batches,
            self.depth - 1,
            send=send,
            states=position,
            place=self.place,
            thread=self._thread,
            overlap=self.overlap,
        )
        self._items = weakref.ref(items)
        loop._batches, loop._sender, loop._receive = batches, self, receive
        if self.overlap:
            loop._make, loop._start = None, partial(start, items, around(upload), "twinbuf-upload")
        else:
            loop._make = partial(InTurn(), partial(make_one, items.worker()))
        # The last step: before it, Ctrl-C undoes all.
        loop._items = items

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
        return bool(self._thread.join(timeout))
