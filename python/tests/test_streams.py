"""The copies to a device: every edge is there, and each one is needed."""

from __future__ import annotations

import contextlib
import gc
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import indexed, saved
from late import EDGES, Late
from sets import Numbers, loader_of

import twinbuf as tb
from twinbuf import _streams
from twinbuf._streams import map_leaves

ITEMS = 12
Pair = namedtuple("Pair", "x y")


def batch(step: int) -> dict[str, Any]:
    return {
        "x": torch.full((4, 3), step, dtype=torch.float32),
        "rest": [np.full(5, step, "int64"), "name", step],
    }


def host_batches(device: Late) -> Iterator[Any]:
    yield from (batch(step) for step in range(ITEMS))


def own_page_locked_batches(device: Late) -> Iterator[Any]:
    x = torch.zeros(4, 3)
    x.in_page_locked_memory = True  # type: ignore[attr-defined]
    for step in range(ITEMS):
        x.fill_(step)
        yield {"x": x, "rest": [torch.full((5,), step)]}


def device_batches(device: Late) -> Iterator[Any]:
    for step in range(ITEMS):
        x, y = device.empty_like(torch.zeros(4, 3)), device.empty_like(torch.zeros(5))
        device.copy(x, device.table[step])  # type: ignore[attr-defined]
        device.copy(y, device.table[step, 0, 0].expand(5))  # type: ignore[attr-defined]
        yield {"x": x, "rest": [y]}


def all_right(make: Callable[[Late], Iterator[Any]], eager: str, without: str = "") -> bool:
    """Whether every kernel of the caller has read what its batch should be."""
    device = Late(eager, without)
    table = device.table = torch.zeros(ITEMS, 4, 3)  # type: ignore[attr-defined]
    steps = torch.arange(float(ITEMS))[:, None, None]
    device.enqueue(device.main, lambda: table.copy_(steps.expand(ITEMS, 4, 3)))
    read: list[bool] = []
    kept = []

    def use(step: int, tensor: torch.Tensor) -> None:
        device.kernel(tensor, lambda values: read.append(bool((values == step).all())))

    for step, item in enumerate(tb.prefetch(make(device), device=device)):
        use(step, item["x"])
        use(step, item["rest"][0])
        if step % 5 == 0:
            kept.append((step, item["x"]))
        del item
    device.finish()
    for step, x in kept:
        use(step, x)
    device.finish()
    return read == [True] * (2 * ITEMS + len(kept))


@pytest.mark.parametrize("eager", ["main", "side", ""])
@pytest.mark.parametrize("make", [host_batches, own_page_locked_batches, device_batches])
def test_every_kernel_reads_its_batch(make: Callable[[Late], Iterator[Any]], eager: str) -> None:
    assert all_right(make, eager)


@pytest.mark.parametrize("edge", EDGES)
def test_no_edge_can_be_left_out(edge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, eager = {
        "start": (device_batches, "side"),
        "slot": (host_batches, ""),
        "fill": (host_batches, "side"),
        "direct": (own_page_locked_batches, ""),
        "wait": (host_batches, "main"),
        "keep": (host_batches, "side"),
    }[edge]
    if edge == "fill":  # the copy is enqueued first
        filled: list[Any] = []
        fill = _streams._fill
        monkeypatch.setattr(_streams, "_fill", lambda *args: filled.append(args))
        record = _streams.Upload.receive
        monkeypatch.setattr(
            _streams.Upload, "receive", lambda *args: ([fill(*each) for each in filled], record(*args))[1]
        )
    assert not all_right(make, eager, edge)


def test_slots_are_reused_and_grow() -> None:
    device = Late("side")
    items = [torch.full((size,), float(size)) for size in (4, 4, 4, 4, 4, 4, 1000, 4)]
    for item, got in zip(items, tb.prefetch(items, device=device), strict=True):
        assert torch.equal(item, got)
    assert device.hosts == 3  # two, and the larger one


def test_what_was_sent_is_freed_without_a_garbage_collection() -> None:
    device = Late("side")
    gc.collect()
    gc.disable()
    try:
        items = tb.prefetch((torch.ones(4) for _ in range(50)), device=device)
        assert max(len(device.memory) for _ in items) < 9
    finally:
        gc.enable()


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


def test_every_kind_of_nesting_arrives() -> None:
    class Own(dict):  # type: ignore[type-arg]
        pass

    x = torch.arange(6.0).reshape(2, 3)
    item = {
        "tuple": (x, 1),
        "named": Pair(x, None),
        "list": [x, [x]],
        "data": Sample(x, "name"),
        "own": Own(a=x),
        "array": np.arange(4, dtype="u1"),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "transposed": x.T,
        "channels": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": x[:1].expand(5, 3),
        "bool": torch.tensor([True, False]),
        "bfloat16": x.to(torch.bfloat16),
        "backwards": np.arange(5.0)[::-1],
        "big endian": np.arange(5, dtype=">i4"),
        "words": np.array(["a", "b"]),
        "text": "text",
    }
    device = Late("side")
    for keep_going in (item, item):
        (got,) = tb.prefetch([keep_going], device=device)
        assert type(got["named"]) is Pair and type(got["own"]) is Own and type(got["data"]) is Sample
        assert got["data"].name == "name" and got["words"] is item["words"] and got["text"] == "text"
        first, (second, (third,)) = got["tuple"][0], got["list"]
        for leaf in (first, second, third, got["named"].x, got["data"].x, got["own"]["a"]):
            assert torch.equal(leaf, x) and device.owns(leaf)
        for name in ("scalar", "empty", "transposed", "channels", "expanded", "bool", "bfloat16"):
            assert torch.equal(got[name], item[name]) and device.owns(got[name]), name
        for name in ("array", "backwards", "big endian"):
            assert np.array_equal(got[name].numpy(), item[name]) and device.owns(got[name]), name
        assert got["channels"].is_contiguous(memory_format=torch.channels_last)
    assert item["tuple"][0] is x  # the caller's own object is as it was


class Foreign:
    """An array of another library, of a type that DLPack lacks, such as text of pyarrow and int4 of jax."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.parametrize("device", ["cpu", Late("side")])
def test_arrays_of_types_that_torch_lacks_stay(device: Any) -> None:
    """Those of other libraries ended the loop."""
    items: list[Any] = [Foreign(), np.array(["a", "b"]), np.zeros(2, "longdouble")]
    (got,) = tb.prefetch([items], device=device)
    assert all(new is old for new, old in zip(got, items, strict=True))


@pytest.mark.parametrize("device", ["cpu", Late("side")])
def test_a_field_of_a_dataclass_may_have_no_value_yet(device: Any) -> None:
    @dataclass
    class Lazy:
        x: Any
        length: int = field(init=False)

    (got,) = tb.prefetch([Lazy(np.ones(2))], device=device)
    assert got.x.tolist() == [1.0, 1.0] and not hasattr(got, "length")


def test_objects_that_move_themselves_do_so_on_the_callers_stream() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    weight = torch.ones(3, requires_grad=True)
    sparse = torch.eye(3).to_sparse()

    class Graph:
        def to(self, device: object) -> str:
            return f"moved to {device}"

    device = Late("side")
    (got,) = tb.prefetch([(weight, sparse, Graph())], device=device)
    assert [entry for entry in device.log if entry[0] == "move"] == [("move", "main")] * 3
    assert got[0] is weight and got[2] == "moved to cpu"
    assert not torch.accelerator.is_available() or tb.prefetch([packed], device=device)


def test_on_the_cpu_arrays_become_tensors() -> None:
    x = np.arange(4.0)
    (got,) = tb.prefetch([{"x": x, "y": torch.ones(2), "back": x[::-1]}], device="cpu")
    assert got["x"].data_ptr() == x.ctypes.data and got["back"].tolist() == [3.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize("device", ["cpu", Late("side")])
def test_a_field_of_packed_records_becomes_a_tensor(device: Any) -> None:
    """Its elements are 9 bytes apart. Without a device torch refused it, and the loop ended."""
    records = np.zeros((2, 3), dtype=[("label", "u1"), ("x", "f8")])
    records["x"] = np.arange(6.0).reshape(2, 3)
    (got,) = tb.prefetch([records["x"]], device=device)
    assert got.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_the_batches_of_a_loader_become_tensors() -> None:
    loader, device = loader_of(Numbers(12), 3), Late("side")
    got = list(tb.prefetch(loader.epochs(1), device=device))
    assert all(device.owns(batch) for batch in got)
    tensors = (batch.clone() for batch in tb.prefetch(loader.epochs(1), device="cpu", depth=1))
    for each in got, tensors:
        assert torch.cat(list(each)).ravel().tolist() == list(range(12))


def test_a_batch_arrives_as_what_it_is_for_torch(tmp_path: Any) -> None:
    """A tuple, a dict or a list, also where it is a part of an item."""
    x = saved(tmp_path / "x.npy", np.arange(12, dtype="float32").reshape(6, 2))

    def values(item: Any) -> Any:
        if isinstance(item, tb.Batch):
            return values(item.torch())
        return map_leaves(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, item)

    sets: list[Any] = [(x,), (x, x), {"x": x}, {"x": x, "y": x}, indexed(tmp_path, [b"abc", b"defg", b"hij"])]
    for data in sets:
        loader = loader_of(data, 2)
        wanted = [values(batch) for batch in loader.epochs(1)]
        for device in ("cpu", Late("side")):
            assert [values(item) for item in tb.prefetch(loader.epochs(1), device=device)] == wanted
            parts = ({"of": [batch, 1]} for batch in loader.epochs(1))
            assert [values(item["of"][0]) for item in tb.prefetch(parts, device=device)] == wanted


class Cuda:
    """Stands in for `torch.cuda`, the driver and the runtime."""

    def __init__(self) -> None:
        self.modes: list[int] = []
        self.mode = 0
        self.current: list[int] = [0]
        self.registered: dict[int, int] = {}
        self.refuses = self.capturing = False

    def Stream(self, device: int) -> int:
        return device

    def stream(self, stream: int) -> Any:
        @contextlib.contextmanager
        def on() -> Iterator[None]:
            self.current.append(stream)
            yield
            self.current.pop()

        return on()

    def Event(self, **options: Any) -> dict[str, Any]:
        return options

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.mode = self.mode, mode._obj.value
        self.modes.append(self.mode)
        return 0

    # Of the driver: the runtime would keep the error of a failed call, and torch raise it as its own.
    def cuMemHostRegister_v2(self, start: Any, nbytes: Any, flags: int) -> int:
        assert (self.mode, self.current[-1], flags) == (2, 3, 1)
        if self.refuses:
            return 801
        self.registered[start.value] = nbytes.value
        return 0

    def cuMemHostUnregister(self, start: Any) -> int:
        # As any call: in the mode of the thread, it would end the capture of another one.
        assert (self.mode, self.current[-1]) == (2, 3)
        del self.registered[start.value]
        return 0

    def current_stream(self, device: int) -> Any:
        return SimpleNamespace(stream_id=7)

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def device(self, device: int) -> Any:
        return contextlib.nullcontext()


def accelerator(cuda: Cuda) -> _streams.Accelerator:
    made = object.__new__(_streams.Accelerator)
    made._torch, made._cuda, made._driver, made._device = torch, cuda, cuda, 3  # type: ignore[assignment]
    return made


def test_page_locked_memory_has_the_size_that_was_asked_for_and_its_own_device() -> None:
    """A rank that never calls ``set_device`` must not open a context on device 0."""
    cuda = Cuda()
    memory = accelerator(cuda).host(5000)
    assert cuda.registered == {memory.data_ptr(): 5000} and memory.numel() == 5000
    assert memory.data_ptr() % 4096 == 0 and not memory.any()
    del memory
    gc.collect()
    assert cuda.registered == {} and cuda.current == [0]


def test_memory_that_cannot_be_registered_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, asked = Cuda(), []
    cuda.refuses = True

    def empty(nbytes: int, **options: Any) -> torch.Tensor:
        asked.append((nbytes, options["pin_memory"]))
        return torch.zeros(nbytes, dtype=torch.uint8)

    device = accelerator(cuda)
    fake = SimpleNamespace(empty=empty, frombuffer=torch.frombuffer, uint8=torch.uint8)
    monkeypatch.setattr(device, "_torch", fake)
    assert device.host(5000).numel() == 5000
    assert asked == [(5000, True)] and cuda.registered == {}


@pytest.mark.parametrize("call", ["start", "receive"])
def test_a_captured_stream_is_refused(call: str) -> None:
    cuda = Cuda()
    upload = object.__new__(_streams.Upload)
    upload._streams, upload._side = accelerator(cuda), 3
    cuda.capturing = True
    with pytest.raises(tb.LoaderError, match="captured into a graph"):
        if call == "start":
            upload.start()
        else:
            upload.receive(_streams.Sent(None, None, [], late=False))  # type: ignore[arg-type]


def test_the_sender_neither_spins_nor_ends_a_capture() -> None:
    cuda = Cuda()
    device = accelerator(cuda)
    assert device.event() == {"blocking": True}
    with contextlib.suppress(KeyError), device.using(device.side()):
        assert (cuda.mode, cuda.current[-1]) == (2, 3)
        raise KeyError
    assert cuda.modes == [2, 0]


@pytest.mark.parametrize(
    ("asked", "current", "rank", "wanted"),
    [
        (None, 0, "3", 3),
        (None, 0, "9", 0),
        (None, 0, None, 0),
        (None, 2, "3", 2),
        (1, 0, "3", 1),
        (None, 0, "x", 0),
    ],
)
def test_a_rank_has_its_own_device(
    asked: int | None, current: int, rank: str | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _streams._RANKS:
        monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    accelerators = SimpleNamespace(current_device_index=lambda: current, device_count=lambda: 4)
    fake = SimpleNamespace(accelerator=accelerators)
    assert _streams._index(fake, SimpleNamespace(index=asked)) == wanted
