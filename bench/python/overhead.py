"""The cost of Python on top of the Rust loader and of an item of `prefetch`, and whether its threads take the GIL.

    cargo build --release --manifest-path python/Cargo.toml --example native
    python bench/python/overhead.py [--epochs 200] [--rounds 100] [--only overhead|gil]

Overhead: both sides alternately read the epochs of one plan from a file in the page cache, in batches so small that the
batch itself costs little. Python reads them once without using a batch, once as an array, once as a tensor. Prints
microseconds per batch, medians of the epochs with their quartiles, and those of the differences. Then microseconds per
item of `prefetch`, and of two `SimpleQueue`s.

GIL: a thread counts in Python on a separate processor, in short windows that alternate between three cases: batches of
16 MiB are loaded here; in the Rust program, for the same use of the memory and of the other processors; not at all.
Prints medians of the windows and of the differences within a round. If two processors share a core, that alone makes
the second row slower than the third. The loop that receives the batches takes the GIL for each; the reading thread
does not.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import numpy as np
import twinbuf as tb

NATIVE = Path(__file__).parents[2] / "python/target/release/examples/native"
RECORD, BATCH, BATCHES, ITEMS = 64, 16, 2000, 10_000


class Native:
    """The Rust loader in a separate process."""

    def __init__(self, path: Path, record: int, batch: int) -> None:
        command = [NATIVE, path, str(record), str(batch)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def epoch(self) -> int:
        """Read an epoch, and return its nanoseconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def nothing(batch: tb.Batch) -> object:
    """Do not use the batch."""
    return None


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:7.2f} [{low:.2f}, {high:.2f}]"


def overhead(folder: Path, epochs: int) -> None:
    """Print microseconds a batch."""
    path = folder / "small.bin"
    path.write_bytes(bytes(RECORD * BATCH * BATCHES))
    native = Native(path, RECORD, BATCH)
    data = tb.Records.open(path, RECORD)
    plan = tb.Plan(data, BATCH, shuffle=tb.Chunks(BATCH), seed=0)
    uses: dict[str, Callable[[tb.Batch], object]] = {
        "for batch in loader": nothing,
        "batch.numpy()": tb.Batch.numpy,
        "batch.torch()": tb.Batch.torch,
    }
    loaders = {name: tb.Loader(data, plan, depth=3) for name in uses}  # like Rust
    times: dict[str, list[float]] = {"Rust": [], **{name: [] for name in uses}}
    for epoch in range(epochs):
        times["Rust"].append(native.epoch() / 1e3 / BATCHES)
        for name, use in uses.items():
            start = time.perf_counter_ns()
            for batch in loaders[name].epoch(epoch):
                use(batch)
            times[name].append((time.perf_counter_ns() - start) / 1e3 / BATCHES)
    native.close()
    print("microseconds a batch              above Rust, of each epoch")
    for name, values in times.items():
        above = [value - rust for value, rust in zip(values, times["Rust"], strict=True)]
        print(f"{name:20} {spread(values)}   {spread(above)}")


def items(epochs: int) -> None:
    """Print microseconds an item: of numbers, that cost nothing themselves."""

    def simple_queue(depth: int) -> None:
        there: queue.SimpleQueue[int] = queue.SimpleQueue()
        room: queue.SimpleQueue[None] = queue.SimpleQueue()

        def fill() -> None:
            for number in range(ITEMS):
                room.get()
                there.put(number)

        thread = threading.Thread(target=fill)
        thread.start()
        for _ in range(depth):
            room.put(None)
        for _ in range(ITEMS):
            there.get()
            room.put(None)
        thread.join()

    def prefetch(depth: int) -> None:
        for _ in tb.prefetch(range(ITEMS), depth=depth):
            pass

    print("\nmicroseconds an item   depth 1                 2                       4")
    for run in (prefetch, simple_queue):
        cells = []
        for depth in (1, 2, 4):
            times = []
            for _ in range(max(4, epochs // 10)):
                start = time.perf_counter_ns()
                run(depth)
                times.append((time.perf_counter_ns() - start) / 1e3 / ITEMS)
            cells.append(spread(times))
        print(f"{run.__name__:20} {' '.join(cells)}")


class Counter:
    """A thread that counts in Python, on a separate processor."""

    def __init__(self, processor: set[int]) -> None:
        self.counted, self.stop = 0, False
        started = threading.Event()

        def run() -> None:
            os.sched_setaffinity(0, processor)
            started.set()
            while not self.stop:
                for _ in range(1000):
                    pass
                self.counted += 1000

        self.thread = threading.Thread(target=run)
        self.thread.start()
        started.wait()
        assert self.thread.ident is not None
        self.clock = time.pthread_getcpuclockid(self.thread.ident)

    def now(self) -> tuple[float, int, float]:
        return time.perf_counter(), self.counted, time.clock_gettime(self.clock)

    def close(self) -> None:
        self.stop = True
        self.thread.join()


def gil(folder: Path, rounds: int) -> None:
    """Print how fast a thread counts in each of the three cases."""
    path = folder / "large.bin"
    path.write_bytes(bytes(64 << 20))
    data = tb.Records.open(path, 1 << 20)
    first, *others = sorted(os.sched_getaffinity(0))
    # All loading is kept off the processor that counts.
    elsewhere_ = set(others) or {first}
    all_threads = set(os.listdir("/proc/self/task"))
    loader = tb.Loader(data, tb.Plan(data, 16, shuffle=tb.Chunks(16), seed=0))
    for thread in set(os.listdir("/proc/self/task")) - all_threads:
        os.sched_setaffinity(int(thread), elsewhere_)
    native = Native(path, 1 << 20, 16)
    os.sched_setaffinity(native.process.pid, elsewhere_)
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        # The loop itself: short, and another of its priority would have to end before it.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_getparam(0).sched_priority + 1))
    batches = 0

    def here(until: float) -> None:
        nonlocal batches
        while time.perf_counter() < until:
            for _ in loader:
                batches += 1
                if time.perf_counter() >= until:
                    break

    def elsewhere(until: float) -> None:
        while time.perf_counter() < until:
            native.epoch()

    def nowhere(until: float) -> None:
        time.sleep(max(0.0, until - time.perf_counter()))

    counter = Counter({first})
    kinds = {"batches load here": here, "in another process": elsewhere, "nothing loads": nowhere}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    waits: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name in random.sample(list(kinds), len(kinds)):
            nowhere(time.perf_counter() + 0.02)  # the batches read ahead
            start, counts, cpu = counter.now()
            kinds[name](start + 0.1)
            end, counts_then, cpu_then = counter.now()
            rates[name].append((counts_then - counts) / (end - start) / 1e6)
            waits[name].append(100 * (1 - (cpu_then - cpu) / (end - start)))
    counter.close()
    native.close()
    print("\nwhile                 million counts a second     not on its processor, %")
    for name, values in rates.items():
        print(f"{name:20} {spread(values)}   {spread(waits[name])}")
    on = rates["batches load here"]
    for name in ("in another process", "nothing loads"):
        losses = [100 * (1 - b / a) for a, b in zip(rates[name], on, strict=True)]
        print(f"loss against {name!r}, % {spread(losses)}")
    print(f"{batches / rounds / 0.1:.0f} batches of 16 MiB a second; {rounds} rounds of 0.1 s each")


def main() -> None:
    """Print both, or the one of `--only`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", choices=["overhead", "gil"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "gil":
            overhead(Path(folder), options.epochs)
            items(options.epochs)
        if options.only != "overhead":
            gil(Path(folder), options.rounds)
    print(f"\nnumpy {np.__version__}")


if __name__ == "__main__":
    main()
