"""Batches of a `Loader` on a device: a thread sends the next one while the loop uses this one.

The thread of Rust reads into page-locked slots, a thread of Python enqueues their copies on a side stream,
and the loop's stream waits for them. The copies, their edges and the thread are those of `prefetch`.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._prefetch import Items, Position, Run
from ._streams import Sent, Streams, Upload, streams_of
from ._twinbuf import _Recorder
from .report import BOUND, Report

if TYPE_CHECKING:
    from ._twinbuf import Batch

# Batches that are sent ahead of the one in use.
_AHEAD = 1


def sender(device: Any) -> Sender | None:
    """Return what sends batches to the device; None where they stay in host memory."""
    if device == "cpu":  # without torch
        return None
    streams = streams_of(device)
    if streams is None:
        return None
    if streams is device:
        return Sender(streams, "device")
    import torch

    return Sender(streams, str(torch.device(device)))


class Sender:
    """The device of one loader. The loader calls it; each iteration has its own thread."""

    def __init__(self, streams: Streams, device: str) -> None:
        self.device = device
        self._streams = streams
        self._position = Position()
        self._run: weakref.ref[Run[Batch]] | None = None
        self._loop = _Recorder(time.perf_counter())
        self._sending = _Seconds()

    def slot(self, nbytes: int) -> Any:
        """Return page-locked bytes for the loader to read into."""
        return self._streams.host(nbytes).zero_()

    def begin(self, batches: Any, overlap: bool) -> Any:
        """Return the iterator that the caller of the loader gets."""
        upload = _BatchUpload(self._streams, self._sending)
        upload.start()
        if not overlap:
            self._position = Position()
            return _InTurn(batches, upload, self._loop)
        run: Run[Batch] = Run(batches, _AHEAD, upload, False, batches._position)
        self._position = Position(run)
        self._run = weakref.ref(run)
        items = _OnDevice(run, upload, self._position, batches, self._loop)
        run.start()
        return items

    def stop(self) -> None:
        """Let the thread end after the batch that it waits for."""
        run = self._run() if self._run is not None else None
        if run is not None:
            run.stop()

    def join(self) -> None:
        """Wait for the thread to end."""
        run = self._run() if self._run is not None else None
        if run is not None:
            run.join()
        self._run = None

    def forget(self) -> None:
        """A state was loaded: the place is the loader's own."""
        self._position = Position()

    def position(self) -> Any:
        """Return the place after the last batch that the caller received; None: it is the loader's own."""
        return self._position.state if self._position.ahead() else None

    def report(self, reading: Report) -> Report:
        """Return where the time of the loop went; `reading` is the report of the thread that sends."""
        load = max(reading.load, self._sending.total)
        report = dataclasses.replace(reading, **self._loop.figures(), load=load, text=None)
        return dataclasses.replace(report, advice=_advice(report, reading.load))


def _advice(report: Report, reading: float) -> str:
    if report.verdict == "Unmeasured":
        return "Nothing was measured."
    if not report.overlap:
        return "Each batch is read and sent when it is asked for: set `overlap=True`."
    if report.verdict == "ComputeBound":
        return "The compute decides: no loader makes this faster."
    if report.verdict == "Balanced":
        return "The stages are balanced: only making all of them faster helps."
    if reading * BOUND >= report.load:
        return "Reading decides: use a faster disk, smaller records, or `shuffle=tb.Window(64)`."
    return "The copies to the device decide: send smaller types, such as uint8 for images."


class _Seconds:
    """Seconds that several threads add up, one after the other."""

    def __init__(self) -> None:
        self.total = 0.0


class _BatchUpload(Upload):
    """Makes a batch of the loader one on the device, which frees its slot."""

    def __init__(self, streams: Streams, sending: _Seconds) -> None:
        super().__init__(streams)
        self._sending = sending

    def send(self, item: Any) -> Sent:
        start = time.perf_counter()
        sent = super().send(item.torch())
        item._moved(sent.item)
        self._sending.total += time.perf_counter() - start
        return Sent(item, sent.copied, sent.on_device, late=False)


def _end(loop: _Recorder) -> None:
    loop.end(time.perf_counter())


class _OnDevice(Items["Batch"]):
    """The batches that the thread has sent."""

    def __init__(
        self, run: Run[Batch], upload: Upload, position: Position, batches: Iterator[Batch], loop: _Recorder
    ) -> None:
        super().__init__(run, upload, position)
        self._batches = batches
        self._loop = loop
        weakref.finalize(self, _end, loop).atexit = False

    def __next__(self) -> Batch:
        self._loop.ask(time.perf_counter())
        try:
            batch = super().__next__()
        except StopIteration:
            _end(self._loop)
            # Of an iteration that another one has ended, or `close`, this raises what the loader has to tell.
            return next(self._batches)
        except BaseException:
            _end(self._loop)
            raise
        self._loop.receive(batch.epoch, batch.step, time.perf_counter())
        return batch


class _InTurn:
    """Without overlap: each batch is read and sent when it is asked for."""

    def __init__(self, batches: Iterator[Batch], upload: Upload, loop: _Recorder) -> None:
        self._batches = batches
        self._upload = upload
        self._loop = loop
        weakref.finalize(self, _end, loop).atexit = False

    def __iter__(self) -> _InTurn:
        return self

    def __next__(self) -> Batch:
        self._loop.ask(time.perf_counter())
        try:
            with self._upload.using():
                sent = self._upload.send(next(self._batches))
        except BaseException:
            _end(self._loop)
            raise
        batch: Batch = self._upload.receive(sent)
        self._loop.receive(batch.epoch, batch.step, time.perf_counter())
        return batch
