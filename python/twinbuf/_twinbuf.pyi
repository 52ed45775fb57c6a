import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from types import GenericAlias
from typing import Any, Final, Generic, Literal, Protocol, Self, SupportsIndex, TypeAlias, final, overload

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import TypeVar

from ._streams import Accelerator
from .tensors import TensorInfo

__version__: str

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_Path: TypeAlias = str | os.PathLike[str]
_Paths: TypeAlias = _Path | Sequence[_Path]
# An `int`, or an integer of numpy.
_Int: TypeAlias = SupportsIndex
_DType: TypeAlias = npt.DTypeLike | torch.dtype
_ReadMode: TypeAlias = Literal["auto", "pread", "direct"]

class _Dataset(Sized, Protocol):
    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Sequence[int]: ...
    def read_into(self, indices: npt.NDArray[np.int64], out: memoryview, /) -> object: ...

@final
class _Recorder:
    def __new__(
        cls, *, name: str = "", trace: _Path | None = None, workers: bool = False, device: bool = False
    ) -> Self: ...
    def ended(self) -> None: ...
    def report(self, name: str, line: str) -> Report: ...

@final
class _Watch(Generic[_T]):
    def __new__(
        cls, iterable: Iterable[_T], recorder: _Recorder, epoch: int, end: Generator[None]
    ) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> _T: ...

@final
class _Thread:
    def __new__(cls, before: _Thread | None = None) -> Self: ...
    def join(self, timeout: float | None = None) -> bool: ...
    def report(self, name: str) -> Report: ...

@final
class _Items(Generic[_T]):
    def __new__(
        cls,
        iterator: Iterator[_T],
        depth: int,
        *,
        send: Callable[[Any], Any] | None = None,
        receive: Callable[[Any], Any] | None = None,
        map: Callable[[Any], Any] | None = None,
        states: Callable[[], Any] | None = None,
        place: list[Any] | None = None,
        thread: _Thread | None = None,
        before: Callable[[int], object] | None = None,
        after: Callable[[int], object] | None = None,
        rounds: int | None = None,
        recorder: _Recorder | None = None,
        overlap: bool = True,
        name: str = "",
        trace: _Path | None = None,
        epoch: int = 0,
    ) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> _T: ...
    def close(self) -> None: ...
    def report(self) -> Report: ...
    def worker(self) -> _Worker | None: ...
    ended: Final[bool]

@final
class _Worker:
    def next(self) -> bool: ...
    def iterator(self) -> Iterator[Any] | None: ...
    def send(self) -> Callable[[Any], Any] | None: ...
    def states(self) -> Callable[[], Any] | None: ...
    def answer(self, item: object, state: object = None) -> None: ...
    def end(self) -> None: ...
    def fail(self, raised: BaseException) -> None: ...
    def left(self) -> Iterator[Any] | None: ...

@final
class Prediction:
    overlap: Final[bool]
    depth: Final[int]
    workers: Final[int]
    batches: Final[int]
    measured: Final[float]
    wall: Final[float]
    wait: Final[float]
    gain: Final[float]
    at_most: Final[bool]

@final
class Report:
    name: Final[str]
    epochs: Final[int]
    batches: Final[int]
    bytes: Final[int | None]
    wall: Final[float]
    wait: Final[float]
    compute: Final[float]
    load: Final[float]
    transfer: Final[float]
    overlap: Final[bool]
    depth: Final[int]
    workers: Final[int]
    kept: Final[int]
    au: Final[float | None]
    verdict: Final[str]
    advice: Final[str]
    def predict(
        self, *, overlap: bool | None = None, depth: _Int | None = None, workers: _Int | None = None
    ) -> Prediction | None: ...
    def recommended(self) -> Prediction | None: ...
    def save(self, path: _Path) -> None: ...
    def to_dict(self) -> dict[str, Any]: ...

@final
class Records:
    @staticmethod
    def open(paths: _Paths, record_bytes: _Int, *, skip_short: bool = False) -> Records: ...
    @staticmethod
    def open_headerless(paths: _Paths, dtype: _DType, *, skip_short: bool = False) -> Records: ...
    @staticmethod
    def open_llm_c(paths: _Paths, *, skip_short: bool = False) -> Records: ...
    @staticmethod
    def open_npy(paths: _Paths, *, skip_short: bool = False) -> Records: ...
    @staticmethod
    def open_safetensors(paths: _Paths, tensor: str, *, skip_short: bool = False) -> Records: ...
    @staticmethod
    def open_npz(paths: _Paths, array: str, *, skip_short: bool = False) -> Records: ...
    @staticmethod
    def open_indexed(paths: _Paths, indexes: _Paths) -> Records: ...
    @staticmethod
    def open_megatron(paths: _Paths) -> Records: ...
    def windows(self, rows: _Int, stride: _Int | None = None) -> Records: ...
    def to(
        self,
        dtype: _DType,
        *,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        planar: bool = False,
    ) -> Records: ...
    def map(
        self,
        function: Callable[[npt.NDArray[Any], int], npt.ArrayLike],
        dtype: _DType,
        shape: Sequence[int],
    ) -> Records: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: _Int, /) -> npt.NDArray[Any]: ...
    # An array; a list of arrays if records differ in length.
    @overload
    def __getitem__(self, index: slice | Sequence[int] | npt.NDArray[np.integer[Any]], /) -> Any: ...
    dtype: Final[str]
    shape: Final[tuple[int, ...]]
    nbytes: Final[int]
    paths: Final[list[Path]]
    skipped: Final[list[Path]]
    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]: ...

@final
class Window:
    def __new__(cls, chunks: _Int, records: _Int | None = None) -> Self: ...
    chunks: Final[int]
    records: Final[int | None]

@final
class Chunks:
    def __new__(cls, records: _Int) -> Self: ...
    records: Final[int]

@final
class Plan:
    def __new__(
        cls,
        data: Sized | tuple[Sized, ...] | Mapping[str, Sized] | _Int,
        batch: _Int | Sequence[tuple[_Int, _Int]],
        *,
        records: range | slice | Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        steps: _Int | None = None,
        shuffle: Literal["full"] | Window | Chunks | None = None,
        seed: _Int | None = None,
        rank: _Int | Literal["env"] | None = None,
        world: _Int | None = None,
        drop_last: bool = True,
    ) -> Self: ...
    def __len__(self) -> int: ...
    batch: Final[int]
    records: Final[int]
    seed: Final[int]
    rank: Final[int]
    world: Final[int]
    drop_last: Final[bool]
    def steps(self, epoch: _Int) -> int: ...
    def indices(self, epoch: _Int, step: _Int) -> npt.NDArray[np.int64]: ...

@final
class Batch:
    epoch: Final[int]
    step: Final[int]
    indices: Final[npt.NDArray[np.int64]]
    # An array, or a list of them if records differ in length; a tuple or dict of these for several data sets.
    def numpy(self) -> Any: ...
    def torch(self) -> Any: ...
    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]: ...
    def release(self) -> None: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: object, trace: object, /) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class _Batches(Protocol[_T_co]):
    def __iter__(self) -> Iterator[_T_co]: ...
    def __next__(self) -> _T_co: ...
    def __len__(self) -> int: ...
    def report(self) -> Report: ...

class _Rounds(Protocol[_T_co]):
    def __iter__(self) -> Iterator[_T_co]: ...
    def __next__(self) -> _T_co: ...
    def report(self) -> Report: ...
    def close(self) -> None: ...

_Sources: TypeAlias = Records | _Dataset | tuple[Records | _Dataset, ...] | Mapping[str, Records | _Dataset]

# What the loop gets: batches, or what `map` makes of them.
_Made = TypeVar("_Made", default=Batch)

@final
class Loader(Generic[_Made]):
    def __new__(
        cls,
        data: _Sources,
        plan: Plan,
        *,
        name: str | None = None,
        device: str | torch.device | Accelerator | None = None,
        device_depth: _Int = 2,
        depth: _Int | None = None,
        workers: _Int = 1,
        overlap: bool = True,
        copy_stream: bool = True,
        map: Callable[[Batch], _Made] | None = None,
        read_mode: _ReadMode = "auto",
        memory_limit: _Int | None = None,
        breakdown: _Int | None = None,
        trace: _Path | None = None,
    ) -> Self: ...
    @classmethod
    def __class_getitem__(cls, item: Any) -> GenericAlias: ...
    def epochs(self, epochs: _Int | range, /, *, timeout: float | None = None) -> _Batches[_Made]: ...
    def epoch(self, epoch: _Int, *, timeout: float | None = None) -> _Batches[_Made]: ...
    def __iter__(self) -> _Batches[_Made]: ...
    # Attributes of a `DataLoader`, for trainers.
    batch_size: Final[int]
    dataset: Final[Sized]
    drop_last: Final[bool]
    def set_epoch(self, epoch: _Int) -> None: ...
    def __len__(self) -> int: ...
    plan: Final[Plan]
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...
    def report(self) -> Report: ...
    def reading(self) -> dict[str, Any] | None: ...
    def close(self, *, timeout: float | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: object, trace: object, /) -> None: ...

@final
class Tensors(Mapping[str, TensorInfo]):
    @staticmethod
    def open(paths: _Paths) -> Tensors: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object, /) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str, /) -> TensorInfo: ...
    paths: Final[list[Path]]

@final
class Group:
    number: Final[int]
    def numpy(self) -> dict[str, npt.NDArray[Any]]: ...
    def torch(self) -> dict[str, torch.Tensor]: ...
    def __len__(self) -> int: ...

@final
class Stream:
    def __iter__(self) -> Iterator[Group]: ...
    def __len__(self) -> int: ...
    kept: Final[int]
    def report(self) -> Report: ...

def stream(
    model: Tensors,
    groups: Callable[[str], Any] | Sequence[Sequence[str]],
    *,
    name: str | None = None,
    device: str | torch.device | Accelerator | None = None,
    cycle: bool = False,
    depth: _Int = 2,
    keep: _Int | None = None,
    order: Sequence[Sequence[int]] | None = None,
    memory_limit: _Int | None = None,
    read_mode: _ReadMode = "auto",
    trace: _Path | None = None,
) -> Stream: ...
def _begin_end() -> None: ...
def _end_hook() -> None: ...
def _forked() -> None: ...
