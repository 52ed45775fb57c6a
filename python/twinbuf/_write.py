"""`Writer`: rows that a loop makes are written to a file behind it."""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import Any, Self

import numpy

from ._drive import InTurn
from ._streams import Accelerator, Download, home
from ._twinbuf import _Writer
from ._values import path_of, record_of, whole, whole_or_none
from .errors import OptionError


class Writer:
    """Write arrays to ``path``, a ``.npy`` file: one buffer is filled while a thread writes the other.

    ``row`` is the shape of a row: ``Writer("emb.npy", "float32", (768,))`` takes arrays of shape
    ``(n, 768)``. The file has its name only when it is whole: when the ``with`` block ends, or after
    `finish`. An exception in the block before `finish` discards the file, and one that was there before
    stays. If the disk is full or fails, a later call raises `FileError`, with ``path``, ``offset`` and
    ``errno``, `finish` at the latest; nothing more is written then. If it hangs, `append` and `finish` wait,
    also after Ctrl-C. `discard`, ``del`` and the end of the program wait at most 1 s, then leave the thread,
    which removes the file when the disk answers; if the program ends first, the next `Writer` of the name
    does, on Unix.

    With ``shard_bytes``, ``path`` is a new folder, for files with at most so many bytes of rows each, rounded
    down to whole rows that fill whole blocks of 4096 bytes. `Records.open_npy` opens it.

    With ``dtype=None`` files have no header (`Records.open`), and the arrays are bytes of shape
    ``(n, *row)``.

    >>> import numpy, tempfile, twinbuf as tb
    >>> folder = tempfile.TemporaryDirectory()
    >>> with tb.Writer(folder.name + "/emb.npy", "float32", (3,)) as out:
    ...     for _ in range(4):
    ...         out.append(numpy.ones((2, 3), "float32"))
    >>> numpy.load(folder.name + "/emb.npy").shape
    (8, 3)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: Any,
        row: tuple[int, ...] = (),
        *,
        depth: int = 2,
        slot_bytes: int = 4 << 20,
        shard_bytes: int | None = None,
    ) -> None:
        kind, self._row = record_of("uint8" if dtype is None else dtype, row, "row")
        if kind.startswith(("bfloat", "float8")):
            raise OptionError(f"dtype: wanted a type that numpy has, found {kind}")
        self._writer = _Writer(
            path_of("path", path),
            None if dtype is None else kind,
            self._row,
            whole("depth", depth),
            whole("slot_bytes", slot_bytes),
            whole_or_none("shard_bytes", shard_bytes),
        )
        self._dtype = numpy.dtype(kind)
        # Copies from a device that are not in the file yet, for one thread at a time.
        self._download: Download | None = None
        self._turn = InTurn("the writer was called")
        # How many of them may be left when `append` returns: none that would come after the end.
        self._ahead = 2
        self._discarded = False
        # Also at the end of the program: no temporary file stays.
        weakref.finalize(self, self._writer.discard)

    def append(self, rows: Any) -> None:
        """Copy an array or a tensor of shape ``(n, *row)``. Wait while all buffers are being written.

        A tensor on a device is copied on a stream of its own. The loop waits for that copy when it appends
        the second tensor after this one, or one that is elsewhere, or finishes. The rows of a call that
        Ctrl-C interrupts may have been written.
        """
        if hasattr(rows, "detach"):
            rows = rows.detach()
        streams = home(rows)
        if streams is not None or self._download is not None:
            self._turn(partial(self._append, rows, streams))
        else:
            self._write(rows)

    def _append(self, rows: Any, streams: Accelerator | None) -> None:
        if self._download is None or self._download.streams is not streams:
            self._drain(0)
            self._download = Download(streams) if streams is not None else None
        if self._download is None:
            return self._write(rows)
        self._drain(1)
        place = self._download.place(rows)
        self._download.send(rows, place, self._bytes(place.numpy()))
        self._drain(self._ahead)

    def _write(self, rows: Any) -> None:
        if numpy.ma.is_masked(rows):
            raise TypeError("rows: wanted an array without masked values: `rows.filled(value)` has none")
        self._writer.append(self._bytes(numpy.asarray(rows, order="C")))

    def _bytes(self, array: Any) -> Any:
        if array.dtype != self._dtype or array.ndim == 0 or array.shape[1:] != self._row:
            wanted = f"{self._dtype} of shape (n, {', '.join(map(str, self._row))})"
            raise TypeError(f"rows: wanted an array of {wanted}, found {array.dtype} of {array.shape}")
        return array.reshape(-1).view(numpy.uint8)

    def _drain(self, left: int) -> None:
        while self._download is not None and len(self._download.late) > left:
            self._download.late[0][0].synchronize()
            self._writer.append_first(self._download.late)

    def finish(self) -> str:
        """Write the rest, sync it, and name the file. Return a line that tells where the time went."""
        self._ahead = 0
        if self._download is not None:
            self._turn(partial(self._drain, 0))
        return self._writer.finish()  # type: ignore[no-any-return]

    def discard(self) -> None:
        """Stop, and remove what was written, unless the file has its name already."""
        self._discarded, self._ahead = True, 0
        self._writer.discard()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Writer cannot be pickled or copied: it owns a thread and a file")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._discarded:
                self.finish()
        finally:
            self.discard()
