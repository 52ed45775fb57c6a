"""`Records`: files of records, and the steps that change the records on their way to the slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import index
from pathlib import Path
from typing import Any, Self, SupportsIndex, overload

import numpy
import numpy.typing as npt

from . import _values as values
from ._drive import made_by
from ._twinbuf import _files, _Records
from ._values import Paths
from .errors import FileError, OptionError


class Records(_Records):
    """Records in one or several files, numbered consecutively from the first file on.

    Open them with one of the static methods. Each takes a path or a list of paths. A path may be a folder or
    a pattern such as ``train_*.bin``; its files are taken in natural order (``9`` before ``10``). All methods
    check every file's length, and its header if it has one. None reads all data.

    A record of an array is one entry of its first axis; `windows` makes records of several. `to` and `map`
    change records while a loader copies them into its slots. ``data[i]`` reads one record as a numpy array,
    ``data[10:20]`` several.
    """

    __slots__ = ("__weakref__", "_how")
    # How the files that were found were opened and their records changed, from any working directory.
    _how: dict[str, Any]
    # Records are arrays: `in` would compare with each of them.
    __contains__ = None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        raise TypeError("Records: wanted `Records.open_npy(paths)` or another `open` method, found a call")

    @staticmethod
    def open(paths: Paths, record_bytes: SupportsIndex, *, skip_short: bool = False) -> Records:
        """Open files without a header as records of ``record_bytes`` bytes."""
        return _open("open", paths, values.whole("record_bytes", record_bytes), skip_short)

    @staticmethod
    def open_headerless(paths: Paths, dtype: Any, *, skip_short: bool = False) -> Records:
        """Open headerless files of numbers, as written by ``numpy.ndarray.tofile`` and nanoGPT.

        A record is one number: use `windows`. Files that begin like a format that this package knows, or like
        text, are refused; text is allowed for types of one byte.
        """
        return _open("open_headerless", paths, values.dtype_of(dtype), skip_short)

    @staticmethod
    def open_llm_c(paths: Paths, *, skip_short: bool = False) -> Records:
        """Open token files with llm.c's header. A record is one token: use `windows`."""
        return _open("open_llm_c", paths, None, skip_short)

    @staticmethod
    def open_npy(paths: Paths, *, skip_short: bool = False) -> Records:
        """Open ``.npy`` files. A record is one entry of the first axis."""
        return _open("open_npy", paths, None, skip_short)

    @staticmethod
    def open_safetensors(paths: Paths, tensor: str, *, skip_short: bool = False) -> Records:
        """Open the tensor of this name in ``.safetensors`` files. A record is one entry of the first axis."""
        return _open("open_safetensors", paths, values.text_of("tensor", tensor, "a name"), skip_short)

    @staticmethod
    def open_npz(paths: Paths, array: str, *, skip_short: bool = False) -> Records:
        """Open the array of this name in ``.npz`` files, not compressed, as ``numpy.savez`` writes them.

        A record is one entry of the first axis.
        """
        return _open("open_npz", paths, values.text_of("array", array, "a name"), skip_short)

    @staticmethod
    def open_indexed(paths: Paths, indexes: Paths) -> Records:
        """Open records that differ in length: files of bytes, each with an index.

        An index is a ``.npy`` file of one more offset than there are records: record ``i`` is the bytes from
        offset ``i`` to offset ``i + 1``. ``numpy.cumsum([0] + [len(record) for record in records])`` makes
        one. In a batch, such records are a list of arrays.
        """
        return _open("open_indexed", paths, _files(values.paths_of("indexes", indexes)), False)

    @staticmethod
    def open_megatron(paths: Paths) -> Records:
        """Open token files of Megatron-LM: ``.bin`` with an index in the ``.idx`` of the same name.

        A record is a sequence; in a batch, they are a list of arrays. They have the type of the file:
        ``to("int64")`` makes them what torch's embeddings take.
        """
        return _open("open_megatron", paths, None, False)

    def to(
        self,
        dtype: Any,
        *,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        planar: bool = False,
    ) -> Records:
        """Return the same records with elements of another type: they are cast while they are copied.

        Booleans and integers become any wider integer that holds all their numbers, float32 or float64;
        booleans also uint8. float32 becomes float16, bfloat16 or float64; these three become float32. `map`
        makes other types, but not of bfloat16 and 8-bit floats, which numpy lacks.

        A loader casts tokens by default: records of uint16 or uint32 with at most one axis become int64, the
        type that torch's embeddings and losses take. ``to(data.dtype)`` leaves them as they are in the file.
        Records that differ in length are not cast by default, because a cast makes room in each slot for a
        batch of the longest record: ``to("int64")`` casts them.

        With ``mean`` or ``std``, one number or one for each channel (the last axis), an element ``x`` becomes
        ``(x / most - mean) / std``, where ``most`` is 255 for uint8, 65535 for uint16, 32768 for int16, and 1
        for float16 and bfloat16. With ``planar``, the last three axes ``(height, width, channels)`` become
        ``(channels, height, width)``. Both take records of these five types, and make float32.
        """
        name, planar = values.dtype_of(dtype), values.flag_of("planar", planar)
        if not planar and mean is None and std is None:
            return self._with((name, None))
        if name != "float32":
            raise OptionError(f"dtype: wanted float32 for `mean`, `std` and `planar`, found {name}")
        means, stds = _floats("mean", mean, 0.0), _floats("std", std, 1.0)
        # If they are the same for all channels, the number of channels does not matter.
        channels = 1 if len(means) == len(stds) == 1 and not planar else (1, *self.shape)[-1]
        if not {len(means), len(stds)} <= {1, channels}:
            wanted = f"one number or {channels}, one for each channel"
            raise OptionError(f"mean, std: wanted {wanted}, found {len(means)} and {len(stds)}")
        scales = None
        if mean is not None or std is not None:
            most = {"uint8": 255.0, "uint16": 65535.0, "int16": 32768.0}.get(self.dtype, 1.0)
            scale, shift = 1.0 / (most * stds), -means / stds
            each = numpy.ones(channels)
            scales = (scale * each).tolist(), (shift * each).tolist()
        return self._with((name, (channels, scales, planar)))

    def map(
        self,
        function: Callable[[npt.NDArray[Any], int], npt.ArrayLike],
        dtype: Any,
        shape: Sequence[SupportsIndex],
    ) -> Records:
        """Return the same records after ``function(record, seed)``.

        The function returns an array of this type and shape for each. The reading threads of a loader call
        it, with a copy of the record as a numpy array, and take the GIL for that: use several ``workers``
        where it releases the GIL, as decoders do. Without overlap the loop's thread calls it. ``seed`` is a
        number for this record in this epoch, made of the plan's seed: the same after any resume. ``data[i]``
        passes that of epoch 0 with seed 0. Seed a generator with it to make random changes repeatable.
        """
        function = values.instance_of("function", Callable, function, "a function")
        return self._with((function, *values.record_of(dtype, shape)))

    def windows(self, rows: SupportsIndex, stride: SupportsIndex | None = None) -> Records:
        """Return the same files as windows of ``rows`` rows, one every ``stride`` rows.

        ``windows(1025, 1024)`` is inputs and targets of 1024 tokens: adjacent windows share one token. No
        window crosses from one file into the next. Rows at the end of a file that do not fill a window are
        left out. Default stride: ``rows``.
        """
        rows, stride = values.whole("rows", rows), values.whole_or_none("stride", stride)
        if self._ragged:
            raise TypeError("windows: wanted records of one size, found records that differ in length")
        if rows == 0:
            raise OptionError("rows: wanted at least 1, found 0")
        if self._how["kind"] == "open":
            why = "and plain bytes have none: open the files with `open_headerless`"
            raise OptionError(f"windows are made of rows, {why}")
        if self._how["steps"]:
            raise OptionError("windows: wanted a call before `to` and `map`, found one after them")
        return _again(self._how | {"windows": (rows, rows if stride is None else stride)})

    def _with(self, step: tuple[Any, ...]) -> Records:
        return _again(self._how | {"steps": [*self._how["steps"], step]}, base=self)

    @property
    def paths(self) -> list[Path]:
        """The files, in the order of their records."""
        return list(map(Path, self._paths))

    @property
    def skipped(self) -> list[Path]:
        """The files that ``skip_short`` left out, because they have less than one record."""
        return list(map(Path, self._skipped))

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> npt.NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | npt.NDArray[numpy.integer[Any]], /) -> Any: ...
    def __getitem__(self, wanted: Any, /) -> Any:
        """Return a record as a numpy array.

        A slice or a list of numbers returns several: an array with one axis more, or a list of arrays if the
        records differ in length. Negative numbers count from the end. Each call reads from the files.
        """
        count = len(self)

        def outside(number: int) -> Exception:
            return IndexError(f"wanted a record from -{count} to {count - 1}, found {number}")

        if isinstance(wanted, slice):
            wanted = range(count)[wanted]
        elif isinstance(wanted, (int, tuple)) or not getattr(wanted, "ndim", hasattr(wanted, "__len__")):
            try:
                # `index` takes Python's and torch's bools, and refuses numpy's: make numpy's of them.
                is_bool = str(getattr(wanted, "dtype", type(wanted).__name__)).endswith("bool")
                number = index(numpy.asarray(wanted)[()] if is_bool else wanted)
            except TypeError:
                kinds = "a whole number, a slice or a list of whole numbers"
                raise TypeError(f"index: wanted {kinds}, found {wanted!r}") from None
            if not -count <= number < count:
                raise outside(number)
            return self._several([number % count], (number % count, 1, 1))[0]
        return self._several(wanted, values.numbers_of("index", wanted, -count, count, outside))

    # Python's own iterators over what has only `__getitem__` take an IndexError of a function for the end.
    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return map(self.__getitem__, range(len(self)))

    def __reversed__(self) -> Iterator[npt.NDArray[Any]]:
        return map(self.__getitem__, reversed(range(len(self))))

    def _several(self, wanted: Any, numbers: Any) -> Any:
        if len(wanted) and any(callable(step[0]) for step in self._how["steps"]):
            return numpy.concatenate([self._mapped(int(number) % len(self)) for number in wanted])
        return self._read(numbers)

    def _mapped(self, number: int) -> Any:
        """Read a record, and call the functions here, so that no frame of Rust is below theirs."""
        answers: list[bytes] = []
        while isinstance(found := self._read((number, 1, 1), answers), tuple):
            answers.append(made_by(*found))
        return found

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Read all records as one numpy array, for ``numpy.asarray``."""
        if self._ragged:
            raise TypeError("numpy.asarray: wanted records of one size, found records that differ in length")
        if copy is False:
            raise ValueError("copy: records are read from their files, which is a copy")
        return numpy.asarray(self[:], dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the files again, and make the same changes, for ``pickle``."""
        return _again, (self._how, len(self))


def _open(kind: str, paths: Any, argument: int | str | list[str] | None, skip_short: bool) -> Records:
    # The files now: a copy that opens them again must not have others.
    paths, skip_short = _files(values.paths_of("paths", paths)), values.flag_of("skip_short", skip_short)
    how = {"kind": kind, "paths": paths, "argument": argument, "skip_short": skip_short}
    records = _again(how | {"windows": None, "steps": []})
    indexes = values.absolute(argument) if isinstance(argument, list) else argument
    records._how |= {"paths": values.absolute(paths), "argument": indexes}
    return records


def _again(how: dict[str, Any], wanted: int | None = None, base: Records | None = None) -> Records:
    records = _Records.__new__(Records, how, base)
    records._how = how
    if wanted is not None and len(records) != wanted:
        raise FileError(f"{records!r}: wanted {wanted} records, found {len(records)}")
    return records


def _floats(name: str, found: Any, default: float) -> npt.NDArray[numpy.float64]:
    array = values.array_of(default if found is None else found)
    if array.ndim > 1 or array.dtype.kind not in "biuf":
        raise TypeError(f"{name}: wanted a number, or one for each channel, found {found!r}")
    array = array.astype("float64").reshape(-1)
    for number in array[~numpy.isfinite(array) | ((array == 0) & (name == "std"))]:
        wanted = "finite numbers" if name == "mean" else "finite numbers other than 0"
        raise OptionError(f"{name}: wanted {wanted}, found {number:g}")
    return array
