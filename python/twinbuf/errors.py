"""What can go wrong: the exceptions of files, options, states and loaders.

An argument of a wrong type is a ``TypeError``. A missing record is an ``IndexError``, a missing device a
``RuntimeError``.

An exception that your own code raises reaches the loop as it was raised. One of a data set or of
`Records.map` has a note that names the batch. Other code adds no note: the iterable of `prefetch`, ``make``
and ``before`` of `generate`, ``map`` of a `Loader`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

__all__ = [
    "CheckpointError",
    "Error",
    "FileError",
    "ForkedError",
    "LoaderError",
    "LoaderTimeoutError",
    "OptionError",
]


class Error(Exception):
    """Base of all exceptions of this package.

    Attributes
    ----------
    path, offset
        The file and the byte in it, where there is one.
    loader, epoch, step
        The name of the loader and the batch, where there is one.
    """

    path: Path | None = None
    offset: int | None = None
    loader: str | None = None
    epoch: int | None = None
    step: int | None = None


class FileError(Error, OSError):
    """A file cannot be opened or read, or is not what it should be."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file, or a pattern matches none."""


class FilePermissionError(FileError, PermissionError):
    """The file may not be read by this process."""


class OptionError(Error, ValueError):
    """An option has a value that cannot work."""


class CheckpointError(Error, ValueError):
    """A state belongs to another plan or another data set."""


class LoaderError(Error, RuntimeError):
    """The loader cannot continue."""


class LoaderTimeoutError(LoaderError, TimeoutError):
    """A batch, or the end of a read, has not come in time."""


class ForkedError(LoaderError):
    """The loader is used in a process that was forked from the one it was built in."""


def _made(
    kind: str, message: str, path: Path | None, offset: int | None, errno: int | None, at: Any
) -> Exception:
    """Return an exception of the Rust part; ``at`` is a loader, an epoch and a step."""
    error: Any = globals()[kind](_in_python(message))
    error.path, error.offset = path, offset
    if path is not None and isinstance(error, OSError):
        error.filename = os.fspath(path)
    if errno is not None:
        error.errno, error.strerror = errno, os.strerror(errno)
    if at is not None:
        error.loader, error.epoch, error.step = at
    return error  # type: ignore[no-any-return]


# Names in messages of the crates, and the names of the same things in Python.
_NAMES = {
    "Records::len": "len(records)",
    "PlanBuilder::rank": "rank",
    "transform": "map",
    "ReadMode": "read_mode",
    "dataset": "data",
    "epochs(..)": "epochs(n)",
    "overlap(true)": "overlap=True",
    "overlap(false)": "overlap=False",
}


def _in_python(text: str) -> str:
    """Replace the names in a message of the crates by those of Python. Text between backquotes is code."""

    def renamed(found: re.Match[str]) -> str:
        code = _NAMES.get(found[1]) or re.sub(r"^(depth|workers)\((.*)\)$", r"\1=\2", found[1])
        return f"`{code.replace('::', '.')}`"

    text = text.replace(": the data set has no `try_clone`", "")
    text = text.replace("or keep the last batch", "or set `drop_last=False`")
    return re.sub("`([^`]*)`", renamed, text)
