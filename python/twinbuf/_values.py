"""The arguments of a program as plain values, for the Rust part.

Lengths, attributes and conversions of the program's objects are its own code, which may take any time: it is
called from here, and not from Rust. Only ``__array__`` and ``__dlpack__`` of a batch, which libraries call
with plain values, convert theirs in Rust.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import prod
from operator import index
from typing import Any, SupportsFloat, SupportsIndex, TypeAlias, TypeVar

import numpy

from ._twinbuf import DTYPES
from .errors import FileError, OptionError

Path: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = Path | Iterable[Path]

T = TypeVar("T")


def whole(name: str, found: SupportsIndex) -> int:
    """Return a whole number that fits 64 bits without a sign."""
    try:
        number = index(found)
    except TypeError:
        raise TypeError(f"{name}: wanted a whole number, found {found!r}") from None
    if not 0 <= number < 2**64:
        raise OptionError(f"{name}: wanted a whole number from 0 to 2**64 - 1, found {number}")
    return number


def whole_or_none(name: str, found: SupportsIndex | None) -> int | None:
    """Return the same, or None if there is no number."""
    return None if found is None else whole(name, found)


def path_or_none(name: str, path: Path | None) -> str | None:
    """Return a path, or None if there is none."""
    return None if path is None else path_of(name, path)


def path_of(name: str, path: Path) -> str:
    """Return a path that can be encoded."""
    wanted = "a path, as `str` or `Path`"
    found = os.fspath(instance_of(name, (str, os.PathLike), path, wanted))
    if not found:
        raise OptionError(f"{name}: wanted {wanted}, found {found!r}")
    return text_of(name, found, wanted, os.fsencode)


def seconds_or_none(name: str, found: Any) -> float | None:
    """Return a time in seconds, or None for no limit."""
    if found is None:
        return None
    instance_of(name, (SupportsFloat, SupportsIndex), found, "a number of seconds or None")
    with suppress(OverflowError):
        if 0 <= (seconds := float(found)) < 2**63:
            return seconds
    raise OptionError(f"{name}: wanted from 0 to 2**63 seconds, found {found}")


def instance_of(name: str, kind: Any, found: T, wanted: str) -> T:
    """Return an argument that has this type."""
    if not isinstance(found, kind):
        raise TypeError(f"{name}: wanted {wanted}, found {found!r}")
    return found


def flag_of(name: str, found: Any) -> bool:
    """Return a boolean option. Accepts bool, numpy's bool, and the integers 0 and 1."""
    if not isinstance(found, (int, numpy.integer, numpy.bool_)) or found not in (0, 1):
        raise TypeError(f"{name}: wanted True or False, found {found!r}")
    return bool(found)


def text_of(name: str, found: str, wanted: str = "a string", encode: Any = str.encode) -> str:
    """Return a string that can be encoded: by default, of characters that UTF-8 has."""
    try:
        encode(instance_of(name, str, found, wanted))
    except UnicodeEncodeError as error:
        raise OptionError(f"{name}: wanted {wanted}, found {found!r}: {error.reason}") from None
    return found


def array_of(found: Any) -> numpy.ndarray[Any, Any]:
    """Return an array. Lists that make none, as they differ in length, become an object: no number."""
    with suppress(ValueError):
        return numpy.asarray(found)
    return numpy.asarray(None)


def numbers_of(name: str, found: Any, least: int, count: int, outside: Callable[[int], Exception]) -> Any:
    """Return whole numbers, for the Rust part: an array, or the first one, the step and the number of them.

    Raises what ``outside`` returns for one that is not from ``least`` to below ``count``. Those below 0 count
    back from ``count``.
    """
    if isinstance(found, range):
        ends = [found[0], found[-1]] if found else []
    else:
        found = array_of(found)
        # numpy makes objects of numbers beyond 64 bits.
        are_whole = found.dtype.kind in "iu" or all(isinstance(number, int) for number in found.flat)
        if found.ndim != 1 or not are_whole:
            wanted = "a list or an array of whole numbers"
            raise TypeError(f"{name}: wanted {wanted}, found {found.dtype} {found.shape}")
        ends = [int(found.min()), int(found.max())] if found.size else []
    for number in ends:
        if not least <= number < count:
            raise outside(number)
    if not ends:
        return 0, 1, 0
    if min(ends) < 0:
        found = numpy.asarray(found, "int64") % count
    if not isinstance(found, range):
        return found.astype("uint64")
    first, last = ends
    if last < first:
        return numpy.arange(first, last - 1, found.step, dtype=numpy.int64).astype("uint64")
    step = found.step if first < last else 1
    return first, step, (last - first) // step + 1


def dtype_of(dtype: Any) -> str:
    """Return the name of a type: of a string, of torch's, or of anything else that `numpy.dtype` takes."""
    if dtype is None:  # `numpy.dtype` makes float64 of it
        raise TypeError("dtype: wanted the type of a record's elements, found None")
    text = str(dtype).removeprefix("torch.")
    if text in DTYPES:
        return text
    wanted = "a boolean, a number or a complex number in native byte order"
    try:
        found = numpy.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        raise TypeError(f"dtype: wanted {wanted}, found {dtype!r}") from None
    if found.name in DTYPES and found.isnative:
        return str(found.name)
    raise OptionError(f"dtype: wanted {wanted}, found {text}")


def record_of(dtype: Any, shape: Any, name: str = "shape") -> tuple[str, tuple[int, ...]]:
    """Return the type of records of one size. ``name`` is that of the argument ``shape``."""
    kind = dtype_of(dtype)
    axes: tuple[int, ...] = (-1,)
    with suppress(TypeError):
        axes = tuple(map(index, axes if isinstance(shape, (bytes, bytearray)) else shape))
    if min(axes, default=0) < 0:
        wanted = "the axes of a record as a tuple of numbers from 1 on"
        raise TypeError(f"{name}: wanted {wanted}, found {shape!r}")
    if not 0 < prod(axes) * DTYPES[kind] < 2**63:
        raise OptionError(f"{name}: wanted records of at least one element that fit memory, found {shape!r}")
    return kind, axes


def paths_of(name: str, paths: Any) -> list[str]:
    """Return one path or several."""
    with suppress(TypeError):
        several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        return [path_of(name, path) for path in several]
    wanted = "a path or a list of paths, as `str` or `Path`"
    raise TypeError(f"{name}: wanted {wanted}, found {paths!r}")


def absolute(paths: list[str]) -> list[str]:
    """Return paths that do not depend on the working directory, which may be gone."""
    with suppress(FileNotFoundError):
        folder = os.getcwd()
        return [os.path.join(folder, path) for path in paths]
    for path in paths:
        if not os.path.isabs(path):
            raise FileError(f"{path!r}: the working directory is gone: wanted an absolute path")
    return paths


def sets_of(data: Any) -> tuple[list[Any] | None, list[Any]]:
    """Return the names of the data sets if they are in a mapping, and the data sets: one or several."""
    if isinstance(data, Mapping) and not hasattr(data, "read_into"):  # a data set may be a mapping too
        return list(data), list(data.values())
    return None, list(data) if isinstance(data, tuple) else [data]


def length_of(data: Any) -> int:
    """Return the number of records of a data set. Text and bytes have a length too, but no records."""
    attribute_of(data, "read_into" if isinstance(data, (str, bytes, bytearray)) else "__len__")
    return len(data)


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
