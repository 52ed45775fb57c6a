"""What can go wrong: the exceptions of files, options, states and loaders.

An argument of a wrong type is a ``TypeError``, but a wrong ``rank`` an `OptionError`. ``data[i]`` of a
missing record is an ``IndexError``, a missing name of a tensor a ``KeyError``, a missing device a
``RuntimeError``.

An exception that your own code raises reaches the loop as it was raised, but a ``StopIteration`` that is not
the end of an iterator: that becomes a ``RuntimeError``. In a loader, one of a data set or of `Records.map`
has a note that names the batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Error(Exception):
    """Base of the exceptions that this package defines.

    Attributes
    ----------
    path, offset
        The file and the byte in it, where there is one.
    loader, epoch, step
        The name of the loader and the batch, where there is one.
    """

    _path: str | None = None
    offset: int | None = None
    loader: str | None = None
    epoch: int | None = None
    step: int | None = None

    @property
    def path(self) -> Path | None:
        """The file, where there is one."""
        return None if self._path is None else Path(self._path)


class FileError(Error, OSError):
    """A file cannot be opened, read or written, or is not what it should be."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        # These are not in `__dict__`, and pickle would leave them out.
        of = {name: getattr(self, name) for name in ("errno", "strerror", "filename")}
        return type(self), self.args, self.__dict__ | of


class MissingFileError(FileError, FileNotFoundError):
    """There is no such file, or a folder or pattern has none."""


class FilePermissionError(FileError, PermissionError):
    """This process may not read or write the file."""


class OptionError(Error, ValueError):
    """An option has a value that cannot work."""


class CheckpointError(Error, ValueError):
    """A state belongs to another plan or data set, or is none."""


class LoaderError(Error, RuntimeError):
    """A loader, a loop or a writer cannot continue."""


class NestedError(LoaderError):
    """The call would wait for itself: a data set, `Records.map`, a hook or a signal's handler makes it.

    Code that makes the items of `prefetch` or `generate` gets a `LoaderError`.
    """


class LoaderTimeoutError(LoaderError, TimeoutError):
    """A batch, or the end of a read or an item, has not come in time."""


class ForkedError(LoaderError):
    """Something is used in a process that was forked from the one that made it."""
