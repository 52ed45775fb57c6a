"""`Writer`: what it writes, read back by numpy and `Records`; errors, threads, forks, interrupts, exits."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import in_a_fork, in_threads, run_program, saved
from interrupts import handled
from late import Late
from sets import loader_of

import twinbuf as tb

TYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32"),
    *("uint64", "int64", "float64", "complex64", "complex128"),
)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("seed", range(40))
def test_numpy_reads_what_random_programs_write(tmp_path: Path, seed: int) -> None:
    draws = np.random.default_rng(seed)
    dtype = TYPES[seed % len(TYPES)]
    row = tuple(int(axis) for axis in draws.integers(1, 9, draws.integers(0, 5)))
    item = int(np.prod(row, initial=1)) * np.dtype(dtype).itemsize
    shards = None if seed % 3 else 4096 * item + int(draws.integers(0, 100_000))
    options = {"depth": int(draws.integers(1, 4)), "slot_bytes": int(draws.integers(0, 40_000))}
    arrays = []
    with tb.Writer(tmp_path / "x.npy", dtype, row, shard_bytes=shards, **options) as out:
        for _ in range(draws.integers(0, 20)):
            shape = (int(draws.integers(0, 1 + 50_000 // item)), *row)
            array = np.frombuffer(draws.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype)
            array = (array != 0).reshape(shape) if dtype == "bool" else array.reshape(shape)
            arrays.append(array)
            out.append(np.asfortranarray(array) if draws.integers(0, 2) else array)
    files = [tmp_path / "x.npy"] if shards is None else sorted((tmp_path / "x.npy").iterdir())
    found = np.concatenate([np.load(file) for file in files])
    wanted = np.concatenate([np.empty((0, *row), dtype), *arrays])
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()
    if len(wanted):
        assert len(tb.Records.open_npy(tmp_path / "x.npy")) == len(wanted)
    assert names(tmp_path) == ["x.npy"]


def test_tensors_and_numbers(tmp_path: Path) -> None:
    with tb.Writer(str(tmp_path / "x.npy"), torch.float32, (3,)) as out:
        out.append(torch.ones(2, 3, requires_grad=True))
        out.append(torch.arange(12.0).reshape(3, 4).T)
    assert np.load(tmp_path / "x.npy")[2:].tolist() == torch.arange(12.0).reshape(3, 4).T.tolist()
    out = tb.Writer(tmp_path / "x.npy", np.int64)
    out.append([1, 2, 3])
    line = out.finish()
    assert line.startswith("3 rows, 24 B, 1 files in ") and out.finish() == line
    assert np.load(tmp_path / "x.npy").tolist() == [1, 2, 3]
    out.discard()
    with pytest.raises(tb.LoaderError, match="has ended"):
        out.append([4])
    assert np.load(tmp_path / "x.npy").tolist() == [1, 2, 3]


def test_records_and_batches_are_appended_as_arrays(tmp_path: Path) -> None:
    """`Records` have a `shape`: that of one record."""
    rows = np.arange(12, dtype="float32").reshape(4, 3)
    for array in (rows, rows[:, 0], rows.reshape(4, 3, 1)):
        data = saved(tmp_path / "a.npy", array)
        with tb.Writer(tmp_path / "x.npy", "float32", array.shape[1:]) as out:
            out.append(data)
            for batch in loader_of(data, 2):
                out.append(batch)
        assert np.array_equal(np.load(tmp_path / "x.npy"), np.concatenate([array, array]))


def written_from(device: Late, path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether rows made on a device, and some on the host, are all in the file, in order."""

    def home(rows: object) -> Late | None:
        return device if isinstance(rows, torch.Tensor) and device.owns(rows) else None

    monkeypatch.setattr("twinbuf._write.home", home)
    made = [torch.full((n % 5, 3), float(n)) for n in range(2, 30)]
    with tb.Writer(path, "float32", (3,)) as out:
        for n, rows in enumerate(made):
            if n % 11 == 10:
                out.append(rows.numpy())
                continue
            tensor = device.empty_like(rows)
            device.copy(tensor, rows)
            out.append(tensor)
            device.copy(tensor, torch.zeros_like(rows))  # of no consequence for what was appended
            del tensor  # its memory is reused for the next one
    return bool((np.load(path) == torch.cat(made).numpy()).all())


@pytest.mark.parametrize("eager", ["main", "side", ""])
def test_tensors_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager: str) -> None:
    assert written_from(Late(eager), tmp_path / "x.npy", monkeypatch)


@pytest.mark.parametrize(("edge", "eager"), [("start", "side"), ("slot", ""), ("keep", "main")])
def test_no_edge_of_a_copy_from_a_device_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: str, eager: str
) -> None:
    assert not written_from(Late(eager, edge), tmp_path / "x.npy", monkeypatch)


def test_a_loop_waits_for_the_copy_before_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Late("")
    monkeypatch.setattr("twinbuf._write.home", lambda rows: device)
    with tb.Writer(tmp_path / "x.npy", "float32", (3,)) as out:
        for n in range(4):
            tensor = device.empty_like(torch.empty(1, 3))
            device.copy(tensor, torch.full((1, 3), float(n)))
            out.append(tensor)
            assert device.sides[0].enqueued - device.sides[0].done == 2 * min(n + 1, 2)
        with pytest.raises(TypeError, match="found float64"):
            out.append(torch.zeros(1, 3, dtype=torch.float64))
    assert np.load(tmp_path / "x.npy").tolist() == [[n] * 3 for n in range(4)]


def test_ctrl_c_in_a_copy_from_a_device_loses_no_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, cuts = Late("side"), [3]
    monkeypatch.setattr("twinbuf._write.home", lambda rows: device)

    class Cut(deque):  # type: ignore[type-arg]
        def append(self, sent: object) -> None:
            if cuts and cuts.pop():
                raise KeyboardInterrupt
            super().append(sent)

    with tb.Writer(tmp_path / "x.npy", "int64") as out:
        for number in range(6):
            tensor = device.empty_like(torch.empty(1, dtype=torch.int64))
            device.copy(tensor, torch.tensor([number]))
            if number == 3:
                assert out._download is not None
                out._download.late = Cut(out._download.late)
            with contextlib.suppress(KeyboardInterrupt):
                out.append(tensor)
    assert np.load(tmp_path / "x.npy").tolist() == [0, 1, 2, 4, 5]


def test_refused(tmp_path: Path) -> None:
    out = tb.Writer(tmp_path / "x.npy", "float32", (3,))
    ones = np.ones((2, 4), "float32")
    for rows in (np.ones((2, 3)), ones, ones[0, :3], np.float32(1), [[1, 2, 3]]):
        with pytest.raises(TypeError, match=r"wanted an array of float32 of shape \(n, 3\), found"):
            out.append(rows)
    with pytest.raises(tb.FileError, match="another writer"):
        tb.Writer(tmp_path / "x.npy", "float32")
    del out
    assert names(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        tb.Writer(tmp_path / "no" / "x.npy", "float32")


def test_masked_values_are_refused(tmp_path: Path) -> None:
    """What is behind the mask was written."""
    rows = np.ma.masked_array(np.arange(3), [False, True, False])
    with tb.Writer(tmp_path / "x.npy", "int64") as out:
        with pytest.raises(TypeError, match="rows: wanted an array without masked values"):
            out.append(rows)
        out.append(rows.filled(7))
        out.append(rows[:1])
    assert np.load(tmp_path / "x.npy").tolist() == [0, 7, 2, 0]


def test_an_exception_discards_the_file_as_discard_does(tmp_path: Path) -> None:
    with tb.Writer(tmp_path / "x.npy", "float32", (3,)) as out:
        out.append(np.ones((2, 3), "float32"))
        out.discard()
    assert names(tmp_path) == []
    (tmp_path / "x.npy").write_text("before")
    with pytest.raises(KeyError), tb.Writer(tmp_path / "x.npy", "float32", (3,)) as out:
        out.append(np.ones((2000, 3), "float32"))
        raise KeyError
    assert names(tmp_path) == ["x.npy"] and (tmp_path / "x.npy").read_text() == "before"
    with pytest.raises(tb.LoaderError, match="has ended"):
        out.finish()


def test_a_copy_from_a_device_that_fails_at_the_end_discards_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Late("")
    monkeypatch.setattr("twinbuf._write.home", lambda rows: device)
    with pytest.raises(RuntimeError, match="illegal"), tb.Writer(tmp_path / "x.npy", "int64") as out:
        out.append(device.empty_like(torch.empty(2, dtype=torch.int64)))

        def synchronize(*_: object) -> None:
            raise RuntimeError("an illegal memory access")

        assert out._download is not None
        monkeypatch.setattr(type(out._download.late[0][0]), "synchronize", synchronize)
    assert names(tmp_path) == []


@pytest.mark.parametrize("end", ["finish", "discard"])
def test_a_tensor_on_a_device_after_the_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    device = Late("")
    monkeypatch.setattr("twinbuf._write.home", lambda rows: device)
    out = tb.Writer(tmp_path / "x.npy", "int64")
    getattr(out, end)()
    with pytest.raises(tb.LoaderError, match="has ended"):
        out.append(device.empty_like(torch.empty(2, dtype=torch.int64)))


def test_a_tensor_that_a_thread_appends_while_another_finishes_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Late("")
    monkeypatch.setattr("twinbuf._write.home", lambda rows: device)
    tensor = device.empty_like(torch.empty(2, dtype=torch.int64))
    out = tb.Writer(tmp_path / "x.npy", "int64")
    out.append(tensor)
    writer = out._writer

    class Between:
        """Another thread appends after the rows of this one, before the end."""

        append_first = writer.append_first

        def finish(self) -> str:
            in_threads(1, lambda _: out.append(tensor))
            return writer.finish()

    out._writer = Between()
    out.finish()
    assert len(np.load(tmp_path / "x.npy")) == 4


def test_threads_append_whole_arrays(tmp_path: Path) -> None:
    with tb.Writer(tmp_path / "x.npy", "int64", (2,), slot_bytes=0) as out:

        def append(thread: int) -> None:
            for number in range(300):
                out.append(np.full((7, 2), 1000 * thread + number))

        in_threads(4, append)
    found = np.load(tmp_path / "x.npy").reshape(-1, 14)
    assert (found == found[:, :1]).all()
    for thread in range(4):
        of_thread = found[found[:, 0] // 1000 == thread, 0]
        assert of_thread.tolist() == [1000 * thread + number for number in range(300)]


def test_a_limit_on_files_is_an_error_with_path_and_offset(tmp_path: Path) -> None:
    code = """
import errno, resource, numpy, twinbuf as tb
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
errors = []
try:
    with tb.Writer("x.npy", "uint8", (1000,), slot_bytes=0) as out:
        for _ in range(200):
            out.append(numpy.ones((1, 1000), "uint8"))
except tb.FileError as error:
    errors.append(error)
assert [(error.path.name, error.offset, error.errno) for error in errors] == [("x.npy", 100_000, errno.EFBIG)]
"""
    assert run_program(code, cwd=tmp_path) == (0, "", "")
    assert names(tmp_path) == []


def test_a_forked_process_is_told(tmp_path: Path) -> None:
    out = tb.Writer(tmp_path / "x.npy", "int64")
    out.append([1, 2])

    def refuses() -> int:
        with pytest.raises(tb.ForkedError):
            out.append([3])
        out.discard()
        return 7

    assert in_a_fork(refuses) == 7
    out.append([4])
    out.finish()
    assert np.load(tmp_path / "x.npy").tolist() == [1, 2, 4]


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0", "thread()", "daemon()"])
def test_the_end_of_the_program_leaves_nothing(tmp_path: Path, end: str) -> None:
    code = f"""
import threading, numpy, twinbuf as tb
out = tb.Writer("x.npy", "int64", (1000,))
cycle = [out]
cycle.append(cycle)
rows = numpy.ones((100, 1000), int)
begun = threading.Event()
def append(number):
    for _ in range(number):
        out.append(rows)
        begun.set()
def thread():
    threading.Thread(target=append, args=(50,)).start()
def daemon():
    threading.Thread(target=append, args=(10**9,), daemon=True).start()
    begun.wait()
out.append(rows)
{end}
"""
    status, _, errors = run_program(code, cwd=tmp_path)
    assert status == {"raise SystemExit(3)": 3, "1 / 0": 1}.get(end, 0), errors
    assert names(tmp_path) == []


@pytest.mark.parametrize("end", ["", "del out", "out.discard()", "daemon()"])
def test_a_disk_that_hangs_is_left(tmp_path: Path, end: str) -> None:
    """The disk: who opens the first shard waits while the program has a lease of it (fcntl(2))."""
    code = f"""
import fcntl, os, signal, threading, time, numpy, twinbuf as tb
signal.signal(signal.SIGIO, signal.SIG_IGN)  # it says that another waits for the lease
out = tb.Writer("x", "uint8", (4096,), slot_bytes=0, shard_bytes=1 << 20)
first = os.open(os.listdir(".")[0] + "/00000.npy", os.O_CREAT | os.O_RDWR)
try:
    fcntl.fcntl(first, fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError as error:
    raise SystemExit(f"no leases: {{error}}")
begun = threading.Event()
def append():
    begun.set()
    out.append(numpy.ones((9, 4096), "uint8"))
def daemon():
    threading.Thread(target=append, daemon=True).start()
    begun.wait()
out.append(numpy.ones((3, 4096), "uint8"))
while fcntl.fcntl(first, fcntl.F_GETLEASE) == fcntl.F_WRLCK:
    time.sleep(0.001)
{end}
"""
    status, _, errors = run_program(code, cwd=tmp_path)
    if "no leases: " in errors:  # EINVAL; of NFS and CIFS EAGAIN
        pytest.skip(errors)
    assert status == 0, errors
    assert len(names(tmp_path)) == 1
    tb.Writer(tmp_path / "x", "uint8").discard()
    assert names(tmp_path) == []


# More: TWINBUF_INTERRUPTS=10000.
def test_interrupts_lose_and_double_nothing(tmp_path: Path) -> None:
    wanted = int(os.environ.get("TWINBUF_INTERRUPTS", "300"))
    out = tb.Writer(tmp_path / "x.npy", "int64", (500,), slot_bytes=0)
    appended, unsure, interrupts = [], [], 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    number = 0
    # Suppressed: one that comes in the `finally`.
    with handled(signal.SIGALRM, interrupt), contextlib.suppress(KeyboardInterrupt):
        while interrupts < wanted:
            number += 1
            state = unsure
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + number % 50 * 1e-6)
                out.append(np.full((1, 500), number))
                state = appended
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                state.append(number)
    out.finish()
    found = np.load(tmp_path / "x.npy")
    assert (found == found[:, :1]).all()
    found = found[:, 0].tolist()
    assert found == sorted(set(found))
    assert set(appended) <= set(found) <= set(range(1, number + 1))


def test_bytes_have_no_header(tmp_path: Path) -> None:
    with tb.Writer(tmp_path / "x", None, (5,)) as out:
        out.append(np.arange(10, dtype="uint8").reshape(2, 5))
    assert (tmp_path / "x").read_bytes() == bytes(range(10))


def test_finish_once_more_after_ctrl_c_returns_what_it_would_have(tmp_path: Path) -> None:
    out = tb.Writer(tmp_path / "x.npy", "float32", (3,))
    out.append(np.ones((5, 3), "float32"))
    writer = out._writer

    class Interrupted:
        def finish(self) -> str:
            writer.finish()
            out._writer = writer
            raise KeyboardInterrupt

    out._writer = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        out.finish()
    assert np.load(tmp_path / "x.npy").shape == (5, 3)
    told = out.finish()
    assert told and out.finish() == told
    out.discard()
    assert out.finish() == told and names(tmp_path) == ["x.npy"]
    with pytest.raises(tb.LoaderError, match="has ended"):
        out.append(np.ones((5, 3), "float32"))


def test_calls_after_a_finish_that_failed_say_why(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    out = tb.Writer(tmp_path / "a" / "x.npy", "float32", (3,))
    out.append(np.ones((5, 3), "float32"))
    (tmp_path / "a").rename(tmp_path / "b")
    for call in (out.finish, out.finish, lambda: out.append(np.ones((5, 3), "float32")), out.finish):
        with pytest.raises(tb.FileError) as caught:
            call()
        assert caught.value.path == tmp_path / "a" / "x.npy" and caught.value.errno == errno.ENOENT
    out.discard()
    with pytest.raises(tb.FileError):
        out.finish()
