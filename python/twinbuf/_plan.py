"""`Plan`: which records make up each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from math import prod
from typing import Any, Literal, NamedTuple, Self, SupportsIndex

import numpy
import numpy.typing as npt

from . import _values as values
from ._twinbuf import DTYPES, _Plan, _Records
from .errors import OptionError

# The bytes of a chunk of a windowed shuffle, if the program gives no number of records.
_CHUNK = 1 << 20


class Window(NamedTuple("_Window", [("chunks", int), ("records", int | None)])):
    """A shuffle that mixes the records of ``chunks`` chunks at a time. They come from all over the files.

    A chunk has ``records`` records; by default as many as fit in 1 MiB, of all data sets together, and at
    least one. A plan for a number of records has no default. Memory must hold a window and the chunks that
    are being read, or chunks are read again.
    """

    def __new__(cls, chunks: SupportsIndex, records: SupportsIndex | None = None) -> Self:
        return super().__new__(cls, values.whole("chunks", chunks), values.whole_or_none("records", records))

    def __repr__(self) -> str:
        return f"Window({self.chunks})" if self.records is None else f"Window({self.chunks}, {self.records})"


class Chunks(NamedTuple("_Chunks", [("records", int)])):
    """A shuffle of chunks of ``records`` consecutive records. The order within a chunk is kept."""

    def __new__(cls, records: SupportsIndex) -> Self:
        return super().__new__(cls, values.whole("records", records))

    def __repr__(self) -> str:
        return f"Chunks({self.records})"


class Plan(_Plan):
    """The order of the records in every epoch, cut into batches and split over ranks.

    A plan is a pure function of its arguments, and with ``rank="env"`` of the launcher's variables: the same
    batches on any machine, at any depth.

    Parameters
    ----------
    data
        The data set, or a tuple or dict of data sets with the same number of records. A loader refuses the
        plan of a data set with another number of records. Or a number: the plan is then for the first
        records of any data set that has at least as many.
    batch
        The number of records in a batch of one rank. Or a schedule, a list of up to 16 pairs ``(steps,
        records)``: ``[(1000, 32), (4000, 64)]`` is 1000 steps of 32 records, then batches of 64. The last
        size stays until the training ends, and its number of steps is ignored. Steps are counted over all
        epochs.
    records
        Which records of the data set: a ``range``, a ``slice``, or an array of whole numbers, in any order,
        also repeated. Default: all.
    steps
        The number of steps of an epoch, which then has the first records of its order. Default: as many as
        the records fill, and with ``drop_last=False`` one for the rest.
    shuffle
        ``None``: the order of the data set, or of ``records``. ``"full"``: every record individually.
        ``Window(n)``: records are mixed over n chunks from all over the files. These chunks should fit memory
        and are replaced one by one. More and smaller chunks mix better. ``Chunks(n)``: whole chunks of n
        records.
    seed
        Seed of the shuffle; refused if there is no shuffle. Default: 0.
    rank, world
        This process and the number of processes. ``rank="env"`` takes both from the launcher's variables
        (torchrun, Open MPI, Slurm and others). Default: rank 0 of 1.
    drop_last
        Whether to leave out the records that do not fill a last step. With False they make a smaller batch;
        with several ranks the last step is filled up from the front of the epoch instead, so all ranks have
        the same number of steps. Default: True.
    """

    __slots__ = ("__weakref__",)

    def __new__(
        cls,
        data: Sized | tuple[Sized, ...] | Mapping[str, Sized] | SupportsIndex,
        batch: SupportsIndex | Sequence[tuple[SupportsIndex, SupportsIndex]],
        *,
        records: range | slice | Sequence[int] | npt.NDArray[Any] | None = None,
        steps: SupportsIndex | None = None,
        shuffle: Literal["full"] | Window | Chunks | None = None,
        seed: SupportsIndex | None = None,
        rank: SupportsIndex | Literal["env"] | None = None,
        world: SupportsIndex | None = None,
        drop_last: bool = True,
    ) -> Self:
        """Make a plan of these records."""
        count, is_number = _count(data)
        options = {
            "records": count,
            "batches": _sizes(batch),
            "list": None if records is None else _list(records, count),
            "steps": values.whole_or_none("steps", steps),
            "shuffle": _shuffle(shuffle, data),
            "seed": values.whole_or_none("seed", seed),
            "ranks": _ranks(rank, values.whole_or_none("world", world)),
            "drop_last": values.flag_of("drop_last", drop_last),
        }
        return super().__new__(cls, None if is_number else count, options)

    def steps(self, epoch: SupportsIndex) -> int:
        """Return the number of steps of this rank in an epoch."""
        return super().steps(values.whole("epoch", epoch))

    def indices(self, epoch: SupportsIndex, step: SupportsIndex) -> npt.NDArray[numpy.int64]:
        """Return the numbers of the records of one batch, in batch order, as an int64 array."""
        return super().indices(values.whole("epoch", epoch), values.whole("step", step))

    def __reduce__(self) -> tuple[Any, ...]:
        return _saved, (type(self), *self._save()), getattr(self, "__dict__", None)


def _saved(kind: type[Plan], of: int | None, text: str) -> Plan:
    return _Plan.__new__(kind, of, saved=text)


def _count(data: Any) -> tuple[int, bool]:
    """Return the number of records, and whether it is the argument itself."""
    with suppress(TypeError):
        if (count := values.whole("data", data)) >= 2**63:  # Python receives them as int64 arrays
            raise OptionError(f"data: wanted at most 2**63 - 1 records, found {count}")
        return count, True
    if type(data) is list or isinstance(data, (str, bytes, bytearray)) or not hasattr(data, "__len__"):
        found = f"{type(data).__name__}{': pass a tuple' if type(data) is list else ''}"
        wanted = "a data set, a tuple or dict of data sets, or a whole number"
        raise TypeError(f"data: wanted {wanted}, found a {found}")
    names, sets = values.sets_of(data)
    first, *others = [values.length_of(found) for found in sets] or [0]
    for at, count in enumerate(others, 1):
        if count != first:
            zero, other = (0, at) if names is None else (names[0], names[at])
            counts = f"found {first} in data[{zero!r}] and {count} in data[{other!r}]"
            raise OptionError(f"data: wanted the same number of records, {counts}")
    return first, False


def _sizes(batch: Any) -> list[tuple[int, int]]:
    if not isinstance(batch, Sequence) or type(batch) in (bytes, bytearray):
        return [(0, values.whole("batch", batch))]
    sizes = []
    for size in batch:
        if not isinstance(size, (tuple, list)) or len(size) != 2:
            wanted = "a number of records, or pairs of steps and records"
            raise TypeError(f"batch: wanted {wanted}, found {size!r}")
        sizes.append((values.whole("batch", size[0]), values.whole("batch", size[1])))
    return sizes


def _list(found: Any, count: int) -> Any:
    """Return some of so many records."""

    def outside(number: int) -> Exception:
        wanted = "from 0 on" if number < 0 else f"below {count}"
        return OptionError(f"records: wanted numbers {wanted}, found {number}")

    found = range(count)[found] if isinstance(found, slice) else found
    return values.numbers_of("records", found, 0, count, outside)


def _shuffle(shuffle: Any, data: Any) -> tuple[str, int, int]:
    if shuffle is None or (isinstance(shuffle, str) and shuffle == "full"):
        return shuffle or "none", 0, 0
    if isinstance(shuffle, Chunks):
        return "chunks", shuffle.records, 0
    if isinstance(shuffle, Window):
        records = shuffle.records
        if records is None:
            records = max(1, _CHUNK // max(1, sum(map(_record_bytes, values.sets_of(data)[1]))))
        return "window", records, shuffle.chunks
    line = f'shuffle: wanted None, "full", Window(n) or Chunks(n), found {shuffle!r}'
    raise (OptionError if isinstance(shuffle, str) else TypeError)(line)


def _record_bytes(data: Any) -> int:
    """Return the mean size of a record."""
    if isinstance(data, _Records):
        return data.nbytes // max(len(data), 1)
    try:
        record = [values.attribute_of(data, name) for name in ("dtype", "shape")]
        dtype, shape = values.record_of(*record)
    except Exception:
        wanted = "wanted Window(chunks, records), found Window(chunks)"
        raise OptionError(f"shuffle: the size of a record is unknown: {wanted}") from None
    return prod(shape) * DTYPES[dtype]


def _ranks(rank: Any, world: int | None) -> tuple[int, int] | None:
    """Return this process and the number of processes; None: the launcher's."""
    if rank is None and world is None:
        with suppress(OptionError):
            if (found := Plan(1 << 62, 1, rank="env").world) > 1:
                values.warn(
                    f"Plan: the launcher started {found} processes, and each of them reads all records: "
                    'divide them with rank="env", or set rank=0, world=1 if that is meant'
                )
        return 0, 1
    if isinstance(rank, str) and rank == "env" and world is None:
        return None
    if world is not None:
        with suppress(TypeError, OptionError):
            return values.whole("rank", rank), world
    raise OptionError(
        'rank, world: wanted both as numbers from 0 on, or rank="env" alone, or neither, '
        f"found rank={rank!r}, world={world}"
    )
