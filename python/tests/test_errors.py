"""Errors: of the files, of the options, and Ctrl-C."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import math
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Case, refused, saved
from late import Late
from safetensors.numpy import save_file
from safetensors.torch import save_file as torch_save
from sets import Gated, Numbers, loader_of

import twinbuf as tb


def test_a_missing_file(tmp_path: Path) -> None:
    for error in (FileNotFoundError, OSError, tb.FileError, tb.Error):
        with pytest.raises(error, match=r"no such file") as caught:
            tb.Records.open_npy(tmp_path / "missing.npy")
        assert caught.value.path == tmp_path / "missing.npy"  # type: ignore[attr-defined]
        assert caught.value.errno == errno.ENOENT  # type: ignore[attr-defined]
        assert caught.value.filename == str(tmp_path / "missing.npy")  # type: ignore[attr-defined]
        assert caught.value.strerror == os.strerror(errno.ENOENT)  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError, match="no files"):
        tb.Records.open_npy(f"{tmp_path}/*.npy")
    with pytest.raises(tb.OptionError, match="no files were given"):
        tb.Records.open_npy([])


def test_a_bad_header_has_path_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x09\x00" + bytes(120))
    with pytest.raises(tb.FileError, match="unknown version") as caught:
        tb.Records.open_npy(path)
    assert (caught.value.path, caught.value.offset) == (path, 6)
    with pytest.raises(tb.FileError):
        saved(path, np.asfortranarray(np.zeros((4, 4))))
    path.write_bytes(bytes(30))
    with pytest.raises(tb.FileError, match="not whole") as caught:
        tb.Records.open(path, 20)
    assert caught.value.offset == 20
    with pytest.raises(ValueError, match="open_headerless"):
        tb.Records.open(path, 10).windows(2)
    assert len(tb.Records.open([path, path], 30)) == 2
    with pytest.raises(tb.OptionError):
        tb.Records.open(path, 0)
    with pytest.raises(ValueError, match="datetime64"):
        tb.Records.open_headerless(path, "datetime64[s]")
    with pytest.raises(TypeError):
        tb.Records.open_headerless(path, "float8")
    for dtype in ("<u2", np.uint16, np.dtype("uint16")):
        assert tb.Records.open_headerless(path, dtype).dtype == "uint16"
    # No option of Rust is named.
    for call in (lambda: tb.Records.open(path, 4), lambda: tb.Records.open_headerless(path, "float32")):
        with pytest.raises(tb.FileError, match=r"check its size, and whether the file is complete$"):
            call()


def test_short_files_are_left_out_on_request(tmp_path: Path) -> None:
    for name, rows in (("a", 10), ("b", 3), ("c", 9)):
        np.save(tmp_path / f"{name}.npy", np.arange(rows))
    with pytest.raises(tb.FileError):
        tb.Records.open_npy(tmp_path).windows(5)
    data = tb.Records.open_npy(tmp_path, skip_short=True).windows(5)
    assert (len(data), [path.name for path in data.skipped]) == (3, ["b.npy"])


def test_more_records_than_fit_memory_are_a_memory_error(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 2**43 - 4096)
    data = tb.Records.open_headerless(tmp_path / "sparse", "uint8")
    np.save(tmp_path / "offsets.npy", np.array([0, 2**43 - 4096]))
    ragged = tb.Records.open_indexed(tmp_path / "sparse", tmp_path / "offsets.npy")
    one = tb.Records.open(tmp_path / "sparse", 4096)
    for read in (
        lambda: data.windows(2**42)[0],
        lambda: one.map(lambda record, _: record, "float32", (2**40,))[0],
        lambda: ragged[0],
        lambda: tb.Plan(2**62, 2**61).indices(0, 0),
    ):
        with pytest.raises(MemoryError, match="no memory"):
            read()


def test_no_memory_for_a_kept_batch_is_an_error_at_each_call(npy: Case) -> None:
    loader = tb.Loader(npy.data, tb.Plan(npy.data, 5), depth=2, read_mode="pread", memory_limit=600)
    batches = loader.epochs(1, timeout=30.0)
    kept = [next(batches), next(batches)]
    for _ in range(4):
        with pytest.raises(MemoryError, match="let go of earlier batches"):
            next(batches)
    kept.clear()
    assert [batch.step for batch in batches] == list(range(2, len(loader)))


def test_no_memory_for_a_kept_batch_hides_no_error_of_a_read() -> None:
    """The read failed while the call waited that raised MemoryError: the next call told the end."""

    def before(indices: np.ndarray) -> None:
        if 2 in indices:
            raise LookupError("two")

    batches = loader_of(Numbers(8, before), 1, depth=2, memory_limit=20).epochs(1)
    kept = [next(batches), next(batches)]
    with pytest.raises(MemoryError):
        next(batches)
    threading.Timer(0.02, kept.clear).start()
    with pytest.raises(LookupError, match="two"):
        while True:
            with contextlib.suppress(MemoryError):
                next(batches)


def test_indexes_that_name_no_record(npy: Case) -> None:
    count = len(npy.data)
    for index in (count, -count - 1, 2**63, -(2**70)):
        for wanted in (index, [index], np.array([index]), range(index, index + 1)):
            with pytest.raises(IndexError, match=f"a record from -{count} to {count - 1}, found {index}"):
                npy.data[wanted]
    with pytest.raises(IndexError):
        tb.Plan(npy.data, 5).indices(0, 1000)
    with pytest.raises(tb.OptionError, match=r"at most 2\*\*63 - 1 records"):
        tb.Plan(2**63, 2)
    loader = tb.Loader(npy.data, tb.Plan(npy.data, 5))
    for call in (loader.epoch, loader.set_epoch):
        with pytest.raises(tb.OptionError, match="epoch"):
            call(2**64 - 1)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (2**61,), (2**40, 2**40)])
def test_a_map_to_records_without_a_size_is_refused(npy: Case, shape: tuple[int, ...]) -> None:
    with pytest.raises(tb.OptionError, match="shape: wanted records"):
        npy.data.map(lambda record, _: record, "float32", shape)


def test_files_that_cannot_be_read_or_written_are_named(npy: Case, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "z.npz", x=np.arange(4))
    with pytest.raises(tb.FileError, match="compressed") as caught:
        tb.Records.open_npz(tmp_path / "z.npz", "x")
    assert caught.value.path == tmp_path / "z.npz"
    trace = tmp_path / "missing" / "trace.json"
    with pytest.raises(FileNotFoundError) as missing:
        tb.Loader(npy.data, tb.Plan(npy.data, 5), trace=trace)
    assert missing.value.filename == str(trace)


def test_no_file_descriptor_is_left_for_direct_reads(npy: Case, model: tb.Tensors) -> None:
    resource = pytest.importorskip("resource")
    plan = tb.Plan(npy.data, 5)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest number that is free: all below it are taken, also when what earlier tests left is collected.
    gc.collect()
    os.close(free := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        for call, path in (
            (lambda: tb.Loader(npy.data, plan, read_mode="direct"), npy.data.paths[0]),
            (lambda: tb.stream(model, len, read_mode="direct"), model.paths[0]),
        ):
            with pytest.raises(tb.FileError, match="cannot be read as `read_mode` asks for") as caught:
                call()
            assert (caught.value.path, caught.value.errno) == (path, errno.EMFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("device", [False, True])
def test_an_iteration_that_another_thread_closes_tells_so(device: bool) -> None:
    data, raised = Gated(), list[BaseException]()
    loader = loader_of(data, 4, device=Late("side") if device else None)
    iterator = loader.epoch(0)

    def use() -> None:
        try:
            next(iterator)
        except tb.Error as error:
            raised.append(error)
        data.go.set()  # only now the read ends, and with it `close`

    thread = threading.Thread(target=use)
    thread.start()
    data.asked.wait()
    loader.close(timeout=60)
    thread.join()
    assert str(raised[0]) == "the loader was closed"


@pytest.mark.parametrize("overlap", [True, False])
def test_a_file_that_is_cut_off_while_it_is_read(npy: Case, overlap: bool) -> None:
    (path,) = npy.data.paths
    loader = tb.Loader(npy.data, tb.Plan(npy.data, 30), name="train", overlap=overlap)
    os.truncate(path, 128 + 60 * 100)
    steps = []
    with pytest.raises(tb.FileError, match="truncated") as caught:
        for batch in loader.epoch(0):
            steps.append(batch.step)
    error = caught.value
    assert steps == [0, 1, 2]
    assert (error.path, error.offset, error.loader, error.epoch, error.step) == (path, 6128, "train", 0, 3)
    assert str(error).startswith("train: epoch 0, step 3: ")
    assert len([1 for _ in zip(range(3), loader.epoch(0), strict=False)]) == 3


def test_switches(npy: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINBUF_VALID_OVERLAP", "0")
    assert loader_of(npy.data, 5).report().overlap
    assert not loader_of(npy.data, 5, name="valid").report().overlap
    monkeypatch.setenv("TWINBUF_OVERLAP", "maybe")
    with pytest.raises(tb.OptionError, match="TWINBUF_OVERLAP"):
        loader_of(npy.data, 5)


@pytest.mark.parametrize("depth", [2**31, 2**40, 2**62, 2**64 - 1])
def test_a_depth_beyond_the_memory_is_refused(
    npy: Case, model: tb.Tensors, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tb.Plan(npy.data, 4)
    message = rf"`depth`.* found \d+ bytes: {depth} .*slots"
    with pytest.raises(tb.OptionError, match=message):
        tb.Loader(npy.data, plan, depth=depth)
    with pytest.raises(tb.OptionError, match=message):
        tb.stream(model, [["a"]], depth=depth)
    with pytest.raises(tb.OptionError, match=f"depth: wanted from 1 to 65536, found {depth}"):
        tb.prefetch([], depth=depth)
    monkeypatch.setenv("TWINBUF_DEPTH", str(depth))
    with pytest.raises(tb.OptionError, match=message):
        tb.Loader(npy.data, plan)


def interrupted(iterator: Any, sent: Callable[[], object] = lambda: None) -> None:
    """Wait for the next item until Ctrl-C comes, after which the function is called."""
    main, waits = threading.main_thread().ident, threading.Event()

    def interrupt() -> None:
        waits.wait()
        # If it does not wait yet after that, Ctrl-C still comes where it is expected.
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)  # type: ignore[arg-type]
        sent()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        waits.set()
        next(iterator)
    thread.join()


def test_ctrl_c_ends_a_wait_and_loses_no_batch() -> None:
    data = Gated()
    iterator = loader_of(data, 4).epoch(0)
    interrupted(iterator)
    data.go.set()
    assert [batch.step for batch in iterator] == [0, 1]


def test_a_batch_that_arrives_with_ctrl_c_is_not_lost() -> None:
    go, over = threading.Event(), []

    def before(indices: np.ndarray) -> None:
        go.wait()
        if not over:
            go.clear()

    loader = loader_of(Numbers(8, before), 2)
    iterator = loader.epochs(1)
    for _ in range(4):
        state = loader.state_dict()
        interrupted(iterator, go.set)
        assert loader.state_dict() == state
        # It is there, or comes now.
        assert next(iterator).step == state["step"]
        assert loader.state_dict()["step"] == state["step"] + 1
    # The end of an iteration that was left does not count it either.
    iterator = loader.epochs(1)
    interrupted(iterator, go.set)
    del iterator
    assert loader.state_dict()["step"] == 0
    over.append(True)
    go.set()


@pytest.mark.parametrize("overlap", [True, False])
def test_ctrl_c_while_a_batch_is_read_reads_it_again(overlap: bool) -> None:
    interrupts = [KeyboardInterrupt(), KeyboardInterrupt()]

    def before(indices: np.ndarray) -> None:
        if indices[0] == 2 and interrupts:
            raise interrupts.pop()

    loader = loader_of(Numbers(8, before), 2, overlap=overlap)
    iterator = loader.epochs(1)
    assert next(iterator).step == 0
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert loader.state_dict()["step"] == 1
    assert [(batch.step, int(batch.numpy()[0, 0])) for batch in iterator] == [(1, 2), (2, 4), (3, 6)]


def test_arguments_of_a_wrong_type_are_named(npy: Case, model: tb.Tensors, tmp_path: Path) -> None:
    save_file({"b": np.zeros(3)}, tmp_path / "b.safetensors")
    plan = tb.Plan(npy.data, 2)
    both = tb.Tensors.open([*model.paths, tmp_path / "b.safetensors"])
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: tb.Plan(10, 2, rank=-1, world=2), "rank, world: wanted .*, found rank=-1, world=2$"),
        (lambda: tb.Plan(10, 2, rank=1), "rank, world: wanted .*, found rank=1, world=None$"),
        (lambda: tb.Records.open(b"/tmp/x", 4), "paths: wanted a path or a list .* found b'/tmp/x'$"),
        (lambda: tb.Records.open([3], 4), r"paths: .* found \[3\]$"),  # type: ignore[list-item]
        (lambda: tb.Records.open_headerless(tmp_path, None), "dtype: wanted .*, found None"),
        (lambda: tb.Loader(npy.data, 3), "plan: wanted a Plan, found 3$"),
        (lambda: tb.Loader(npy.data, plan, map=3), "map: wanted a function, found 3"),
        (lambda: tb.Loader([1, 2, 3], plan), "read_into"),
        (lambda: tb.Loader((npy.data, [1, 2]), plan), "read_into"),
        (lambda: tb.Loader(npy.data, plan).epochs("3"), ""),
        (lambda: tb.Plan(6, "2"), "batch: wanted a number of records, or pairs .*, found '2'"),
        (lambda: tb.Plan(6, 2, shuffle=1), "shuffle: wanted .*, found 1"),
        (lambda: tb.stream(None, len), "model: wanted `Tensors`, found None$"),
        (lambda: tb.stream(model, len, order=3), "order: wanted lists of numbers of groups, found 3$"),
        (lambda: tb.stream(model, 3), "groups: wanted a function .*, found 3$"),
        (lambda: npy.data.to(3), "dtype: wanted a boolean, .*, found 3$"),
        (lambda: npy.data[2.5], "index: wanted a whole number, .*, found 2.5$"),
        (lambda: npy.data[[[1], [2, 3]]], r"index: wanted a list .*, found object \(\)$"),
        (lambda: tb.Plan(10, 2, records=[[1], [2, 3]]), r"records: wanted a list .*, found object \(\)$"),
        (lambda: npy.data.to("float32", std=[[1], [2, 3]]), r"std: wanted .* found \[\[1\], \[2, 3\]\]$"),
        (lambda: npy.data.map(3, "int64", (1,)), "function: wanted a function, found 3$"),
        (lambda: tb.generate(3), "make: wanted a function, found 3$"),
        (lambda: tb.generate(len, before=3), "before: wanted a function, found 3$"),
        (lambda: tb.generate(len, rounds=2.5), "rounds: wanted a whole number, found 2.5$"),
        (lambda: tb.prefetch([], depth=2.5), "depth: wanted a whole number, found 2.5$"),
        (lambda: tb.prefetch([]).close(timeout="1"), "timeout: wanted a number of seconds .*, found '1'$"),
        (lambda: tb.Plan({"a": 3}, 2), "data: wanted .* found <class 'int'> without `__len__`$"),
        (lambda: tb.Writer(tmp_path / "x", "int64", 3), "row: wanted the axes .*, found 3$"),
        (lambda: tb.Records("a.npy"), "Records: wanted `Records.open_npy"),
        (lambda: tb.Records(), "Records: wanted `Records.open_npy"),
        (lambda: tb.Tensors("a"), r"Tensors: wanted `Tensors.open\(paths\)`, found a call$"),
        (lambda: tb.Stream(model, {}), r"Stream: wanted `stream\(model, groups\)`, found a call$"),
        (lambda: tb.Report(), r"Report: wanted `report\(\)` of a loader or a loop, found a call$"),
        (lambda: tb.Loader(npy.data, plan, overlap="no"), "overlap: wanted True or False, found 'no'$"),
        (lambda: tb.Loader(npy.data, plan, copy_stream=2), "copy_stream: wanted True or False, found 2$"),
        (lambda: tb.Plan(10, 2, drop_last=None), "drop_last: wanted True or False, found None$"),
        (lambda: tb.Records.open(tmp_path, 4, skip_short=[]), r"skip_short: wanted True .* found \[\]$"),
        (lambda: npy.data.to("float32", mean=0, planar="no"), "planar: wanted True or False, found 'no'$"),
        (lambda: tb.stream(model, len, cycle=0.5), "cycle: wanted True or False, found 0.5$"),
        (lambda: tb.Plan(b"3", 1), "data: wanted a data set, .*, or a whole number, found a bytes$"),
        (lambda: tb.Plan((b"3",), 1), "data: wanted .* found <class 'bytes'> without `read_into`$"),
        (lambda: tb.Plan({"a": "b.npy"}, 1), "data: wanted .* found <class 'str'> without `read_into`$"),
        (lambda: tb.Plan(60, b"3"), "batch: wanted a whole number, found b'3'$"),
        (lambda: npy.data.map(len, "int64", b"3"), "shape: wanted the axes .*, found b'3'$"),
        (lambda: npy.data.map(len, "int64", 3), "shape: wanted the axes of a record"),
        (lambda: npy.data.to("float32", mean="a"), "mean: wanted a number, or one for each .*, found 'a'"),
        (lambda: tb.stream(model, lambda _: [0]), r"groups: wanted keys .* found \[0\] for 'a'$"),
        (lambda: tb.stream(model, lambda _: math.nan), "groups: wanted keys .* found nan for 'a'$"),
        (lambda: tb.stream(both, {"a": 1, "b": "x"}.get), "groups: wanted keys .* found 'x' for 'b'$"),
    ]
    refused((TypeError, ValueError), bad)
    for yes in (1, np.True_, np.int8(1)):
        assert tb.Plan(10, 2, drop_last=yes).drop_last and tb.Loader(npy.data, plan, overlap=yes)
    for key in (3, "\ud800", [], "b"):
        with pytest.raises(KeyError):
            model[key]  # type: ignore[index]
        assert model.get(key) is None and key not in model  # type: ignore[call-overload]
    for name, value in (("shape", 4), ("dtype", None)):
        data = Numbers()
        setattr(data, name, value)
        with pytest.raises(TypeError, match=f"{name}: wanted .*, found {value}$"):
            tb.Loader(data, tb.Plan(8, 2))


def test_numbers_that_cannot_be_are_named(numbers: Callable[..., tb.Loader], tmp_path: Path) -> None:
    loader = numbers()
    rows = tb.Records.open_npy(tmp_path / "numbers.npy")
    bad: dict[str, list[Callable[[int], object]]] = {
        "data": [lambda n: tb.Plan(n, 2)],
        "batch": [lambda n: tb.Plan(10, n)],
        "seed": [lambda n: tb.Plan(10, 2, seed=n)],
        "world": [lambda n: tb.Plan(10, 2, rank=0, world=n)],
        "chunks": [lambda n: tb.Window(n)],
        "records": [lambda n: tb.Window(1, n), lambda n: tb.Chunks(n)],
        "depth": [lambda n: numbers(depth=n)],
        "workers": [lambda n: numbers(workers=n)],
        "epochs": [loader.epochs],
        "epoch": [loader.epoch, loader.set_epoch, lambda n: loader.plan.indices(n, 0)],
        "step": [lambda n: loader.plan.indices(0, n)],
        "rows": [lambda n: rows.windows(n)],
        "stride": [lambda n: rows.windows(1, n)],
        "record_bytes": [lambda n: tb.Records.open(tmp_path / "numbers.npy", n)],
    }
    for name, calls in bad.items():
        for call in calls:
            for number in (-1, -(2**70), 2**64):
                with pytest.raises(ValueError, match=f"^{name}: wanted .* from 0 .*, found {number}$"):
                    call(number)
            found = "a float" if name == "data" else "2.5"
            with pytest.raises(TypeError, match=f"^{name}: wanted .*a whole number, found {found}$"):
                call(2.5)  # type: ignore[arg-type]
    assert tb.Plan(np.int64(10), np.uint8(2), shuffle="full", seed=np.int32(3)).batch == 2


def test_what_cannot_work_is_an_option_error(numbers: Callable[..., tb.Loader], tmp_path: Path) -> None:
    loader = numbers()
    rows = tb.Records.open_npy(tmp_path / "numbers.npy")
    file = tmp_path / "x"
    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: tb.Plan(10, 2, rank=3), "rank, world: wanted both"),
        (lambda: tb.Plan(10, 2, rank=4, world=4), "rank"),
        (lambda: tb.Plan(10, 2, seed=1), "seed"),
        (lambda: tb.Plan(10, 2, shuffle="yes"), "shuffle: wanted .*, found 'yes'"),
        (lambda: tb.Plan(10, 0), ""),
        (lambda: tb.Plan((), 5), ""),
        (lambda: tb.Plan(3, 5), "or set `drop_last=False`"),
        (lambda: tb.Plan(10, 2, shuffle=tb.Window(3)), "size of a record"),
        (lambda: tb.Plan(10, 2, records=[1, 2**70]), f"records: wanted numbers below 10, found {2**70}$"),
        (lambda: loader.epochs(range(0, 4, 2)), "epochs: wanted .* step of 1, found range\\(0, 4, 2\\)"),
        (lambda: loader.epochs(range(-1, 2)), "epochs: wanted a whole number from 0 .*, found -1"),
        (lambda: rows.windows(0), "rows: wanted at least 1, found 0"),
        (lambda: rows.to("int64").windows(2), "windows: wanted a call before `to`"),
        (lambda: rows.to("int64", mean=1), "dtype: wanted float32 for `mean`"),
        (lambda: rows.to("datetime64[s]"), "dtype: wanted a boolean"),
        (lambda: tb.Records.open_indexed(tmp_path / "numbers.npy", [tmp_path] * 2), "indexes: wanted one"),
        (lambda: numbers(device="cpu", device_depth=1), "device_depth: wanted 2 or more, found 1"),
        (lambda: numbers(device=Late("side"), device_depth=1), "device_depth: wanted 2 or more, found 1"),
        (lambda: numbers(device_depth=0), "device_depth: wanted 2 or more, found 0"),
        (lambda: numbers(depth=0), "`depth`"),
        (lambda: numbers(read_mode="mmap"), '`read_mode`: wanted "auto", "pread" or "direct", found "mmap"'),
        (lambda: numbers(memory_limit=100), "`memory_limit`: wanted at least"),
        (lambda: tb.Loader(rows, tb.Plan(1000, 5)), "plan"),
        (lambda: tb.Loader((), tb.Plan(50, 5)), "found none"),
        (lambda: tb.prefetch([], depth=0), "depth: wanted from 1 to 65536, found 0"),
        (lambda: tb.generate(float, rounds=-1), "rounds: wanted a whole number from 0 .*found -1"),
        (lambda: tb.Writer(file, "bfloat16"), "dtype: wanted a type that numpy has, found bfloat16"),
        (lambda: tb.Writer(file, "int64", (3, 0)), "row: wanted records of at least one element"),
        (lambda: tb.Writer(file, "int64", (2**70,)), "row: wanted records .* that fit memory"),
        (lambda: tb.Writer(tmp_path, "int64"), 'option `path`: wanted a file, or .*, found "[^{]*$'),
        (lambda: tb.Writer(file, "int64", depth=0), "option `depth`: wanted at least 1, .* depth 0, shard"),
        (
            lambda: tb.Writer(file, "int64", shard_bytes=100),
            "option `shard_bytes`: wanted at least 4096 bytes: whole rows .*, shard_bytes 100$",
        ),
        (lambda: tb.Writer(file, "float32", slot_bytes=1 << 60), ""),
    ]
    refused(tb.OptionError, bad)


@pytest.fixture
def calls(npy: Case, model: tb.Tensors) -> dict[str, list[Callable[[Any], object]]]:
    """What has an argument of that name, to be called with a value for it."""

    def each(name: str, *makers: Callable[..., object]) -> list[Callable[[Any], object]]:
        return [lambda value, make=make: make(**{name: value}) for make in makers]

    files = partial(tb.Loader, npy.data, tb.Plan(npy.data, 2)), partial(tb.stream, model, len)
    loops = *files, lambda **options: iter(tb.prefetch([], **options))
    every = *loops, partial(tb.generate, len), partial(tb.watch, [])
    return {
        "name": each("name", *every),
        "trace": each("trace", *every),
        "device": each("device", *loops),
        "read_mode": each("read_mode", *files),
        "paths": [tb.Records.open_npy, lambda path: tb.Tensors.open([path])],
        "path": [lambda path: tb.Writer(path, "int64"), lambda path: tb.watch([]).report().save(path)],
        "indexes": [lambda path: tb.Records.open_indexed("x", path)],
    }


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        ("name read_mode", 3, "wanted a string, found 3$"),
        ("trace path", 3, "wanted a path, .*, found 3$"),
        ("indexes", 3, "wanted a path or a list .* found 3$"),
        ("trace path paths", "", "wanted a path, .*, found ''$"),
        ("name trace path paths indexes read_mode", "\ud800", "wanted .*, found '.ud800': surrogates"),
    ],
)
def test_a_value_that_cannot_be_names_its_argument(
    calls: dict[str, list[Callable[[Any], object]]], names: str, value: Any, message: str
) -> None:
    for name in names.split():
        for call in calls[name]:
            with pytest.raises(TypeError if value == 3 else tb.OptionError, match=f"^{name}: {message}"):
                call(value)


def test_a_trace_that_cannot_be_written(
    calls: dict[str, list[Callable[[Any], object]]], tmp_path: Path
) -> None:
    for call in calls["trace"]:
        with pytest.raises(FileNotFoundError, match="the trace could not be written"):
            call(tmp_path / "missing" / "trace.json")


def test_a_device_that_torch_does_not_know_names_the_option(
    calls: dict[str, list[Callable[[Any], object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in calls["device"]:
        for device in ("cudda", "", 3.5, []):
            with pytest.raises(tb.OptionError) as caught:
                call(device)
            wanted = f'device: wanted a device of torch, such as "cuda:1", found {device!r}'
            assert str(caught.value) == wanted
            assert isinstance(caught.value.__cause__, (RuntimeError, TypeError))
    cuda = torch.device("cuda")
    for there, count, device, message in (
        (None, 0, "cuda", "cuda, found no accelerator"),
        (None, 0, "cuda:1", "cuda:1, found no accelerator"),
        (cuda, 2, "cuda:2", "cuda:2, found 2 of cuda"),
    ):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, on=there: on)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=count: count)
        for call in calls["device"]:
            with pytest.raises(RuntimeError, match=f"^device: wanted {message}$"):
                call(device)


def test_text_that_utf_8_lacks_is_an_option_error(npy: Case, model: tb.Tensors, tmp_path: Path) -> None:
    text, found = "\ud800", ": wanted .*, found '.ud800': surrogates"
    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: tb.stream(model, [[text]]), f"^groups{found}"),
        (lambda: loader_of({text: npy.data}, 2), f"^data{found}"),
        (lambda: tb.Records.open_safetensors(tmp_path / "a.safetensors", text), f"^tensor{found}"),
        (lambda: tb.Records.open_npz(tmp_path / "a.npz", text), f"^array{found}"),
    ]
    refused(tb.OptionError, bad)


def test_records_of_8_bit_floats_have_advice_that_helps(tmp_path: Path) -> None:
    torch_save({"x": torch.ones(4, 2).to(torch.float8_e5m2)}, tmp_path / "a.safetensors")
    data = tb.Records.open_safetensors(tmp_path / "a.safetensors", "x")
    for call in (lambda: data[0], lambda: data.map(len, "int64", (1,)), lambda: data.to("float32")):
        with pytest.raises(TypeError, match=r"use `torch\(\)` of a loader's batch"):
            call()
    torch_save({"x": torch.ones(4, 2).to(torch.bfloat16)}, tmp_path / "b.safetensors")
    halves = tb.Records.open_safetensors(tmp_path / "b.safetensors", "x")
    with pytest.raises(TypeError, match=r'use `to\("float32"\)`$'):
        halves.map(len, "int64", (1,))
    assert halves.to("float32")[0].tolist() == [1, 1]


def test_a_plan_counts_data_sets_and_nothing_else(npy: Case) -> None:
    ten, all = tb.Records.open_npy(npy.data.paths).windows(20, 20), npy.data
    for data, found in (
        ((all, ten), r"found 203 in data\[0\] and 10 in data\[1\]$"),
        ({"x": all, "y": all, "z": ten}, r"found 203 in data\['x'\] and 10 in data\['z'\]$"),
    ):
        with pytest.raises(tb.OptionError, match=f"data: wanted the same number of records, {found}"):
            tb.Plan(data, 2)
    for data, kind in (([all, all], "list: pass a tuple"), ("a.npy", "str")):
        with pytest.raises(TypeError, match=f"data: wanted .*, found a {kind}$"):
            tb.Plan(data, 2)  # type: ignore[arg-type]

    class Listed(list[int]):
        """A data set of its own."""

    assert len(tb.Plan(Listed([1, 2, 3, 4]), 2)) == 2
    assert len(tb.Plan({"x": all, "y": all}, 100)) == len(tb.Plan((all, all), 100)) == 2
    loader = loader_of(MappingProxyType({"x": all, "y": all}), 100)
    assert len(loader) == 2 and set(next(loader.epoch(0)).numpy()) == {"x", "y"}


def test_messages_have_the_names_of_python(tmp_path: Path) -> None:
    four, five = tmp_path / "f32 4.npy", tmp_path / "u8 5.npy"
    np.save(four, np.zeros((3, 4), "float32"))
    np.save(five, np.zeros((3, 5), "uint8"))
    np.save(index := tmp_path / "index.npy", np.arange(3, dtype="int32"))
    (tmp_path / "list.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]")
    fields = np.zeros(3, [("a", "i4"), ("b", "f8")])
    differ = f'"{five}": other records than in "{four}": wanted float32 [4], found uint8 [5]'
    named = "found [('a', '<i4'), ('b', '<f8')]: save each"
    offsets = "found offsets of int32: wanted integers of 64 bits: save it with "
    offsets += "`numpy.save(path, x.astype('<i8'))`"
    bad: list[tuple[Callable[[], object], str]] = [
        (lambda: tb.Records.open_npy([four, five]), re.escape(differ)),
        (lambda: saved(tmp_path / "fields.npy", fields), re.escape(named)),
        (lambda: tb.Records.open_indexed(four, index), re.escape(offsets)),
        (lambda: tb.Tensors.open(tmp_path / "list.safetensors"), "invalid type: sequence, expected a map"),
    ]
    refused((tb.Error, TypeError), bad)
    for content, advice in (
        (
            b"hello world, this is text\n" * 20,
            'tokenize it first, or open it as "uint8" if its bytes are tokens or no text',
        ),
        (b"MMIDIDX\0\0" + bytes(60), "open its `.bin` with `Records.open_megatron`"),
        (
            b"\0\0\x08\x01\0\0\0\x03" + bytes(3),
            "skip its header: `numpy.fromfile(path, 'uint8', offset=8)` for labels, `offset=16` for pictures",
        ),
    ):
        five.write_bytes(content)
        with pytest.raises(tb.FileError, match=f": {re.escape(advice)}$"):
            tb.Records.open_headerless(five, "uint16")


def test_what_the_environment_changes_is_logged_and_shown(
    numbers: Callable[..., tb.Loader], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def told(**options: object) -> tuple[list[str], str]:
        caplog.clear()
        loader = numbers(**options)
        assert sum(1 for _ in loader) == 16
        report, text = loader.report(), repr(loader).removeprefix(f"<Loader: {loader.plan}, ")
        assert text.startswith(f"depth={report.depth}, workers={report.workers}, ") or "name" in options
        return [record.message for record in caplog.records], text

    assert told(depth=None) == ([], "depth=16, workers=1, overlap=True>")
    assert told(depth=2) == ([], "depth=2, workers=1, overlap=True>")
    assert told(depth=3, workers=2) == ([], "depth=3, workers=2, overlap=True>")
    of_overlap = "TWINBUF_OVERLAP of the environment: {}".format
    of_workers = ["TWINBUF_WORKERS of the environment: workers=2 and not 1"]
    of_both = ["TWINBUF_WORKERS of the environment: depth=16 and not 2", *of_workers]
    for switch, value, depth, messages in [
        ("MEMORY", "1GiB", None, ["TWINBUF_MEMORY of the environment: depth=3 and not 16"]),
        ("MEMORY", "1GiB", 2, []),
        ("WORKERS", "1", 2, []),
        ("WORKERS", "2", 2, of_both),
        ("WORKERS", "2", None, of_workers),
        ("OVERLAP", "0", None, [of_overlap("depth=2 and not 16"), of_overlap("overlap=False and not True")]),
    ]:
        monkeypatch.setenv(f"TWINBUF_{switch}", value)
        assert told(depth=depth)[0] == messages
        monkeypatch.delenv(f"TWINBUF_{switch}")
    monkeypatch.setenv("TWINBUF_DEPTH", " 4 ")
    of_depth = "TWINBUF_DEPTH of the environment: depth=4 and not {}"
    assert told(depth=None) == ([of_depth.format(16)], "depth=4, workers=1, overlap=True>")
    assert told(depth=3) == ([of_depth.format(3)], "depth=4, workers=1, overlap=True>")
    assert told(depth=4) == ([], "depth=4, workers=1, overlap=True>")
    monkeypatch.setenv("TWINBUF_VALID_2_DEPTH", "5")
    monkeypatch.setenv("TWINBUF_WORKERS", "2")
    messages, text = told(name="valid-2", depth=None)
    assert messages == [
        "valid-2: TWINBUF_VALID_2_DEPTH of the environment: depth=5 and not 16",
        "valid-2: TWINBUF_WORKERS of the environment: workers=2 and not 1",
    ]
    assert text.endswith("depth=5, workers=2, overlap=True>")
    monkeypatch.setenv("TWINBUF_OVERLAP", "Off")
    messages, text = told(depth=4)
    assert messages == ["TWINBUF_OVERLAP of the environment: overlap=False and not True"]
    assert text == "depth=4, workers=1, overlap=False>"
    device = Late("side")
    assert sum(1 for _ in numbers(device=device)) == 16
    assert device.hosts == 4


def test_a_plan_of_more_records_than_there_are_is_refused() -> None:
    data = Numbers()
    assert [batch.indices.tolist() for batch in tb.Loader(data, tb.Plan(6, 3))] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(tb.OptionError, match="at most the data set's 8 records, found one for 9"):
        tb.Loader(data, tb.Plan(9, 3))


@pytest.mark.parametrize(
    "kind",
    [
        *("read_into", "read_into in turn", "map", "map in turn", "map on a device"),
        *("make", "before", "after", "pin_memory", "to", "state_dict"),
    ],
)
def test_stop_iteration_of_the_programs_code_does_not_end_a_loop_in_silence(kind: str) -> None:
    def call(number: Any, here: str = kind) -> Any:
        return next(iter(())) if here == kind and number == 2 else number

    class Moves:
        """An item that moves to a device."""

        def __init__(self, number: int) -> None:
            self.step = number

        def pin_memory(self) -> Moves:
            return call(self.step, "pin_memory") and self

        def to(self, device: Any, **_: Any) -> Moves:
            return call(self.step, "to") and self

    class Items:
        at = 0

        def __iter__(self) -> Iterator[Moves]:
            for self.at in range(1, 5):
                yield Moves(self.at)

        def state_dict(self) -> int:
            return call(self.at, "state_dict")

        def load_state_dict(self, state: int) -> None: ...

    where = {"overlap": "in turn" not in kind, "device": Late("side") if "device" in kind else None}
    told = kind.split()[0]
    if told == "read_into":
        told = "the data set"
        items = loader_of(Numbers(8, lambda indices: call(indices[0])), 1, **where).epoch(0)
    elif told == "map":
        items = loader_of(Numbers(), 1, map=lambda batch: call(batch.step), **where).epoch(0)
    elif kind in ("make", "before", "after"):
        items = tb.generate(**{"make": int, kind: call})
    else:
        told = {"pin_memory": "code that sends an item", "to": "code that moves an item"}.get(kind, kind)
        items = iter(tb.prefetch(Items(), device=Late("side")))
    # `after` is called for round 2 when the loop asks for round 3, and the items begin with 1.
    first = {"after": [0, 1, 2], "pin_memory": [1], "to": [1], "state_dict": [1]}.get(kind, [0, 1])
    found = [next(items) for _ in first]
    assert [getattr(item, "step", item) for item in found] == first
    with pytest.raises(RuntimeError, match=f"^{told} raised StopIteration") as caught:
        next(items)
    assert isinstance(caught.value.__cause__, StopIteration)
    if told == "the data set":
        assert caught.value.__notes__ == ["epoch 0, step 2: the batch could not be read"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "call", ["close", "epochs", "state_dict", "set_epoch", "next", "report", "__len__", "batch_size"]
)
def test_read_into_cannot_wait_for_its_own_loader(call: str, overlap: bool) -> None:
    def entangled(indices: np.ndarray) -> None:
        if call == "next":
            next(iterator)
        found = getattr(loader, call)
        if call != "batch_size":
            found(*{"epochs": (1,), "set_epoch": (2,)}.get(call, ()))

    def other(indices: np.ndarray) -> None:
        inner = loader_of(Numbers(), 2)
        assert inner.state_dict()["step"] == 0
        assert sum(len(batch) for batch in inner) == 8
        inner.close()

    loader = loader_of(Numbers(8, entangled), 2, overlap=overlap)
    iterator = loader.epochs(1)
    # Without overlap the loop's thread reads, and may ask.
    asks = not overlap and call in ("state_dict", "report", "__len__", "batch_size")
    wanted = contextlib.nullcontext() if asks else pytest.raises(tb.LoaderError, match="code that reads for")
    with wanted:
        next(iterator)
    # Another loader is none of its business.
    assert [batch.step for batch in loader_of(Numbers(8, other), 2)] == [0, 1, 2, 3]


def test_close_raises_what_no_batch_told_of() -> None:
    asked = threading.Event()

    def before(indices: np.ndarray) -> None:
        if 4 in indices:
            asked.set()
            raise LookupError("four")

    data = Numbers(8, before)
    with pytest.raises(LookupError, match="four"), loader_of(data, 4) as loader:
        iterator = loader.epoch(0)
        next(iterator)
        asked.wait()
    # The loop's own exception comes first.
    with pytest.raises(ZeroDivisionError), loader_of(data, 4) as loader:
        iterator = loader.epoch(0)
        next(iterator)
        raise ZeroDivisionError


def test_a_file_error_of_a_process_arrives_whole(tmp_path: Path) -> None:
    with pytest.raises(tb.FileError) as caught:
        tb.Records.open_npy(tmp_path / "missing.npy")
    error = caught.value
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is type(error) and str(copied) == str(error)
        for name in ("errno", "strerror", "filename", "path", "offset", "loader", "epoch", "step"):
            assert getattr(copied, name) == getattr(error, name), name
        assert copied.errno == errno.ENOENT
    assert repr(pickle.loads(pickle.dumps(tb.FileError(2, "no", "x")))) == "FileError(2, 'no')"
