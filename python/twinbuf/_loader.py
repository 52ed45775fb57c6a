"""`Loader`: reads the batches of a plan ahead of use."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from operator import index
from time import monotonic
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from . import _values as values
from ._drive import InTurn, fill, fill_one, start
from ._loop import Epochs, Sender, sender
from ._plan import Plan
from ._records import Records
from ._twinbuf import Batch, _Loader, _Plan
from ._values import Path
from .errors import CheckpointError, LoaderError, LoaderTimeoutError, OptionError

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeVar

    from ._streams import Accelerator
    from ._twinbuf import _Batches, _Filler

    # What the loop gets: batches, or what `map` makes of them.
    Made = TypeVar("Made", default=Batch)
else:
    from typing import TypeVar

    Made = TypeVar("Made")


class Dataset(Sized, Protocol):
    """A data set of the program's."""

    @property
    def dtype(self) -> Any:
        """The type of a record's elements."""

    @property
    def shape(self) -> Any:
        """The axes of a record."""

    def read_into(self, indices: npt.NDArray[np.int64], out: memoryview, /) -> object:
        """Fill ``out`` with these records."""


class Loader(_Loader, Generic[Made]):
    """Reads the batches of a plan ahead of use.

    A thread reads while the loop computes. It fills ``depth`` buffers of one batch each in turn. They are
    allocated once; only a batch that the loop keeps takes its buffer along (`Batch`). Arrays of a batch are
    views of its buffer. The thread takes the GIL only to call code in Python: that of a data set, or of
    `Records.map`.

    Iterate over ``epochs``, or over the loader itself for one epoch after another. Only one iteration is
    active: starting another ends the previous one. Switches of the environment override arguments, such as
    ``TWINBUF_OVERLAP=0``. A change of ``depth``, ``workers`` or ``overlap`` is logged; ``repr()`` and
    `report` show the values of these in effect.

    In a process forked from the one that built it, methods raise `ForkedError`; attributes, ``len()`` and
    ``repr()`` work. Batches and arrays in host memory that were received before the fork stay usable there.

    Parameters
    ----------
    data
        `Records`, or an object with ``__len__``, the ``dtype`` and ``shape`` of a record, and
        ``read_into(indices, out)``. That method fills ``out`` (a memoryview of shape ``(len(indices),
        *shape)``) with the records of these numbers (an int64 array). It must fill all of ``out``: whatever
        it skips may contain data of an earlier batch. Keeping ``out``, or an array or tensor made from it,
        after the call raises ``BufferError``. It must not use the loader that it reads for.

        A tuple or a dict of data sets, such as images and labels, is matched by number; a batch is then a
        tuple or a dict of their parts. An optional attribute ``fingerprint``, a number from 0 to 2**64 - 1,
        identifies the data in a state.
    plan
        Which records each batch has.
    name
        Names the loader in errors, reports and traces, and in its switches: ``TWINBUF_TRAIN_DEPTH=3``.
    device
        Where batches go: ``"cuda"``, ``"cuda:1"``, a ``torch.device``, any accelerator of torch. A second
        thread sends the next batch from page-locked slots, on a separate stream, while the loop uses this
        one. ``batch.torch()`` is then on the device, and the current stream waits for it. Without a number,
        a rank that called no ``set_device`` gets the device of its ``LOCAL_RANK``. Default: host memory, like
        ``"cpu"``.
    device_depth
        How many batches the device holds, 2 or more, beside those that the loop keeps and up to three that
        work still uses: asking for a batch waits for the work on all but the last. Default: 2, one in use
        and one on its way.
    depth
        The number of slots, at least one more than ``workers``; without overlap 1 is enough. Default: two
        more than ``workers``, one of them for the batch that the loop holds; 2 for one worker with slots of
        16 MiB or more, and without overlap. With overlap, smaller slots of files, with neither `Records.map`
        nor a ``memory_limit``, are as many as fit 2 MiB in whole pages, 16 at most; if those are fewer than
        two more than ``workers``, three more than ``workers``. ``TWINBUF_DEPTH`` overrides it.
    workers
        The number of reading threads, 1 to 64; none without overlap. One is enough to read files. More help
        if ``read_into`` of a data set, or a function of `Records.map`, decodes and releases the GIL; several
        threads then call it.
    overlap
        Whether a thread reads ahead. With False each batch is read when it is requested; the batches are the
        same.
    copy_stream
        Whether copies to the ``device`` have a stream of their own. With False they are enqueued on the
        stream that is current when the iteration starts, in order with the loop's work, to measure what the
        copy stream gains (by the rate: the report then takes work before a copy for the copy); do not capture
        a graph on that stream. ``TWINBUF_COPY_STREAM`` overrides it.
    map
        A function that the loop's thread calls with each batch; the loop gets what it returns. The loader
        stays a loader, with its length and its state: ``map=lambda batch: {"input_ids": batch.torch()}``.
    read_mode
        ``"auto"``: through the page cache as far as the data fits, the rest past it where system and files
        allow that. ``"pread"``: all of it through the page cache. ``"direct"``: past the page cache, on Linux
        and Windows.
    memory_limit
        The most bytes for slots, for changes of records and for reads past the page cache; more is an
        `OptionError`. New memory for the slot of a batch that is kept counts too; if it does not fit, asking
        for a batch raises ``MemoryError``. Default: no limit.
    breakdown
        Prints the times of loading, of changes of records and of the whole step for the first 10 steps and
        every n-th, to the standard error; the text of `report` has their means. It turns the overlap off,
        because overlapping times cannot be separated. ``TWINBUF_BREAKDOWN=100`` does the same.
    trace
        A file for a Chrome trace of the first five epochs.
    """

    __slots__ = ("_filler", "_make", "_map", "_sender")
    # What turns each batch into what the loop gets.
    _map: Callable[[Batch], Made] | None
    # Fills a slot in the loop's thread: without overlap, if that runs code of the program.
    _make: Callable[[], bool] | None
    _filler: _Filler | None
    # Sends the batches to a device.
    _sender: Sender | None
    plan: Plan
    # Attributes of a `DataLoader`, for trainers.
    batch_size: int
    dataset: Sized
    drop_last: bool

    def __new__(
        cls,
        data: Records | Dataset | tuple[Records | Dataset, ...] | Mapping[str, Records | Dataset],
        plan: Plan,
        *,
        name: str | None = None,
        device: str | torch.device | Accelerator | None = None,
        device_depth: SupportsIndex = 2,
        depth: SupportsIndex | None = None,
        workers: SupportsIndex = 1,
        overlap: bool = True,
        copy_stream: bool = True,
        map: Callable[[Batch], Made] | None = None,
        read_mode: str = "auto",
        memory_limit: SupportsIndex | None = None,
        breakdown: SupportsIndex | None = None,
        trace: Path | None = None,
    ) -> Self:
        """Make a loader, and start its threads."""
        map = None if map is None else values.instance_of("map", Callable, map, "a function")
        values.instance_of("plan", _Plan, plan, "a Plan")
        workers, device_depth = values.whole("workers", workers), values.whole("device_depth", device_depth)
        overlap, copy_stream = values.flag_of("overlap", overlap), values.flag_of("copy_stream", copy_stream)
        if device_depth < 2:
            raise OptionError(f"device_depth: wanted 2 or more, found {device_depth}")
        to_device = None if device is None else sender(device, device_depth)
        options = _options(data) | {
            "name": None if name is None else values.text_of("name", name),
            "depth": values.whole_or_none("depth", depth),
            "workers": workers,
            "overlap": overlap,
            "read_mode": values.text_of("read_mode", read_mode),
            "memory_limit": values.whole_or_none("memory_limit", memory_limit),
            "breakdown": values.whole_or_none("breakdown", breakdown) or None,
            "trace": values.path_or_none("trace", trace),
            "sends": to_device is not None,
        }
        slots = None if to_device is None else to_device.slots(*_Loader._slots(plan, options))
        self = super().__new__(cls, plan, options, slots)
        self._map, self._sender, self._make, self._filler = map, to_device, None, None
        *_, overlaps, _ = self._settings
        if to_device is not None:
            to_device.recorder, to_device.overlap = self._recorder, overlaps
            if by := _switch(name, "COPY_STREAM"):
                copy_stream = os.environ[by].strip().lower() in ("1", "on", "true")
            to_device.copy_stream = copy_stream
        for filler in self._fillers():
            if overlaps:
                start(f"{name or 'twinbuf'}-read", fill, filler)
            else:
                self._filler, self._make = filler, partial(InTurn(), partial(fill_one, filler))
        self._tell_overridden(workers, overlap)
        return self

    def _tell_overridden(self, workers: int, overlap: bool) -> None:
        """Log which of depth, workers and overlap the environment has changed."""
        asked, depth, found, overlaps, _ = self._settings
        options = ("depth", asked, depth), ("workers", workers, found), ("overlap", overlap, overlaps)
        # The breakdown turns overlap off. The default depth depends on overlap, workers and a limit.
        changed = [option.upper() for option, argument, in_effect in options[1:] if argument != in_effect]
        for option, argument, in_effect in options:
            others = (*changed, "BREAKDOWN", "MEMORY") if option == "depth" else ("BREAKDOWN",)
            if argument != in_effect and (by := _switch(self._name, option.upper(), *others)):
                prefix = f"{self._name}: " if self._name else ""
                values.warn(f"{prefix}{by} of the environment: {option}={in_effect} and not {argument}")

    def epochs(self, epochs: SupportsIndex | range, /, *, timeout: float | None = None) -> _Batches[Made]:
        """Return the batches of several epochs.

        ``epochs(3)`` is epochs 0, 1 and 2, ``epochs(range(3, 5))`` is 3 and 4. There is no gap between two
        epochs. After `load_state_dict` the iteration continues from that state, unless it is before these
        epochs: ``epochs(3)`` is what remains of three epochs.

        With ``timeout``, a wait of so many seconds for a batch raises `LoaderTimeoutError`, which is a
        ``TimeoutError`` and names what is being read if it is known. The next call waits again. Without
        overlap a read has no limit. While the files are in memory, a loop that waits may read a batch itself,
        and ``timeout`` does not limit that read, nor the work on a device. With a ``device``, the thread that
        sends batches waits, also while the loop computes.
        """
        found = epochs if isinstance(epochs, range) else range(values.whole("epochs", epochs))
        if found.step != 1:
            raise OptionError(f"epochs: wanted a range with a step of 1, found {found}")
        several = values.whole("epochs", found.start), values.whole("epochs", found.stop)
        return self._iterate(timeout, several, single=False)

    def epoch(self, epoch: SupportsIndex, *, timeout: float | None = None) -> _Batches[Made]:
        """Return the batches of one epoch, or the rest of it after `load_state_dict` of a state in it.

        ``timeout`` as of `epochs`.
        """
        one = _epoch(epoch)
        return self._iterate(timeout, (one, one + 1))

    def __iter__(self) -> _Batches[Made]:
        """Return the batches of the next epoch, starting with 0 or with that of `set_epoch`.

        After `load_state_dict`, return the rest of the epoch of that state.
        """
        return self._iterate(None)

    def __len__(self) -> int:
        """Return the number of steps of this rank in the epoch under way, or in the next one."""
        return self._len(self._sender and self._sender.at())

    def _iterate(
        self, timeout: float | None, which: tuple[int, int] | None = None, single: bool = True
    ) -> _Batches[Made]:
        epochs: Any = self._epochs(values.seconds_or_none("timeout", timeout), which, single)
        if self._map is None and self._make is None and self._sender is None:
            return epochs  # type: ignore[no-any-return]
        return Epochs(self, epochs)

    def _stop_sending(self, timeout: float | None = None, closes: bool = False) -> None:
        """End the iteration, and then the thread that sends batches to a device.

        In this order: a loop whose items end asks the iteration why, and the thread may wait for its batch.
        """
        self._check()
        self._end_iteration(closes, self._sender and self._sender.last())
        if self._sender is not None and not self._sender.stop(timeout):
            raise LoaderTimeoutError(f"wanted the end of a load within {timeout or 0:.3f} s")

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Make ``epoch`` the next one that ``iter(loader)`` begins."""
        super().set_epoch(_epoch(epoch))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of a ``DataLoader`` that trainers read, such as ``batch_size``."""
        epoch = self._next_epoch()
        if name == "dataset":
            return _AsDataset(self)
        if name == "batch_sampler":
            return _Steps(self, epoch)
        if name == "batch_size":
            return len(self.plan.indices(epoch, 0)) if self.plan.steps(epoch) else self.plan.batch
        if name == "drop_last":
            return self.plan.drop_last
        if name == "sampler":
            return SimpleNamespace(set_epoch=self._reach_epoch)  # Lightning chooses the epoch of that
        if name == "prefetch_factor":
            return None
        if name == "collate_fn":
            return lambda batch: batch
        raise AttributeError(f"'Loader' object has no attribute {name!r}")

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last received batch, as plain values to save with the model.

        Batches that were only read ahead, or sent to a device, are not counted. A closed loader still has it.
        All ranks have the same state after the same step: any rank resumes from any rank's state.
        """
        position = self._position()
        if self._sender is not None:
            position = self._sender.last() or position
        state: dict[str, Any] = json.loads(position.text())
        # A distributed checkpoint of torch takes dicts in a list apart, and loads only fields that the state
        # of the new loader has: the list has lists of numbers, and no field is left out.
        state["before"] = [[*part.values()] for part in state["before"]]
        optional: dict[str, Any] = {"step": None, "steps": None, "batches": []}
        state["plan"] = state["plan"] and optional | state["plan"]
        return {"list": None} | state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue from a state of `state_dict` with the next iteration.

        Raises `CheckpointError` if the state belongs to another plan or data set; the message names the field
        that differs. Depth, overlap, rank, batch size, the number of ranks, `to` and `map` may differ.

        Data sets are identified by the plan's records, the size of a record and a fingerprint. For files the
        fingerprint covers the type, shape and places of their records, and in each file their first and last
        8 KiB: a change between these is not noticed. A Python data set has no fingerprint, unless it has an
        attribute ``fingerprint``.
        """
        values.instance_of("state", dict, state, "a dict")
        try:
            # `operator.index` converts numpy's integers to Python's.
            text = json.dumps(state, default=index, allow_nan=False)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else CheckpointError
            raise kind(f"state: {error}") from None
        self._stop_sending()  # also for a state that is refused, as `_load`
        self._load(text)
        if self._sender is not None:
            self._sender.place = []

    def close(self, *, timeout: float | None = None) -> None:
        """Stop the reading thread. Raises the error of a read that the loop has not received.

        With a ``device``, an error that the sending thread has received already is dropped.

        Batches in use stay valid. Waits up to ``timeout`` seconds for a read in progress, and then raises
        `LoaderTimeoutError`, which names it if it is known. The thread is left behind, and ends with its
        read; so is one that copies to a device. Default: 1 second if the data set or a function is written in
        Python or batches are copied to a device, otherwise no limit. Ctrl-C ends the wait.
        """
        timeout = values.seconds_or_none("timeout", timeout)
        *_, foreign = self._settings
        if timeout is None and (foreign or self._map is not None or self._sender is not None):
            timeout = 1.0
        self._check()
        since = monotonic()
        try:
            self._stop_sending(timeout, closes=True)
        except LoaderError:
            self._end(timeout, monotonic() - since)
            raise
        except BaseException:  # as by Ctrl-C: wait no longer
            with contextlib.suppress(LoaderError):
                self._end(0.0, 0.0)
            raise
        self._end(timeout, monotonic() - since)

    def _end(self, timeout: float | None, waited: float) -> None:
        if self._sender is not None:
            self._sender.recorder.close()
        self._close(timeout, waited)
        if self._filler is not None:
            with contextlib.suppress(LoaderError):  # the program ends
                self._filler.try_next()  # it finds the end, and completes the trace

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        # What the block raised is reported, and not an error of `close` after that.
        with contextlib.suppress(*() if kind is None else (Exception,)):
            self.close()

    def __repr__(self) -> str:
        _, depth, workers, overlap, _ = self._settings
        name = "" if self._name is None else f" {json.dumps(self._name)}"
        device = "" if self._sender is None else f", device={self._sender.device!r}"
        options = f"depth={depth}, workers={workers}, overlap={overlap}"
        return f"<Loader{name}: {self.plan!r}{device}, {options}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Loader cannot be pickled, because it owns a thread and open files: build it in the process "
            "that uses it, and send its `state_dict()`"
        )


# Hugging Face's `Trainer`, when it resumes, makes another `DataLoader` of the first one's `dataset` and
# `batch_sampler`, and leaves out the first batches. The sampler of a loader yields steps, so batches that are
# left out are not read.


class _Steps:
    """The steps of an epoch, as a batch sampler."""

    def __init__(self, loader: Loader[Any], epoch: int) -> None:
        self._loader = loader
        self._epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self._epoch, step) for step in range(len(self)))

    def __len__(self) -> int:
        return self._loader.plan.steps(self._epoch)


class _AsDataset:
    """The batches as a data set whose indices are steps. It is fast for steps that follow each other.

    Its length is the number of records of the plan, as for the data set of a `DataLoader`.
    """

    def __init__(self, loader: Loader[Any]) -> None:
        self._loader = loader
        self._next: tuple[int, int] | None = None
        self._batches: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._loader.plan.records

    def __getitems__(self, at: tuple[int, int]) -> Any:
        epoch, step = at
        following, self._next = self._next, None
        if at != following:
            state = self._loader.state_dict()
            if state["epoch"] != epoch:
                # For another epoch, the plan alone tells the steps before it.
                state |= {"trained": self._loader.plan._steps_before(_epoch(epoch)), "before": []}
            self._loader.load_state_dict(state | {"epoch": epoch, "step": step})
            self._batches = iter(self._loader.epoch(epoch))
        batch = next(self._batches)
        self._next = epoch, step + 1  # after an error the next call seeks
        return batch


def _options(data: Any) -> dict[str, Any]:
    """Return the data sets, and how their parts make a batch."""
    names, sets = values.sets_of(data)
    if not sets:
        raise OptionError("data: wanted at least one data set, found none")
    for name in names or ():
        values.text_of("data", name, "names as keys of the dict")
    return {"sources": [_source(found) for found in sets], "tuple": isinstance(data, tuple), "names": names}


def _source(data: Any) -> Any:
    """Return `Records` as they are; else the data set, its length, fingerprint, and type and shape."""
    if isinstance(data, Records):
        return data
    values.attribute_of(data, "read_into")
    record = values.record_of(values.attribute_of(data, "dtype"), values.attribute_of(data, "shape"))
    return data, values.length_of(data), values.whole("fingerprint", getattr(data, "fingerprint", 0)), *record


def _epoch(epoch: SupportsIndex) -> int:
    # Refuse the largest number, because the end of the range is the next epoch, which needs a number too.
    if (found := values.whole("epoch", epoch)) == 2**64 - 1:
        raise OptionError(f"epoch: wanted at most 2**64 - 2, found {found}")
    return found


def _switch(name: str | None, *switches: str) -> str | None:
    """Return the first variable that sets one of these: that of the loader with this name, or else of all."""
    own = [] if name is None else [re.sub("[^0-9A-Za-z]", "_", name).upper() + "_"]
    names = [f"TWINBUF_{prefix}{switch}" for switch in switches for prefix in (*own, "")]
    return next((name for name in names if name in os.environ), None)
