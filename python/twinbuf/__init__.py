"""Overlap reading with training: one buffer is filled while the other is used.

`Records` are fixed-size records in files, `Plan` says which of them make which batch, and `Loader` reads the
batches ahead of their use. A `Batch` is the slot that it was read into: `Batch.numpy` and `Batch.torch` copy
nothing. `prefetch` and `watch` go around any other iterable.

>>> import numpy, tempfile, twinbuf as tb
>>> folder = tempfile.TemporaryDirectory()
>>> numpy.save(folder.name + "/train.npy", numpy.arange(20, dtype="float32").reshape(10, 2))
>>> data = tb.Records.open_npy(folder.name + "/*.npy")
>>> loader = tb.Loader(data, tb.Plan(data, batch=5, shuffle="full", seed=1))
>>> sum(float(batch.numpy().sum()) for batch in loader.epochs(1))
190.0
"""

import atexit

from ._generate import generate
from ._prefetch import Prefetcher, prefetch
from ._twinbuf import (
    Batch,
    Chunks,
    Loader,
    Plan,
    Prediction,
    Records,
    Report,
    Window,
    __version__,
    _close_all,
)
from ._watch import Watched, watch
from .errors import CheckpointError, Error, FileError, ForkedError, LoaderError, OptionError

__all__ = [
    "Batch",
    "CheckpointError",
    "Chunks",
    "Error",
    "FileError",
    "ForkedError",
    "Loader",
    "LoaderError",
    "OptionError",
    "Plan",
    "Prediction",
    "Prefetcher",
    "Records",
    "Report",
    "Watched",
    "Window",
    "__version__",
    "generate",
    "prefetch",
    "watch",
]

atexit.register(_close_all)
