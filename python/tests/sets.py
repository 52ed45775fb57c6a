"""A data set in Python for the tests and their programs. Imports neither torch nor, by itself, twinbuf."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class Numbers:
    """Every element of a record is the record's number. `before` gets those of a batch that is to be read."""

    dtype: Any = "int64"
    shape: tuple[int, ...] = (1,)

    def __init__(self, records: int = 8, before: Callable[[Any], object] = lambda indices: None) -> None:
        self.records, self.before = records, before

    def __len__(self) -> int:
        return self.records

    def read_into(self, indices: Any, out: Any) -> None:
        self.before(indices)
        np.asarray(out).T[...] = indices


def loader_of(data: Any, batch: Any, **options: Any) -> Any:
    """A loader of all records, in their order."""
    import twinbuf as tb

    return tb.Loader(data, tb.Plan(data, batch), **options)


class Gated(Numbers):
    """Reads no batch with a number from `first` on before `go`; `asked` is set where it begins to wait."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.go, self.asked = threading.Event(), threading.Event()
        self.first = first

    def read_into(self, indices: Any, out: Any) -> None:
        if indices[-1] >= self.first:
            self.asked.set()
            self.go.wait()
        super().read_into(indices, out)
