"""The arguments of a program as plain values, for the Rust part.

Lengths, attributes and conversions of the program's objects are its own code, which may take any time: it is
called from here, and never from Rust.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Iterable
from math import prod
from operator import index
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import numpy

from ._twinbuf import DTYPES
from .errors import FileError, OptionError

_MOST = 2**64 - 1

Path: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = Path | Iterable[Path]

T = TypeVar("T")


def whole(name: str, found: SupportsIndex) -> int:
    """Return a whole number that fits 64 bits without a sign."""
    try:
        number = index(found)
    except TypeError:
        raise TypeError(f"{name}: wanted a whole number, found {found!r}") from None
    if not 0 <= number <= _MOST:
        raise OptionError(f"{name}: wanted a whole number from 0 to 2**64 - 1, found {number}")
    return number


def whole_or_none(name: str, found: SupportsIndex | None) -> int | None:
    """Return the same, or None if there is no number."""
    return None if found is None else whole(name, found)


def path_or_none(path: Path | None) -> str | None:
    """Return a path, or None if there is none."""
    wanted = "a path, as `str` or `Path`"
    return None if path is None else os.fspath(instance_of("trace", (str, os.PathLike), path, wanted))


def instance_of(name: str, kind: Any, found: T, wanted: str) -> T:
    """Return an argument that has this type."""
    if not isinstance(found, kind):
        raise TypeError(f"{name}: wanted {wanted}, found {found!r}")
    return found


def name_or_none(name: str | None) -> str | None:
    """Return the name of a loader or a loop, or None if it has none."""
    return None if name is None else instance_of("name", str, name, "a string")


def numbers_of(name: str, found: Any, error: Callable[[int], Exception | None]) -> Any:
    """Return whole numbers, for the Rust part: an array, or the first one, the step and the number of them.

    Raises what ``error`` returns for the least and the largest one.
    """
    if isinstance(found, range):
        ends = [found[0], found[-1]] if found else []
    else:
        found = numpy.asarray(found)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            wanted = "a list or an array of whole numbers"
            raise TypeError(f"{name}: wanted {wanted}, found {found.dtype} {found.shape}")
        ends = [int(found.min()), int(found.max())] if found.size else []
    for number in ends:
        if raised := error(number):
            raise raised
    if not ends:
        return 0, 1, 0
    if not isinstance(found, range):
        return found.astype("uint64")
    first, last = ends
    if last < first:
        return numpy.arange(first, last - 1, found.step, dtype=numpy.int64).astype("uint64")
    step = found.step if first < last else 1
    return first, step, (last - first) // step + 1


def dtype_of(dtype: Any) -> str:
    """Return the name of a type: of a string, or of anything else that `numpy.dtype` takes."""
    if dtype is None:  # `numpy.dtype` makes float64 of it
        raise TypeError("dtype: wanted the type of a record's elements, found None")
    text = str(dtype).removeprefix("torch.")
    if text in DTYPES:
        return text
    found = numpy.dtype(dtype)
    if found.name in DTYPES and found.isnative:
        return str(found.name)
    wanted = "a boolean, a number or a complex number in native byte order"
    raise OptionError(f"dtype: wanted {wanted}, found {text}")


def shape_of(shape: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Return the axes of a record."""
    try:
        axes = tuple(map(index, shape))
    except TypeError:
        axes = (-1,)
    if min(axes, default=0) < 0:
        raise TypeError(
            f"shape: wanted the axes of a record as a tuple of numbers from 1 on, found {shape!r}"
        )
    return axes


def record_of(dtype: Any, shape: Any) -> tuple[str, tuple[int, ...]]:
    """Return the type of records of one size."""
    name, axes = dtype_of(dtype), shape_of(shape)
    if not 0 < prod(axes) * DTYPES[name] < 2**63:
        raise OptionError(f"shape: wanted records of at least one element that fit memory, found {shape!r}")
    return name, axes


def paths_of(paths: Any) -> list[str]:
    """Return one path or several."""
    try:
        found = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    except TypeError:
        found = [b""]
    if not all(isinstance(path, str) for path in found):
        wanted = "a path or a list of paths, as `str` or `Path`"
        raise TypeError(f"paths: wanted {wanted}, found {paths!r}")
    return found


def folder_of(paths: list[str]) -> str:
    """Return the working directory, from which these paths are; empty if it is gone and they are absolute."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        for path in paths:
            if not os.path.isabs(path):
                raise FileError(f"{path!r}: the working directory is gone: wanted an absolute path") from None
        return ""


def at_folder(folder: str, paths: list[str]) -> list[str]:
    """Return absolute paths of what was opened in this working directory, also of patterns."""
    escaped = glob.escape(folder)

    def at(path: str) -> str:
        found = os.path.join(folder, path)
        return found if escaped == folder or os.path.exists(found) else os.path.join(escaped, path)

    return [at(path) for path in paths]


def sets_of(data: Any) -> list[Any]:
    """Return the data sets: the values of a tuple or a dict, or ``data`` itself."""
    if isinstance(data, (tuple, dict)):
        return list(data.values() if isinstance(data, dict) else data)
    return [data]


def attribute_of(data: Any, name: str) -> Any:
    """Return what a data set of the program must have."""
    try:
        return getattr(data, name)
    except AttributeError:
        wanted = "an object with `__len__`, `read_into(indices, out)` and the `dtype` and `shape` of a record"
        raise TypeError(f"data: wanted Records, or {wanted}, found {type(data)} without `{name}`") from None


def warn(message: str) -> None:
    """Log a warning."""
    logging.getLogger("twinbuf").warning("%s", message)
