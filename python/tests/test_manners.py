"""What programs do with a loader and its objects apart from iterating over it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sets
import torch
from conftest import Case, copies, indexed, model_of, run_program, saved
from interrupts import Now
from safetensors.numpy import save_file

import twinbuf as tb

Numbers = Callable[..., tb.Loader]


def test_an_epoch_begins_at_its_first_batch(numbers: Numbers) -> None:
    loader = numbers()
    iter(loader)
    iter(loader)
    assert {batch.epoch for batch in loader} == {0}
    iter(loader)
    assert {batch.epoch for batch in loader} == {1}
    # The rest of an epoch outlives a peek.
    it = iter(loader)
    next(it)
    next(it)
    state = loader.state_dict()
    loader.load_state_dict(state)
    iter(loader)
    loader.epochs(5)
    loader.epoch(9)
    assert [(batch.epoch, batch.step) for batch in loader] == [(2, step) for step in range(2, 16)]
    assert {batch.epoch for batch in loader} == {3}


def test_a_peek_does_not_end_an_iteration(numbers: Numbers) -> None:
    loader = numbers()
    steps = []
    for batch in loader:
        iter(loader)
        loader.epochs(2)
        steps.append(batch.step)
    assert steps == list(range(16))


def test_iterations_have_a_length(numbers: Numbers) -> None:
    loader = numbers()
    epochs = loader.epochs(3)
    assert len(epochs) == 48
    next(epochs)
    assert len(epochs) == 47
    assert sum(1 for _ in epochs) == 47
    assert len(epochs) == 0
    assert len(loader.epochs(range(3, 5))) == 32
    assert len(loader.epochs(0)) == 0
    assert len(loader.epoch(7)) == len(iter(loader)) == 16
    tqdm = pytest.importorskip("tqdm")
    assert tqdm.tqdm(loader.epochs(3), disable=True).total == 48
    it = loader.epochs(3)
    for _ in range(20):
        next(it)
    state = loader.state_dict()
    other = numbers()
    other.load_state_dict(state)
    assert len(other.epochs(3)) == 28 == sum(1 for _ in other.epochs(3))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["files", "map", "read_into", "device", "watch", "stream", "sent"])
def test_every_iterator_can_be_closed(kind: str, overlap: bool, numbers: Numbers, tmp_path: Path) -> None:
    model = model_of(tmp_path, {name: torch.zeros(4) for name in "abc"})

    def loader() -> Any:
        if kind in ("stream", "sent"):
            return tb.stream(model, lambda name: name, **on)
        if kind == "read_into":
            return sets.loader_of(sets.Numbers(16), 4, overlap=overlap)
        options = {"map": tb.Batch.numpy} if kind == "map" else {}
        return numbers(overlap=overlap, **on, **options)

    on: dict[str, Any] = {"device": Now()} if kind in ("device", "sent") else {}
    for received in range(3):
        with contextlib.closing(iter(tb.watch(loader()) if kind == "watch" else loader())) as items:
            for _ in range(received):
                next(items)
        # An iteration of a loader that has not begun has nothing to end.
        begun = received or kind in ("watch", "sent")
        assert len(list(items)) == (0 if begun else len(loader()))


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_length_is_that_of_what_comes(npy: Case, drop_last: bool) -> None:
    def loader(batch: int, rank: int = 0, world: int = 1) -> tb.Loader:
        ranks = {"rank": rank, "world": world, "drop_last": drop_last}
        return tb.Loader(npy.data, tb.Plan(npy.data, batch, shuffle="full", seed=1, **ranks))

    for steps in (0, 1, 7, 19, 20):
        first = loader(10)
        it = first.epochs(2)
        for _ in range(steps):
            next(it)
        for other in (loader(10), loader(7), loader(30), *(loader(6, rank, 3) for rank in range(3))):
            try:
                other.load_state_dict(first.state_dict())
            except tb.CheckpointError:
                assert not drop_last
                continue
            foretold = len(other.epochs(2))
            assert foretold == sum(1 for _ in other.epochs(2))


def double(record: np.ndarray, seed: int) -> np.ndarray:
    return record * 2


def test_records_are_pickled_by_path(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of torch's that has them is sent to its workers, which are spawned."""
    for data in (case.data, case.data.to(case.data.dtype).map(double, case.data.dtype, case.data.shape)):
        monkeypatch.chdir("/")
        for other in copies(data):
            assert repr(other) == repr(data) and other.paths == data.paths
            assert np.array_equal(other[:], data[:])
    images = tmp_path / "images.npy"
    data = saved(images, np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3))
    data = data.to("float32", mean=0.5, std=(0.1, 0.2, 0.3), planar=True)
    text = pickle.dumps(data)
    assert np.array_equal(pickle.loads(text)[:], data[:])
    np.save(images, np.zeros((3, 4, 4, 3), dtype=np.uint8))
    with pytest.raises(tb.FileError, match="wanted 2 records, found 3"):
        pickle.loads(text)


def test_ragged_records_and_tensors_are_pickled_by_path(model: tb.Tensors, tmp_path: Path) -> None:
    data = indexed(tmp_path, [b"a", b"bcdef"])
    assert " of uint8 up to [" in repr(data)
    assert [bytes(record) for record in pickle.loads(pickle.dumps(data))[:]] == [b"a", b"bcdef"]
    assert dict(pickle.loads(pickle.dumps(model))) == dict(model)


def test_paths_are_those_of_the_working_directory_that_opened_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is a pattern too."""
    folders = [tmp_path / "run[1]", tmp_path / "other"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        np.save(folder / "a.npy", np.full(8, number, np.uint8))
        save_file({"a": np.zeros(number + 1)}, folder / "m.safetensors")
    monkeypatch.chdir(folders[0])
    opened = [tb.Records.open_npy("a.npy"), tb.Records.open_npy("*.npy"), tb.Records.open_npy(["a.npy"])]
    model = tb.Tensors.open("m.safetensors")
    monkeypatch.chdir(folders[1])
    for data in opened:
        for other in (data.to("int64"), data.windows(2), pickle.loads(pickle.dumps(data)), copy.copy(data)):
            assert not np.asarray(other).any()
        assert pickle.loads(pickle.dumps(data.windows(2))).shape == (2,)
    assert pickle.loads(pickle.dumps(model))["a"].shape == (1,)


def test_a_working_directory_that_is_gone(
    model: tb.Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "a.npy", np.arange(8))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    data = tb.Records.open_npy(tmp_path / "a.npy")
    assert pickle.loads(pickle.dumps(data.windows(2)))[3].tolist() == [6, 7]
    assert len(pickle.loads(pickle.dumps(tb.Tensors.open(model.paths)))) == 1
    for path in ("a.npy", "../a.npy"):
        with pytest.raises(tb.FileError, match=r"a\.npy"):
            tb.Records.open_npy(path)


def test_weak_references(npy: Case, model: tb.Tensors) -> None:
    for thing in (npy.data, tb.Plan(8, 2), model):
        assert weakref.ref(thing)() is thing


def test_numbers_are_not_in_records(npy: Case) -> None:
    with pytest.raises(TypeError, match="Records"):
        assert 3 in npy.data  # type: ignore[operator]


def test_what_cannot_be_pickled_or_copied_names_what_can(numbers: Numbers, tmp_path: Path) -> None:
    loader = numbers()
    for thing, *texts in (
        (loader, "a thread", "state_dict()"),
        (loader.report(), "to_dict()"),
        (next(loader.epochs(1)), "a slot", "copy()"),
        (tb.prefetch([1]),),
        (tb.watch([1]),),
        (tb.Writer(tmp_path / "x.npy", "float32", (3,)),),
    ):
        for copied in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match="cannot be pickled") as caught:
                copied(thing)
            assert all(text in str(caught.value) for text in texts), thing


def test_records_as_an_array(case: Case) -> None:
    assert np.array_equal(np.asarray(case.data), case.records)
    assert np.asarray(case.data, dtype="float64").dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        np.asarray(case.data, copy=False)


def test_every_public_attribute_has_a_sentence() -> None:
    without = [
        f"{kind}.{name}"
        for kind in (getattr(tb, name) for name in tb.__all__)
        if isinstance(kind, type)
        for name in dir(kind)
        if not name.startswith("_")
        and not (inspect.getdoc(getattr(kind, name)) or "").strip()
        and not issubclass(kind, (BaseException, tuple))
    ]
    assert without == []


def test_subinterpreters_are_refused() -> None:
    interpreters = pytest.importorskip(
        "_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters"
    )
    code = "import sys; sys.path[:] = PATH\ntry:\n import twinbuf\nexcept ImportError as e: print(e)"
    program = f"""
import sys, {interpreters.__name__} as interpreters
interpreter = interpreters.create()
interpreters.run_string(interpreter, {code!r}.replace("PATH", repr(sys.path)))
interpreters.destroy(interpreter)
"""
    code, out, err = run_program(program)
    assert (code, err) == (0, "") and "subinterpreter" in out


def test_jax_takes_the_array_of_a_batch(numbers: Numbers) -> None:
    jax = pytest.importorskip("jax")
    batch = next(iter(numbers()))
    for array in (jax.device_put(batch.numpy()), jax.numpy.asarray(batch), jax.jit(abs)(batch.numpy())):
        assert np.array_equal(array, batch.numpy())


def test_plans_are_values(npy: Case) -> None:
    things = [
        tb.Plan(npy.data, 5),
        tb.Plan(npy.data, 5, shuffle=tb.Window(2), seed=3, rank=1, world=4, drop_last=False),
        tb.Plan(100, 7, shuffle=tb.Chunks(3), seed=2**63),
        tb.Window(3),
        tb.Window(3, 100),
        tb.Chunks(7),
    ]
    for thing in things:
        for other in copies(thing):
            assert (other, hash(other), repr(other)) == (thing, hash(thing), repr(thing))
    assert len(set(things)) == len(things)


class Named(tb.Plan):
    name = ""


def test_a_plan_of_a_subclass_is_pickled_as_such() -> None:
    plan = Named(100, 7)
    plan.name = "train"
    for other in copies(plan):
        assert (type(other), other.name, other) == (Named, "train", plan)


def test_windows_are_of_the_files_that_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in (("a", 4), ("b", 1), ("c", 6)):
        np.save(tmp_path / f"{name}.npy", np.full(rows, ord(name)))
    monkeypatch.chdir(tmp_path)
    data = tb.Records.open_npy("*.npy", skip_short=True)
    np.save(tmp_path / "d.npy", np.zeros(8))
    (tmp_path / "e.npy").write_bytes(b"is no array")
    monkeypatch.chdir("/")
    windows = data.windows(2)
    for found in (windows, pickle.loads(pickle.dumps(windows))):
        assert [path.name for path in found.paths] == ["a.npy", "c.npy"]
        assert [path.name for path in found.skipped] == ["b.npy"]
        assert len(found) == 5
    # In their order, also those that were too short for two rows.
    for found in (data.windows(1), windows.windows(1), pickle.loads(pickle.dumps(windows)).windows(1)):
        assert [path.name for path in found.paths] == ["a.npy", "b.npy", "c.npy"]


@pytest.mark.parametrize("kind", ["folder", "pattern", "indexes"])
def test_a_copy_has_the_files_that_were_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever files come and go later."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x[1]").mkdir()

    def add(number: int) -> None:
        np.save(f"x[1]/{number}.npy", np.array([0, 1, number]))
        if kind == "indexes":
            Path(f"x[1]/{number}.bin").write_bytes(b"abcdef"[:number])

    add(4)
    add(5)
    if kind == "indexes":
        data = tb.Records.open_indexed("*/*.bin", "*/*.npy")
    else:
        data = tb.Records.open_npy("x[[]1]/*.npy" if kind == "pattern" else "x[1]")
    text, files, found = pickle.dumps(data), data.paths, [bytes(record) for record in data]
    add(6)
    monkeypatch.chdir("/")
    for other in (pickle.loads(text), copy.copy(data), copy.deepcopy(data.to(data.dtype))):
        assert [path.name for path in other.paths] == [path.name for path in files]
        assert [bytes(record) for record in other] == found
    # As many records, but others.
    (tmp_path / "x[1]/4.npy").unlink()
    for call in (lambda: pickle.loads(text), lambda: copy.copy(data)):
        with pytest.raises(FileNotFoundError, match=r"4\.npy"):
            call()


def test_a_copy_has_the_tensors_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that it leaves out, of which two files have one of the same name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x[1]").mkdir()
    for name in "ab":
        save_file({name: np.zeros(2), "more": np.zeros(3)}, f"x[1]/{name}.safetensors")
    index = Path("x[1]/model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in "ab"}}))
    indexed, model = tb.Tensors.open(index), tb.Tensors.open("x[[]1]/a.*")
    texts = pickle.dumps(indexed), pickle.dumps(model)
    monkeypatch.chdir("/")
    for other in (pickle.loads(texts[0]), copy.copy(indexed), copy.deepcopy(indexed)):
        assert dict(other) == dict(indexed) and list(other) == ["a", "b"]
        assert [path.name for path in other.paths] == ["a.safetensors", "b.safetensors"]
    assert list(pickle.loads(texts[1])) == ["a", "more"]
    gone = tmp_path / "x[1]" / "a.safetensors"
    gone.unlink()
    for text in texts:
        with pytest.raises(FileNotFoundError) as caught:
            pickle.loads(text)
        assert caught.value.filename == str(gone) and str(caught.value).endswith("no such file")


def test_a_length_beyond_pythons_is_told_as_by_python(numbers: Numbers) -> None:
    for options in ({}, {"map": lambda batch: batch}):
        batches = numbers(**options).epochs(2**64 - 1)
        for of in (batches, tb.prefetch(batches), tb.watch(batches)):
            with pytest.raises(OverflowError, match="cannot fit 'int' into an index-sized integer"):
                len(of)
        assert next(batches).step == 0


def test_numpys_integers_are_integers(numbers: Numbers) -> None:
    two = np.int64(2)
    assert list(tb.prefetch(range(4), depth=two)) == [0, 1, 2, 3]
    assert list(tb.generate(lambda number: number, rounds=two)) == [0, 1]
    with pytest.raises(ValueError, match="depth: wanted from 1 to 65536, found 0"):
        tb.prefetch(range(4), depth=two * 0)
    with pytest.raises(ValueError, match="rounds: wanted a whole number from 0 to"):
        tb.generate(lambda number: number, rounds=-two)
    loader = numbers(depth=two)
    batch = next(iter(loader))
    assert batch.numpy().dtype.type is batch.indices.dtype.type is np.int64
    assert len(loader.epochs(two)) == sum(1 for _ in loader.epochs(two)) == 32


def test_asarray_of_several_arrays_is_refused(npy: Case) -> None:
    data = (npy.data, npy.data)
    batch = next(iter(tb.Loader(data, tb.Plan(data, 5))))
    for make in (np.asarray, np.array):
        with pytest.raises(TypeError, match=r"2 arrays, .* use `numpy\(\)`"):
            make(batch)
    batch = next(iter(tb.Loader(npy.data, tb.Plan(npy.data, 5))))
    assert np.shares_memory(np.asarray(batch), batch.numpy())
    assert np.asarray(batch, dtype="float64").dtype == np.float64
    own = batch.numpy()
    for dtype in (None, own.dtype):
        assert np.shares_memory(batch.__array__(dtype, copy=False), own)
        assert not np.shares_memory(batch.__array__(dtype, copy=True), own)
    with pytest.raises(ValueError, match="copy: wanted none"):
        batch.__array__(np.dtype("float64"), copy=False)


def test_a_dict_of_data_sets(npy: Case) -> None:
    data = {"x": npy.data, "y": npy.data.to("float64")}
    for batch in tb.Loader(data, tb.Plan(data, 5, shuffle="full", seed=1)).epoch(0):
        found = batch.numpy()
        assert list(found) == ["x", "y"]
        assert np.array_equal(found["x"], npy.records[batch.indices])
        assert np.array_equal(found["x"], found["y"])
        assert batch.torch()["y"].dtype.is_floating_point
    with pytest.raises(TypeError, match="data: wanted names as keys of the dict, found 1"):
        tb.Loader({1: npy.data}, tb.Plan(npy.data, 5))  # type: ignore[dict-item]


def test_read_into_that_returns_an_array_is_told() -> None:
    data: Any = sets.Numbers()
    data.read_into = lambda indices, out: np.ones((len(indices), 1), np.int64)
    with pytest.raises(TypeError, match=r"read_into: wanted `out` filled .*, found a ndarray returned"):
        next(iter(sets.loader_of(data, 4)))


WORKER = """
import sys, numpy, torch, twinbuf as tb
class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        data = tb.Records.open_npy(sys.argv[1])
        yield from tb.Loader(data, tb.Plan(data, 5)).epoch(0)
try:
    context = {"num_workers": 1, "multiprocessing_context": "fork"}
    next(iter(torch.utils.data.DataLoader(Data(), batch_size=None, **context)))
except TypeError as error:
    print(error)
"""


def test_a_batch_from_a_worker_process_is_an_error(npy: Case) -> None:
    _, out, _ = run_program(WORKER, npy.data.paths[0])
    assert "a worker process sent a Batch" in out


POOLS = """
import concurrent.futures, multiprocessing, sys, twinbuf as tb
def batch(path):
    data = tb.Records.open_npy(path)
    return next(iter(tb.Loader(data, tb.Plan(data, 5))))
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool, concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        for argument, code in (sys.argv[1], batch), (batch(sys.argv[1]), len):
            for call in (
                lambda: pool.apply_async(code, (argument,)).get(20),
                lambda: executor.submit(code, argument).result(20),
            ):
                try:
                    call()
                except Exception as error:
                    print("a Batch cannot be pickled" in str(error), flush=True)
        print(executor.submit(len, "as before").result(20))
"""


def test_a_batch_to_or_from_a_pool_is_an_error_there(npy: Case, tmp_path: Path) -> None:
    (tmp_path / "pools.py").write_text(POOLS)
    command = [sys.executable, str(tmp_path / "pools.py"), str(npy.data.paths[0])]
    # Not `capture_output`: a worker that is left behind would hold the pipe.
    with (tmp_path / "out").open("w") as out:
        subprocess.run(command, stdout=out, timeout=100, check=False)
    assert (tmp_path / "out").read_text() == "True\nTrue\nTrue\nTrue\n9\n"


@pytest.mark.parametrize("kind", [tb.Prefetcher, tb.Watched])
def test_what_a_function_makes_is_not_called(kind: Any) -> None:
    for given in ((), ([1],)):
        with pytest.raises(TypeError, match=f"{kind.__name__}: wanted `prefetch.*`, found a call"):
            kind(*given)


def test_messages_have_pythons_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(4))
    with pytest.raises(tb.FileError, match=r"`Records\.open_npz`") as caught:
        tb.Records.open_headerless(tmp_path / "a.npz", "uint8")
    assert hasattr(tb.Records, "open_npz")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(tb.OptionError) as of_plan:
        tb.Plan(10, 2, rank="env")
    for text in (str(caught.value), str(of_plan.value)):
        assert "::" not in text
        assert "Builder" not in text


@pytest.mark.parametrize("by", ["option", "switch"])
def test_a_breakdown_prints_the_steps(
    numbers: Numbers, by: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if by == "switch":
        monkeypatch.setenv("TWINBUF_BREAKDOWN", "5")
    loader = numbers(**({} if by == "switch" else {"breakdown": 5}))
    for _ in loader:
        sum(range(1000))
    lines = capfd.readouterr().err.splitlines()
    # The first ten, and every fifth.
    assert lines.pop(0).startswith("breakdown: ")  # it turns the overlap off
    assert [line.split(":")[0] for line in lines] == [f"step {step}" for step in (*range(11), 15)]
    assert all("load" in line and "total" in line for line in lines)
    assert "total" in str(loader.report())
    assert not loader.report().overlap
    quiet = numbers(**({"breakdown": 0} if by == "option" else {}))
    if by == "option":
        assert sum(1 for _ in quiet) == 16
        assert capfd.readouterr().err == ""
        assert quiet.report().overlap
