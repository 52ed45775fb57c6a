"""Overlap reading with training: one buffer is filled while the other is used.

`Records` opens files. `Plan` divides their records into batches. `Loader` reads the batches ahead of their
use. `Batch.numpy` and `Batch.torch` return arrays in the buffer that the batch was read into, without a copy;
with a ``device``, `Batch.torch` returns tensors there.

For other loops: `watch` measures any iterable, `prefetch` fetches its next items in a thread, `generate`
overlaps code that makes data with the code that uses it, and `stream` reads the weights of a model
(`Tensors`) layer by layer. `Writer` writes what a loop makes to a file behind it.

>>> import numpy, tempfile, twinbuf as tb
>>> folder = tempfile.TemporaryDirectory()
>>> numpy.save(folder.name + "/train.npy", numpy.arange(20, dtype="float32").reshape(10, 2))
>>> data = tb.Records.open_npy(folder.name + "/*.npy")
>>> loader = tb.Loader(data, tb.Plan(data, batch=5, shuffle="full", seed=1))
>>> sum(float(batch.numpy().sum()) for batch in loader.epochs(1))
190.0
"""

import os as _os
from functools import wraps as _wraps
from multiprocessing import parent_process as _parent_process
from multiprocessing.reduction import ForkingPickler as _ForkingPickler
from threading import current_thread as _current_thread
from typing import Any as _Any

from ._generate import generate
from ._loader import Loader
from ._plan import Chunks, Plan, Window
from ._prefetch import Prefetcher, prefetch
from ._records import Records
from ._report import Report
from ._tensors import Stream, Tensors, stream
from ._twinbuf import Batch, Group, __version__, _forked
from ._watch import Watched, watch
from ._write import Writer
from .errors import (
    CheckpointError,
    Error,
    FileError,
    ForkedError,
    LoaderError,
    LoaderTimeoutError,
    OptionError,
)
from .tensors import TensorInfo

__all__ = [
    "Batch",
    "CheckpointError",
    "Chunks",
    "Error",
    "FileError",
    "ForkedError",
    "Group",
    "Loader",
    "LoaderError",
    "LoaderTimeoutError",
    "OptionError",
    "Plan",
    "Prefetcher",
    "Records",
    "Report",
    "Stream",
    "TensorInfo",
    "Tensors",
    "Watched",
    "Window",
    "Writer",
    "__version__",
    "generate",
    "prefetch",
    "stream",
    "watch",
]

if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_forked)


def _refuse(message: str) -> None:
    raise TypeError(message)


def _reduce(batch: Batch) -> _Any:
    if _parent_process() is None or _current_thread().name != "QueueFeederThread":
        # It raises. A pool hands that on, and never ends if the other side raises.
        return batch.__reduce__()
    return _refuse, (
        "a worker process sent a Batch, which is a slot of a loader in that process: yield a copy of its "
        "data, `batch.numpy().copy()`, or iterate over the loader without the `DataLoader`",
    )


def _after_import(method: _Any) -> _Any:
    @_wraps(method)
    def torch(self: _Any) -> _Any:
        # Here and not in Rust: the interpreter may end this thread while the import runs Python's code.
        import torch  # noqa: F401

        return method(self)

    return torch


for _kind in (Batch, Group):
    _kind.torch = _after_import(_kind.torch)  # type: ignore[method-assign]

# A worker's thread prints what pickle raises and sends nothing: the other process would wait for ever.
_ForkingPickler.register(Batch, _reduce)
