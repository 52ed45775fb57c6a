"""Overlap reading with training: one buffer is filled while the other is used.

`Records` are records in files, `Plan` says which of them make which batch, and `Loader` reads the
batches ahead of their use. A `Batch` is the slot that it was read into: `Batch.numpy` and `Batch.torch` copy
nothing. `prefetch` and `watch` go around any other iterable. `generate` does the same for data that code
makes, and `stream` for the weights of a model (`Tensors`).

>>> import numpy, tempfile, twinbuf as tb
>>> folder = tempfile.TemporaryDirectory()
>>> numpy.save(folder.name + "/train.npy", numpy.arange(20, dtype="float32").reshape(10, 2))
>>> data = tb.Records.open_npy(folder.name + "/*.npy")
>>> loader = tb.Loader(data, tb.Plan(data, batch=5, shuffle="full", seed=1))
>>> sum(float(batch.numpy().sum()) for batch in loader.epochs(1))
190.0
"""

import atexit
import os as _os
from multiprocessing.reduction import ForkingPickler as _ForkingPickler
from typing import Any as _Any

from ._generate import generate
from ._prefetch import Prefetcher, prefetch
from ._twinbuf import (
    Batch,
    Chunks,
    Group,
    Loader,
    Plan,
    Prediction,
    Records,
    Report,
    Stream,
    Tensors,
    Window,
    __version__,
    _close_all,
    _forked,
    stream,
)
from ._watch import Watched, watch
from .errors import CheckpointError, Error, FileError, ForkedError, LoaderError, OptionError
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
    "OptionError",
    "Plan",
    "Prediction",
    "Prefetcher",
    "Records",
    "Report",
    "Stream",
    "TensorInfo",
    "Tensors",
    "Watched",
    "Window",
    "__version__",
    "generate",
    "prefetch",
    "stream",
    "watch",
]

atexit.register(_close_all)
if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(after_in_child=_forked)


def _refuse(message: str) -> None:
    raise TypeError(message)


def _reduce(batch: Batch) -> tuple[_Any, tuple[str]]:
    return _refuse, (
        "a worker process sent a Batch, which is a slot of a loader in that process: yield a copy of its "
        "data, `batch.numpy().copy()`, or iterate over the loader without the `DataLoader`",
    )


# A worker process prints what pickle raises and sends nothing: the other process would wait for ever.
_ForkingPickler.register(Batch, _reduce)
