"""Batches of a `Loader` or groups of a `stream` on a device.

A thread of the Rust part reads into slots, which are page-locked for a loader. A second thread enqueues
copies of these slots on a side stream while the loop uses the batch before. The loop's stream waits for the
copies.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._drive import start
from ._prefetch import around
from ._streams import Accelerator, Sent, Upload, streams_of
from ._twinbuf import _Items, _Recorder, _Thread
from .errors import OptionError

if TYPE_CHECKING:
    from ._twinbuf import Batch


def sender(device: Any, depth: int, name: str, trace: str | os.PathLike[str] | None) -> Sender | None:
    """Return the object that sends batches to the device; None if that is host memory."""
    if depth < 2:
        raise OptionError(f"device_depth: 2 or more wanted, found {depth}")
    streams = None if device == "cpu" else streams_of(device)  # "cpu" needs no torch
    if streams is None:
        return None
    import torch

    return Sender(streams, "device" if streams is device else str(torch.device(device)), depth, name, trace)


class Sender:
    """Sends the batches of one loader, or the groups of one stream, which calls these methods.

    Each iteration has its own thread.
    """

    def __init__(
        self, streams: Accelerator, device: str, depth: int, name: str, trace: str | os.PathLike[str] | None
    ) -> None:
        self.device = device
        self.depth = depth
        self.recorder = _Recorder(name=name, trace=trace, device=True)
        self._streams = streams
        # Shared by all iterations, so that they reuse its slots.
        self._upload = Upload(streams)
        # The position after the last batch that the loop received. Empty: that is the loader's own position.
        self._place: list[Any] = []
        self._items: Callable[[], _Items[Any] | None] = lambda: None
        self._thread = _Thread()

    def slot(self, nbytes: int) -> Any:
        """Return page-locked bytes for the loader to read into."""
        return self._streams.host(nbytes).zero_()

    def begin(
        self,
        batches: Any,
        overlap: bool = True,
        position: Callable[[], Any] | None = None,
        map: Callable[[Batch], Any] | None = None,
        copy_stream: bool = True,
    ) -> _Items[Any]:
        """Return the iterator that the caller of the loader gets."""
        upload = self._upload
        upload.start(copy_stream)

        def send(batch: Any) -> Sent:
            with upload.using():
                sent = upload.send(batch.torch())
            return Sent(batch._moved(sent.item), sent.copied, sent.on_device, late=False)

        self._place = [position()] if position else []
        self._thread = _Thread()
        items: _Items[Any] = _Items(
            batches,
            self.depth - 1,
            send=send,
            receive=upload.receive,
            map=map,
            states=position,
            place=self._place,
            thread=self._thread,
            recorder=self.recorder,
            overlap=overlap,
        )
        self._items = weakref.ref(items)
        start(items, around(upload), "twinbuf-upload")
        return items

    def stop(self) -> None:
        """Let the thread end as soon as it has the batch that it waits for."""
        items = self._items()
        if items is not None:
            items.close()

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def forget(self) -> None:
        """Forget the position: the loader has loaded a state, and has the position of that."""
        self._place = []

    def position(self) -> Any:
        """Return the position after the last batch that the loop received; None: it is the loader's own."""
        return self._place[0] if self._place else None
