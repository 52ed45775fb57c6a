"""A data set in Python for the tests and the programs that they run. Imports neither torch nor twinbuf."""

from __future__ import annotations

from typing import Any

import numpy as np


class Numbers:
    """Every element of a record is the record's number."""

    dtype: Any = "int64"
    shape: tuple[int, ...] = (1,)

    def __init__(self, records: int = 8) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records

    def read_into(self, indices: Any, out: Any) -> None:
        np.asarray(out).T[...] = indices
