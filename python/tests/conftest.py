"""Files of seven kinds, what numpy reads from them, and what the tests share."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

import twinbuf as tb

# A shell starts what it runs in the background with Ctrl-C ignored, and Python leaves it at that: tests
# that interrupt would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


class Rewinding:
    """An iterator that begins again at each ``iter()``. Its items are 1 to ``last``."""

    def __init__(self, last: int = 5) -> None:
        self.last = last

    def __iter__(self) -> Rewinding:
        self.next = 0
        return self

    def __next__(self) -> int:
        self.next += 1
        if self.next > self.last:
            raise StopIteration
        return self.next


def run_program(code: str, *arguments: object, **options: Any) -> tuple[int, str, str]:
    """Run the code in a process of its own. Return its exit code, its output and its errors."""
    command = [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    options = {"capture_output": True, "text": True, "timeout": 500, "env": environment} | options
    done = subprocess.run(command, **options)
    return done.returncode, done.stdout, done.stderr


def in_a_fork(run: Callable[[], int]) -> int:
    """Return the exit code of a forked child: what the function returns, or 1 if it raises."""
    with warnings.catch_warnings(action="ignore"):  # of the threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = run()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call the function in so many threads at once, with the number of each. Raises what one raises."""
    begin = threading.Barrier(count)

    def start(number: int) -> None:
        begin.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(start, range(count)))


def refused(error: Any, calls: Iterable[tuple[Callable[[], object], str]]) -> None:
    """Assert that each call raises the error, with a message in which the pattern is found."""
    for call, message in calls:
        try:
            call()
        except error as caught:
            assert re.search(message, str(caught)), (message, str(caught))
        else:
            pytest.fail(f"nothing was raised; wanted {message}")


def copies(thing: Any) -> list[Any]:
    return [pickle.loads(pickle.dumps(thing)), copy.copy(thing), copy.deepcopy(thing)]


def spans(trace: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the spans in the file, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in json.loads(trace.read_text()):
        if event["ph"] == "X":
            found.setdefault(event["name"], []).append(event)
    return found


def wait_for_threads() -> None:
    """Wait until no thread of `prefetch` or `generate` is left."""
    tasks = Path("/proc/self/task")

    def left() -> list[str]:
        names = []
        for task in tasks.iterdir():
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text())
        return [name for name in names if name.startswith("twinbuf-") and name[8:12] in ("pref", "gene")]

    while tasks.exists() and left():
        gc.collect()
        time.sleep(0.001)


@contextlib.contextmanager
def no_forced_switch() -> Iterator[None]:
    """Let the running thread keep the GIL until it waits for something."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


FORMATS = ("raw", "headerless", "llm_c", "npy", "npy_windows", "safetensors", "two_files")


@dataclass
class Case:
    data: tb.Records
    # Record by record, as numpy reads them.
    records: np.ndarray


def saved(path: Path, array: np.ndarray) -> tb.Records:
    np.save(path, array)
    return tb.Records.open_npy(path)


def indexed(folder: Path, records: Iterable[bytes]) -> tb.Records:
    """Records of any length."""
    texts = list(records)
    (folder / "ragged.bin").write_bytes(b"".join(texts))
    np.save(folder / "ragged.npy", np.cumsum([0, *map(len, texts)]))
    return tb.Records.open_indexed(folder / "ragged.bin", folder / "ragged.npy")


def windows(rows: np.ndarray, size: int, stride: int) -> np.ndarray:
    starts = range(0, len(rows) - size + 1, stride)
    return np.stack([rows[start : start + size] for start in starts])


def make(folder: Path, kind: str) -> Case:
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 50_000, 3001).astype(np.uint16)
    rows = rng.standard_normal((203, 3, 5)).astype(np.float32)
    path = folder / f"{kind}.bin"
    if kind == "raw":
        rows.tofile(path)
        return Case(tb.Records.open(path, 60), rows.view(np.uint8).reshape(203, 60))
    if kind == "headerless":
        tokens.tofile(path)
        data = tb.Records.open_headerless(path, "uint16").windows(17, 16)
        return Case(data.to("uint16"), windows(tokens, 17, 16))
    if kind == "llm_c":
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, len(tokens)
        path.write_bytes(header.tobytes() + tokens.tobytes())
        return Case(tb.Records.open_llm_c(path).windows(33, 32).to("uint16"), windows(tokens, 33, 32))
    if kind == "npy":
        return Case(saved(folder / "a.npy", rows), rows)
    if kind == "npy_windows":
        return Case(saved(folder / "a.npy", rows).windows(4, 3), windows(rows, 4, 3))
    if kind == "safetensors":
        save_file({"x": rows, "y": np.arange(203)}, folder / "a.safetensors")
        return Case(tb.Records.open_safetensors(folder / "a.safetensors", "x"), rows)
    assert kind == "two_files"
    np.save(folder / "part-9.npy", rows[:100])
    np.save(folder / "part-10.npy", rows[100:])
    return Case(tb.Records.open_npy(f"{folder}/part-*.npy"), rows)


@pytest.fixture(params=FORMATS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return make(tmp_path, request.param)


@pytest.fixture
def npy(tmp_path: Path) -> Case:
    """203 records of shape (3, 5), float32."""
    return make(tmp_path, "npy")


def model_of(folder: Path, tensors: dict[str, torch.Tensor]) -> tb.Tensors:
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return tb.Tensors.open(folder / "model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> tb.Tensors:
    """One tensor `a`, of three numbers."""
    return model_of(tmp_path, {"a": torch.zeros(3, dtype=torch.float64)})


@pytest.fixture
def numbers(tmp_path: Path) -> Callable[..., tb.Loader]:
    """Loaders of 64 records, each four times its own number, in batches of 4.

    They have few slots: each is used again. `depth=None` asks for the default number.
    """
    data = saved(tmp_path / "numbers.npy", np.repeat(np.arange(64, dtype=np.int64)[:, None], 4, axis=1))

    def loader(**options: object) -> tb.Loader:
        shuffle = options.pop("shuffle", "full")
        plan = tb.Plan(data, 4, shuffle=shuffle, seed=None if shuffle is None else 5)
        few = 2 + options.get("workers", 1) if options.get("overlap", True) else 2
        return tb.Loader(data, plan, **{"depth": few, **options})

    return loader


def every_dtype(folder: Path) -> list[tuple[torch.dtype, Path]]:
    """A safetensors file for each of most types that torch and the format share."""
    files = []
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32),
        *(torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    ):
        path = folder / f"{dtype}.safetensors"
        safetensors.torch.save_file({"x": torch.arange(24).remainder(2).reshape(6, 4).to(dtype)}, path)
        files.append((dtype, path))
    return files
