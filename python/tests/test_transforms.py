"""Records that are changed while they are copied, differ in length, or are looked at one by one."""

from __future__ import annotations

import _thread
import itertools
import operator
import os
import re
import signal
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Case, indexed, refused, saved, windows
from late import Late
from sets import loader_of

import twinbuf as tb


def only(data: Any, batch: int, **options: Any) -> list[Any]:
    return [batch.numpy() for batch in loader_of(data, batch, **options).epoch(0)]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_train_a_model(tmp_path: Path, dtype: str) -> None:
    numbers = np.random.default_rng(3).integers(0, 50_000, 641).astype(dtype)
    numbers.tofile(tmp_path / "tokens.bin")
    data = tb.Records.open_headerless(tmp_path / "tokens.bin", dtype).windows(17, 16)
    embedding, head = torch.nn.Embedding(50_000, 8), torch.nn.Linear(8, 50_000)
    seen = []
    for batch in tb.Loader(data, tb.Plan(data, 4)).epoch(0):
        window = batch.torch()
        scores = head(embedding(window[:, :-1])).flatten(0, 1)
        torch.nn.functional.cross_entropy(scores, window[:, 1:].flatten()).backward()
        seen.append(window.numpy().copy())
    assert np.array_equal(np.concatenate(seen)[:, :-1].ravel(), numbers[:640])
    (as_it_is,) = {part.dtype for part in only(data.to(dtype), 4)}
    assert as_it_is == dtype
    assert data.dtype == dtype
    assert data.to("int64").dtype == "int64"


BEFORE = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float32"
AFTER = "uint8 int16 int32 int64 uint32 uint64 float32 float64"


@pytest.mark.parametrize("before", BEFORE.split())
@pytest.mark.parametrize("after", AFTER.split())
def test_a_cast_is_numpys(tmp_path: Path, before: str, after: str) -> None:
    kind = np.dtype(before)
    if kind.kind in "ui":
        info = np.iinfo(kind)
        numbers = np.random.default_rng(1).integers(info.min, info.max, (60, 10), kind, endpoint=True)
    else:
        numbers = np.random.default_rng(1).integers(0, 2, (60, 10)).astype(kind)
    data = saved(tmp_path / "a.npy", numbers)
    if not np.can_cast(before, after) and np.dtype(after).kind != "f":
        with pytest.raises(TypeError, match=f"for records of {before}, found {after}"):
            data.to(after)
        return
    found = np.concatenate(only(data.to(after), 15))
    assert found.dtype == after
    assert np.array_equal(found, numbers.astype(after))


def test_casts_that_are_asked_for(tmp_path: Path) -> None:
    rows = np.random.default_rng(2).standard_normal((20, 6)).astype(np.float32)
    data = saved(tmp_path / "a.npy", rows)
    assert np.array_equal(only(data.to("float16"), 20)[0], rows.astype(np.float16))
    (batch,) = tb.Loader(data.to(torch.bfloat16), tb.Plan(data, 20)).epoch(0)
    assert torch.equal(batch.torch(), torch.from_numpy(rows).bfloat16())
    data = saved(tmp_path / "depth.npy", np.arange(240, dtype="uint16").reshape(10, 4, 6))
    assert only(data, 5)[0].dtype == np.uint16  # only tokens are cast by default
    assert only(data.to("float32"), 5)[0].dtype == np.float32


def test_a_cast_that_there_is_not_names_those_that_there_are(tmp_path: Path) -> None:
    for before, after, there in (
        ("uint8", "float16", "uint8, uint16, int16, uint32, int32, float32, uint64, int64 or float64"),
        ("float16", "float64", "float16 or float32"),
        ("float32", "int32", "float16, bfloat16, float32 or float64"),
        ("complex64", "float32", "complex64"),
    ):
        data = saved(tmp_path / "a.npy", np.zeros((2, 3), before))
        message = f"dtype: wanted {there} for records of {before}, found {after}: use `map` for another type"
        with pytest.raises(TypeError, match=f"^{message}$"):
            data.to(after)
        for name in there.replace(" or", ",").split(", "):
            assert data.to(name).dtype == name


@pytest.mark.parametrize("axes", [(1, 2, 4), (2, 1, 3), (2, 1, 5, 4), (1, 1, 5, 4), (1, 1, 3)])
def test_planes_of_a_height_or_a_width_of_one(tmp_path: Path, axes: tuple[int, ...]) -> None:
    images = np.arange(np.prod((6, *axes)), dtype=np.uint8).reshape(6, *axes)
    data = saved(tmp_path / "images.npy", images)
    expected = np.moveaxis(images, -1, -3)
    assert data.to("float32", planar=True).shape == expected.shape[1:]
    assert np.array_equal(data.to("float32", planar=True)[:], expected)
    assert np.array_equal(data.windows(2).to("float32", planar=True)[1], expected[2:4])


def test_images_are_normalized_and_planar(tmp_path: Path) -> None:
    images = np.random.default_rng(4).integers(0, 256, (24, 5, 7, 3)).astype(np.uint8)
    data = saved(tmp_path / "images.npy", images)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    expected = ((images / 255 - mean) / std).astype(np.float32)
    normal = data.to("float32", mean=mean, std=std)
    assert np.allclose(np.concatenate(only(normal, 8)), expected, atol=1e-5)
    planar = data.to("float32", mean=mean, std=std, planar=True)
    assert (planar.shape, planar.dtype) == ((3, 5, 7), "float32")
    assert np.allclose(np.concatenate(only(planar, 8)), expected.transpose(0, 3, 1, 2), atol=1e-5)
    assert np.array_equal(only(data.to("float32", planar=True), 24)[0], images.transpose(0, 3, 1, 2))
    assert np.allclose(only(data.to("float32", std=1), 24)[0], images / 255, atol=1e-6)
    bad = (
        (lambda: data.to("float32", mean=(1, 2)), "one for each channel, found 2"),
        (lambda: data.to("float32", std=0), "^std: wanted finite numbers other than 0, found 0$"),
        (lambda: data.to("float32", std=(1, float("inf"), 1)), "^std: .*, found inf$"),
        (lambda: data.to("float32", mean=float("nan")), "^mean: wanted finite numbers, found nan$"),
        (
            lambda: data.to("float32").to("float32", mean=1),
            "^mean, std, planar: wanted uint8, uint16, int16, float16 or bfloat16 as source, found float32$",
        ),
        (lambda: data.to("int64", mean=1), "wanted float32"),
        (lambda: tb.Records.open(tmp_path / "images.npy", 8).to("float32", planar=True), "height, width"),
    )
    refused(ValueError, bad)


def test_map_is_the_same_after_a_resumption(npy: Case) -> None:
    def noisy(record: np.ndarray, seed: int) -> np.ndarray:
        return record[:, :2] + np.random.default_rng(seed).standard_normal((3, 2)).astype(np.float32)

    data = npy.data.map(noisy, "float32", (3, 2))
    plan = tb.Plan(data, 10, shuffle="full", seed=3)
    whole = [batch.numpy().copy() for batch in tb.Loader(data, plan).epochs(2)]
    assert whole[0].shape == (10, 3, 2)
    assert not np.array_equal(np.sort(whole[0], axis=None), np.sort(whole[20], axis=None))
    first = tb.Loader(data, plan)
    it = first.epochs(2)
    begun = [next(it).numpy().copy() for _ in range(13)]
    second = tb.Loader(data, plan, workers=3)
    second.load_state_dict(first.state_dict())
    rest = [batch.numpy().copy() for batch in second.epochs(2)]
    assert all(map(np.array_equal, whole, begun + rest))


@pytest.mark.parametrize("overlap", [True, False])
def test_what_map_raises_reaches_the_loop(npy: Case, overlap: bool) -> None:
    def fails(record: np.ndarray, seed: int) -> np.ndarray:
        raise LookupError("no")

    def first(*changed: Any) -> Any:
        return next(loader_of(npy.data.map(*changed), 10, name="train", overlap=overlap).epoch(0))

    with pytest.raises(LookupError, match="no") as caught:
        first(fails, "uint8", (1,))
    assert caught.value.__notes__ == ["train: epoch 0, step 0: the records could not be transformed"]
    message = r"map: wanted an array of float32 \[3, 4\], found one of float32 \[3, 5\]"
    with pytest.raises(TypeError, match=message):
        first(lambda record, seed: record, "float32", (3, 4))


ITERATIONS: dict[str, Callable[[tb.Records], Iterable[Any]]] = {
    "for": lambda data: data,
    "reversed": lambda data: reversed(data),
    "map": lambda data: map(data.__getitem__, range(len(data))),
    "loader": lambda data: tb.Loader(data, tb.Plan(data, 1)).epoch(0),
    "without overlap": lambda data: tb.Loader(data, tb.Plan(data, 1), overlap=False).epoch(0),
}


@pytest.mark.parametrize("error", [IndexError, StopIteration])
@pytest.mark.parametrize("kind", ITERATIONS)
def test_what_map_raises_is_not_taken_for_the_end(npy: Case, kind: str, error: type[Exception]) -> None:
    """Python's iterators over what has only `__getitem__` would."""
    calls = itertools.count()

    def fails(record: np.ndarray, seed: int) -> np.ndarray:
        if next(calls) == 3:
            raise error("no")
        return record

    found = []
    with pytest.raises(RuntimeError if error is StopIteration else error) as caught:
        for record in ITERATIONS[kind](npy.data.map(fails, "float32", (3, 5))):
            found.append(np.array(record).reshape(3, 5))
    if error is StopIteration:
        assert str(caught.value) == "map raised StopIteration" and isinstance(caught.value.__cause__, error)
    assert np.array_equal(found, npy.records[::-1][:3] if kind == "reversed" else npy.records[:3])


def test_records_of_any_length_are_lists(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    words = [rng.integers(0, 256, rng.integers(0, 90), dtype=np.uint8).tobytes() for _ in range(50)]
    data = {"word": indexed(tmp_path, words), "label": saved(tmp_path / "labels.npy", np.arange(50))}
    plan = tb.Plan(data, 8, shuffle="full", seed=5, drop_last=False)
    seen = []
    for batch in tb.Loader(data, plan, depth=3).epochs(1):
        found = batch.numpy()
        assert list(found) == ["word", "label"]
        assert [word.tobytes() for word in found["word"]] == [words[label] for label in found["label"]]
        assert [tensor.numel() for tensor in batch.torch()["word"]] == [len(word) for word in found["word"]]
        seen += found["label"].tolist()
        with pytest.raises(TypeError, match="2 arrays"):
            np.asarray(batch)
    assert sorted(seen) == list(range(50))

    def padded(word: np.ndarray, seed: int) -> np.ndarray:
        return np.pad(word, (0, 90 - len(word)))

    fixed = data["word"].map(padded, "uint8", (90,))
    rows = np.concatenate(only(fixed, 10))
    assert [row.tobytes().rstrip(b"\0") for row in rows] == [word.rstrip(b"\0") for word in words]
    with pytest.raises(ValueError, match="indexes: wanted one for each of 2 files, found 1"):
        tb.Records.open_indexed([tmp_path / "ragged.bin"] * 2, tmp_path / "ragged.npy")
    with pytest.raises(TypeError, match="differ in length"):
        data["word"].windows(2)


def test_megatron(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 60_000, rng.integers(1, 30)).astype(np.uint16) for _ in range(20)]
    np.concatenate(texts).tofile(tmp_path / "a.bin")
    lengths = np.array([len(text) for text in texts], np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths.astype(np.int64) * 2)[:-1]]).astype(np.int64)
    head = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + bytes([8]) + np.array([20, 21], np.uint64).tobytes()
    documents = np.arange(21, dtype=np.int64)
    (tmp_path / "a.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
    data = tb.Records.open_megatron(tmp_path / "a.bin")
    (batch,) = only(data, 20)
    assert all(map(np.array_equal, batch, texts))
    # A cast makes room for records as long as the longest.
    assert batch[0].dtype == np.uint16
    (batch,) = only(data.to("int64"), 20)
    assert all(map(np.array_equal, batch, texts))
    assert batch[0].dtype == np.int64
    assert np.array_equal(data[3], texts[3])


def test_npz(tmp_path: Path) -> None:
    rows = np.arange(60, dtype=np.float32).reshape(20, 3)
    np.savez(tmp_path / "a.npz", x=rows, y=np.arange(20))
    assert zipfile.is_zipfile(tmp_path / "a.npz")
    data = (tb.Records.open_npz(tmp_path / "a.npz", "x"), tb.Records.open_npz(tmp_path / "a.npz", "y"))
    ((found, numbers),) = only(data, 20)
    assert np.array_equal(found, rows)
    assert numbers.dtype.type is np.int64
    with pytest.raises(tb.FileError, match="z"):
        tb.Records.open_npz(tmp_path / "a.npz", "z")


def test_records_one_by_one(case: Case, tmp_path: Path) -> None:
    data, records = case.data, case.records
    for index in (0, 5, len(records) - 1, -1, -len(records), np.int64(3)):
        assert np.array_equal(data[index], records[index])
        assert data[index].dtype == records.dtype
    for part in (slice(3), slice(2, 9), slice(None, None, 40), slice(9, 2, -3), slice(5, 5)):
        assert np.array_equal(data[part], records[part])
        assert data[part].shape == records[part].shape
    for index in (len(records), -len(records) - 1):
        with pytest.raises(IndexError):
            data[index]
    for number in (np.array(3), np.array(-3, "int8")):
        assert np.array_equal(data[number], records[int(number)])
    several = np.array([True] * len(records))
    for wanted in ("x", True, (0, 1), (), np.array(0.5), np.array(True), torch.tensor(True), several):
        with pytest.raises(TypeError, match=r"index: wanted .* whole numbers, found"):
            data[wanted]
    data[0][:] = 0  # a copy
    assert np.array_equal(data[0], records[0])


def reads() -> int:
    """Return the number of system calls that have read."""
    return int(re.findall(r"syscr: (\d+)", Path("/proc/self/io").read_text())[0])


def test_small_records_are_read_many_at_a_time(tmp_path: Path) -> None:
    rows = np.arange(100_000, dtype=np.uint16)
    np.save(tmp_path / "1.npy", rows[:70_001])
    np.save(tmp_path / "2.npy", rows[70_001:])
    data, before = tb.Records.open_npy(tmp_path), reads()
    assert np.array_equal(data, rows) and np.array_equal(data.to("float64")[:99_999], rows[:99_999])
    assert reads() - before < 1000
    # Ctrl-C has come when the read begins, and ends it early. Ray leaves its own handler.
    before, handler = reads(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(map(operator.call, (_thread.interrupt_main, partial(data._read, (0, 1, 100_000)))))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert reads() - before < 10


def test_many_records_are_what_numpy_reads(tmp_path: Path) -> None:
    """More than are read at a time."""
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 256, (9000, 2, 2, 3), dtype=np.uint8)
    np.save(tmp_path / "1.npy", rows[:5000])
    np.save(tmp_path / "2.npy", rows[5000:])
    data = tb.Records.open_npy(tmp_path)
    planes = data.to("float32", std=(1, 2, 4), planar=True)
    expected = np.moveaxis(rows / np.float32([255, 510, 1020]), 3, 1)
    flat = data.windows(2, 1)
    pairs = np.concatenate([windows(part, 2, 1) for part in (rows[:5000], rows[5000:])])
    for wanted in (slice(None), slice(8999, 3, -2), rng.integers(-9000, 9000, 10_000), [5, 5, 4], []):
        assert np.array_equal(data[wanted], rows[wanted])
        assert np.allclose(planes[wanted], expected[wanted]) and planes[wanted].dtype == np.float32
    assert np.array_equal(flat[:], pairs) and np.array_equal(flat.to("int64")[::-1], pairs[::-1])
    ends = np.cumsum(rng.integers(0, 5, 9000))
    parts = np.split(rows.reshape(-1)[: ends[-1]], ends[:-1])
    ragged = indexed(tmp_path, map(bytes, parts))
    for found in (ragged[:], ragged.to("int64")[:]):
        assert len(found) == 9000
        assert all(map(np.array_equal, found, parts))


def test_a_record_is_what_a_loader_makes_of_it(npy: Case) -> None:
    data = npy.data.to("float64").map(lambda record, seed: record.sum(axis=0), "float64", (5,))
    assert np.array_equal(data[7], npy.records[7].astype("float64").sum(axis=0))
    assert np.array_equal(data[3:6], np.concatenate(only(data, 29))[3:6])


def test_map_of_the_loader_keeps_it_a_loader(npy: Case) -> None:
    def named(batch: tb.Batch) -> dict[str, Any]:
        return {"x": batch.torch(), "at": (batch.epoch, batch.step)}

    plan = tb.Plan(npy.data, 10, shuffle="full", seed=1)
    loader = tb.Loader(npy.data, plan, map=named)
    items = loader.epochs(2)
    assert (len(items), len(loader)) == (40, 20)
    assert [next(items)["at"] for _ in range(25)][-1] == (1, 4)
    assert len(items) == 15
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (1, 5)
    other = tb.Loader(npy.data, plan, map=named)
    other.load_state_dict(state)
    assert len(other.epochs(2)) == 15
    assert [item["at"] for item in other.epochs(2)] == [(1, step) for step in range(5, 20)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("device", [None, "late"])
def test_a_batch_that_map_failed_on_was_not_received(npy: Case, device: str | None, overlap: bool) -> None:
    calls = []

    def map(batch: tb.Batch) -> int:
        calls.append(batch.step)
        if len(calls) in (3, 4):
            raise KeyboardInterrupt
        if batch.step == 3:
            raise ZeroDivisionError
        return batch.step

    loader = loader_of(npy.data, 10, map=map, overlap=overlap, device=device and Late("side"))
    it = loader.epoch(0)
    assert [next(it), next(it)] == [0, 1]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            next(it)
        assert loader.state_dict()["step"] == 2
    assert next(it) == 2
    with pytest.raises(ZeroDivisionError):
        next(it)
    # It is not read again here, but after a resumption from this state.
    assert loader.state_dict()["step"] == 3 and len(it) == 16
    assert next(it) == 4
    assert loader.state_dict()["step"] == 5
    assert list(it) == list(range(5, 20))
    assert loader.report().batches == 20


@pytest.mark.parametrize("where", ["map", "before", "after"])
def test_an_exception_keeps_its_context(npy: Case, where: str) -> None:
    """As it was raised: `from` would hide the exception that was being handled."""

    def call(_: object) -> None:
        try:
            {}["missing"]
        except KeyError:
            raise ValueError("wrong")  # noqa: B904

    made: Any = tb.generate(lambda number: number, **{where: call}) if where != "map" else None
    made = made or tb.Loader(npy.data, tb.Plan(npy.data, 10), map=call).epoch(0)
    with pytest.raises(ValueError, match="wrong") as caught:
        [next(made) for _ in range(2)]
    raised = caught.value
    assert isinstance(raised.__context__, KeyError)
    assert raised.__cause__ is None and not raised.__suppress_context__


def test_map_is_called_for_empty_records(tmp_path: Path) -> None:
    lengths = [3, 0, 0, 5, 1, 0]
    data = indexed(tmp_path, [b"x" * length for length in lengths])
    data = data.map(lambda record, seed: np.array([len(record), 100]), "int64", (2,))
    loader = tb.Loader(data, tb.Plan(data, 3, shuffle="full"))
    found = [(batch.indices, batch.numpy().copy()) for batch in loader.epochs(3)]
    for indices, rows in found:
        assert rows.tolist() == [[lengths[index], 100] for index in indices]
    assert data[1].tolist() == [0, 100]


def test_a_loop_that_waits_helps_with_casts_but_runs_no_function_of_a_map(tmp_path: Path) -> None:
    data = saved(tmp_path / "a.npy", np.zeros((60, 16), "uint16"))

    def least(data: tb.Records) -> int:
        """The memory for 10 records before the transform, for each thread that reads."""
        with pytest.raises(tb.OptionError) as caught:
            tb.Loader(data, tb.Plan(data, 10), memory_limit=1)
        (memory,) = re.findall(r"(\d+) bytes before the transform", str(caught.value))
        return int(memory)

    assert least(data.map(lambda record, _: record.astype("int64"), "int64", [16])) == 320
    helps = len(os.sched_getaffinity(0)) > 1
    assert least(data.to("int64")) == least(data.to("float32", mean=1, std=2)) == 320 * (1 + helps)


def test_options_of_reading(npy: Case) -> None:
    whole = only(npy.data, 10)
    for mode in ("auto", "pread", "direct"):
        assert all(map(np.array_equal, only(npy.data, 10, read_mode=mode), whole))
    assert all(map(np.array_equal, only(npy.data, 10, memory_limit=1 << 20), whole))
