"""What Python costs beside the Rust loader, and whether its threads take the GIL.

    cargo build --release --manifest-path python/Cargo.toml --example native
    python bench/python/overhead.py [--epochs 200]

Overhead: both sides read the epochs of one plan in turn from a file in the page cache, in batches so small that the
batch itself costs little. In Python once without looking at a batch, once as an array, once as a tensor. Printed:
microseconds a batch, medians of the epochs with their quartiles, and the medians of the differences.

GIL: a thread counts in Python while batches of 16 MiB load here; and, for the same use of processors and memory, while
the Rust program loads them in a process of its own. Medians of the rounds, and of the differences within a round.
"""

from __future__ import annotations

import argparse
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
RECORD, BATCH, BATCHES = 64, 16, 2000


class Native:
    """The Rust loader in a process of its own."""

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
    """Leave the batch alone."""
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
    loaders = {name: tb.Loader(data, plan) for name in uses}
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


def gil(folder: Path, rounds: int) -> None:
    """Print how fast a thread counts beside what."""
    path = folder / "large.bin"
    path.write_bytes(bytes(64 << 20))
    data = tb.Records.open(path, 1 << 20)
    loader = tb.Loader(data, tb.Plan(data, 16, shuffle=tb.Chunks(16), seed=0))
    native = Native(path, 1 << 20, 16)

    def here(until: float) -> None:
        while time.perf_counter() < until:
            for _ in loader:
                pass

    def elsewhere(until: float) -> None:
        while time.perf_counter() < until:
            native.epoch()

    def count(beside: Callable[[float], None]) -> float:
        counted, stop = 0, False

        def counting() -> None:
            nonlocal counted
            while not stop:
                for _ in range(1000):
                    pass
                counted += 1000

        thread = threading.Thread(target=counting)
        start = time.perf_counter()
        thread.start()
        beside(start + 0.25)
        stop = True
        seconds = time.perf_counter() - start
        thread.join()
        return counted / seconds / 1e6

    beside = {"batches load elsewhere": elsewhere, "batches load here": here}
    rates: dict[str, list[float]] = {name: [] for name in beside}
    for number in range(rounds):
        for name in sorted(beside, reverse=number % 2 == 0):
            rates[name].append(count(beside[name]))
    native.close()
    print("\nmillion counts a second while")
    for name, values in rates.items():
        print(f"{name:24} {spread(values)}")
    first, second = rates.values()
    print(f"loss, %                  {spread([100 * (1 - b / a) for a, b in zip(first, second, strict=True)])}")


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overhead(Path(folder), options.epochs)
        gil(Path(folder), options.rounds)
    print(f"\nnumpy {np.__version__}")


if __name__ == "__main__":
    main()
