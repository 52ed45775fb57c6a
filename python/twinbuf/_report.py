"""`Report`: where the time of a loop went."""

from __future__ import annotations

import os
from typing import Any, Self

from ._twinbuf import _save
from ._values import path_of


class Report:
    """Where the time of a loop went. Times are seconds of wall-clock time.

    ``str()`` is a few lines of text. ``format(report, "#")`` adds tables: the times of the stages, those of
    the last epochs, and how files were read. `save` writes these as a page, with a picture.

    Attributes
    ----------
    name
        The name of the loader or loop, which may be empty.
    epochs
        Epochs that were begun; 0 for `generate`.
    batches
        Batches that the loop received. A `stream` without a ``device`` leaves out groups that it had in
        memory already.
    bytes
        Their bytes; with a ``device``, those of all batches sent to it. None where these are not known.
    wall
        ``wait`` and ``compute`` together.
    wait, compute
        The times in which the loop waited for batches, and in which it used them. Loops over another loader,
        or over another `watch`, that the same thread begins and ends within one use are left out.
    load
        Time spent on loading, summed over all threads. Without overlap it is part of ``wait``.
    transfer
        Time of copies to the ``device`` of a `Loader` or `stream`.
    au
        Accelerator utilization as MLPerf Storage defines it: compute over total, without the first step. None
        before the second step, and where the loop waits for work on a device.
    overlap
        Whether batches are loaded ahead.
    depth, workers
        The numbers of slots, or items ahead, and of loading threads (1 without overlap); of `watch` 2 and 1.
    kept
        Batches or groups that were kept while their iteration needed their slots: each slot got new memory.
    verdict
        What takes the time of the loop, by the sums of what was measured.
    advice
        The verdict in words and what to try: a few lines.
    """

    name: str
    epochs: int
    batches: int
    bytes: int | None
    wall: float
    wait: float
    compute: float
    load: float
    transfer: float
    au: float | None
    overlap: bool
    depth: int
    workers: int
    kept: int
    verdict: str
    advice: str
    _figures: dict[str, Any]
    _text: str
    _tables: str
    _page: str

    def __new__(cls, *_: Any, **__: Any) -> Self:
        raise TypeError("Report: wanted `report()` of a loader or a loop, found a call")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page for any browser: the report and the last steps. It needs no other file."""
        _save(path_of("path", path), self._page)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return dict(self._figures)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Report cannot be pickled: send its figures, `report.to_dict()`")

    def __format__(self, spec: str) -> str:
        if spec not in ("", "#"):
            raise ValueError(f'format of a Report: wanted "" or "#", found "{spec}"')
        if not self.batches:
            return "Nothing was measured."
        return self._tables if spec else self._text

    def __str__(self) -> str:
        return format(self)

    def __repr__(self) -> str:
        return f"<Report: {self}>"
