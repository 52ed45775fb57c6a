"""Foreign code that never returns: whatever ends the program does so, and Ctrl-C is delivered."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from conftest import in_threads, run_program
from sets import Gated, Numbers, loader_of

import twinbuf as tb
from twinbuf import _drive, _loop

DROPPED = """
import atexit, contextlib, threading
from late import Late
from sets import Gated, Numbers, loader_of

within = []

@atexit.register
def check():  # before twinbuf is imported, so called after its own: the interpreter takes no more threads
    assert not within, "a thread is left in the loop that a device has it in"

forever, reading, sending, left, dropped = (threading.Event() for _ in range(5))

def before(indices):
    if indices[0] == 4:
        reading.set()
        forever.wait()

class Held(Late):
    # Sends the second batch when the program has let go of the loader.
    @contextlib.contextmanager
    def using(self, stream):
        within.append(None)
        with super().using(stream):
            yield
        within.pop()

    def copy(self, out, tensor):
        if tensor.flatten()[0] == 2:
            sending.set()
            left.wait()
        super().copy(out, tensor)

    def _release(self, *arguments):
        super()._release(*arguments)
        dropped.set()

loader = loader_of(Numbers(100, before), 2, device=Held("side"))
items = loader.epochs(1)
first = next(items)
reading.wait()
sending.wait()
assert within
del loader, items
left.set()
dropped.wait()  # the second batch: the thread drops the loader next
"""


def test_the_exit_waits_for_a_thread_that_drops_the_loader() -> None:
    """A program ends while its last thread waits in the drop of a loader."""
    assert run_program(DROPPED) == (0, "", "")


STARVED = """
import os, threading
import numpy as np
from sets import Gated, Numbers, loader_of

inside, numbers = threading.Event(), np.random.default_rng(0).random(400_000)

def before(indices):
    if indices[0] == 4:
        os.sched_setaffinity(0, {CPU})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        inside.set()
        np.sort(numbers)  # without the GIL

items = loader_of(Numbers(8, before), 2).epochs(1)
next(items)
inside.wait()
"""


def test_a_thread_with_a_small_share_of_a_processor_does_not_keep_a_program_from_its_end() -> None:
    processor = min(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        for program in busy:
            os.sched_setaffinity(program.pid, {processor})
        assert run_program(STARVED.replace("CPU", str(processor))) == (0, "", "")
    finally:
        for program in busy:
            program.kill()
            program.wait()


KEPT = """
import atexit, threading
kept, inside, go = [], threading.Event(), threading.Event()
atexit.register(lambda: print(kept[0].sum()))  # before twinbuf's own, so called after it
import numpy as np
import twinbuf as tb
from sets import Numbers

class Data(Numbers):
    shape = (1 << 19,)

    def read_into(self, indices, out):
        np.asarray(out)[:] = 1
        if indices[0] == 2:
            kept.append(np.asarray(out))
            inside.set()
            go.wait()

data = Data()
loader = tb.Loader(data, tb.Plan(data, 2))
batches = loader.epochs(1)
next(batches)
inside.wait()
try:
    loader.close(timeout=0)
except tb.LoaderTimeoutError:
    go.set()
"""


def test_a_close_does_not_free_what_a_read_in_progress_keeps() -> None:
    """The read kept an array of its slot after the close had begun, which freed the slot."""
    assert run_program(KEPT) == (0, f"{2 << 19}\n", "")


def test_a_wait_with_a_limit_says_what_is_read_and_loses_nothing() -> None:
    data = Gated(4)
    loader = loader_of(data, 2, name="train")
    assert loader.reading() is None
    items = loader.epochs(1, timeout=0.05)
    steps = [next(items).step, next(items).step]
    for _ in range(2):
        with pytest.raises(TimeoutError, match="train: epoch 0, step 2: loading for") as caught:
            next(items)
        assert isinstance(caught.value, tb.LoaderTimeoutError)
        assert (caught.value.loader, caught.value.epoch, caught.value.step) == ("train", 0, 2)
    reading = loader.reading()
    assert reading is not None and (reading["epoch"], reading["step"]) == (0, 2)
    assert reading["seconds"] > 0
    data.go.set()
    for batch in items:
        steps.append(batch.step)
    assert steps == [0, 1, 2, 3]
    loader.close(timeout=5)
    for timeout in (-1, float("nan")):
        with pytest.raises(tb.OptionError, match="timeout"):
            loader.epochs(1, timeout=timeout)
    with pytest.raises(TypeError, match="timeout: wanted a number"):
        loader.close(timeout="1")


@pytest.mark.parametrize("options", [{}, {"map": lambda batch: batch}], ids=["loader", "map"])
def test_each_thread_of_a_shared_iterator_waits_as_long_as_the_limit(options: Any) -> None:
    """However long another has waited: this one's wait begins later, by about half of the limit."""
    data = Gated(4)
    items = loader_of(data, 4, **options).epochs(1, timeout=0.25)
    next(items)
    waited = []

    def wait(number: int) -> None:
        time.sleep(number / 8)
        since = time.monotonic()
        with pytest.raises(tb.LoaderTimeoutError):
            next(items)
        waited.append(time.monotonic() - since)

    in_threads(2, wait)
    data.go.set()
    assert len(waited) == 2 and min(waited) >= 0.25
    assert [batch.step for batch in items] == [1]


def test_without_overlap_the_limit_counts_no_read_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    past, waits = 0, threading.Event()

    def before(indices: Any) -> None:
        nonlocal past
        if indices[0] == 1:
            assert waits.wait(300)
            past += 1000

    def sleep(seconds: float) -> None:  # in the line behind the thread that reads
        waits.set()
        time.sleep(seconds)

    monkeypatch.setattr(_loop, "monotonic", lambda: past + time.monotonic())
    monkeypatch.setattr(_drive, "sleep", sleep)
    items = loader_of(Numbers(4, before), 1, overlap=False, depth=2).epochs(1, timeout=500)
    kept = [next(items)]
    # One of the two waits for the other one's read, and then for a slot, all of which are kept.
    in_threads(2, lambda _: kept.append(next(items)))
    assert sorted(batch.step for batch in kept) == [0, 1, 2]


def test_close_with_a_limit_leaves_the_thread_behind() -> None:
    data = Gated(4)
    loader = loader_of(data, 2)
    items = loader.epochs(1)
    batch = next(items)
    next(items)
    while loader.reading() is None:
        pass
    with pytest.raises(tb.LoaderTimeoutError, match="epoch 0, step 2"):
        loader.close(timeout=0)
    loader.close()
    with pytest.raises(tb.LoaderError, match="closed"):
        next(items)
    assert batch.numpy().ravel().tolist() == [0, 1]
    data.go.set()
