"""What the tensors of a model are."""

from __future__ import annotations

from typing import NamedTuple


class TensorInfo(NamedTuple):
    """The type, shape and size of a tensor; ``Tensors[name]`` returns it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
