#!/usr/bin/env python3
"""How close `prefetch` comes to perfect overlap, and whether `watch` predicts it.

    python bench/python/overlap.py [--steps 200] [--rounds 5] [--ms 10] [--only REGEX]

Each round runs a loop unchanged, measured by `watch`, and then with `prefetch`, measured again. Loads and uses are
sleeps (like waiting for a network or a device), reads of a file that is not in the page cache, or work on a processor
that releases the GIL. Columns, medians of the rounds with their quartiles:

- `wall / longest`: the loop with `prefetch`, over the longer of all loads and all uses of the unchanged loop.
- `wall / longest, same run`: the same over the loads and uses as measured while they overlapped, in the same run. The
  remainder is the cost of the overlap: hand-offs, and the first load.
- `wall / free`: the loop with `prefetch`, over two threads that do all loads and uses without a hand-off. If both use a
  processor, this is the limit of the processors: other programs, or a shared core, slow both down.
- `predicted`: the speedup that `watch` predicted for `prefetch`. `reached`: the actual speedup.
- `off %`: how far that is from the prediction, in each round: below 0 where more was promised than reached.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from statistics import quantiles

import torch
import twinbuf as tb
from torch.utils.data import DataLoader, Dataset

Work = Callable[[float], None]
BLOCK = bytes(1 << 20)


def calibrate() -> float:
    """Return the number of blocks that a processor hashes in a second."""
    best = 0.0
    for _ in range(20):
        start = time.perf_counter()
        hashing(16)
        best = max(best, 16 / (time.perf_counter() - start))
    return best


def hashing(blocks: int) -> None:
    digest = hashlib.sha256()
    for _ in range(blocks):
        digest.update(BLOCK)  # without the GIL


def free(load: Work, loads: list[float], use: Work, seconds: float) -> float:
    """Return the time of all loads and all uses in two threads that do not wait for each other."""

    def all_loads() -> None:
        for each in loads:
            load(each)

    thread = threading.Thread(target=all_loads)
    start = time.perf_counter()
    thread.start()
    for _ in loads:
        use(seconds)
    thread.join()
    return time.perf_counter() - start


class Items(Dataset[torch.Tensor]):
    def __init__(self, work: Work, seconds: list[float]) -> None:
        self.work, self.seconds = work, seconds

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.work(self.seconds[index])
        return torch.tensor(index)


def generator(work: Work, seconds: list[float]) -> Iterable[int]:
    class Again:
        def __iter__(self) -> Iterator[int]:
            for number, each in enumerate(seconds):
                work(each)
                yield number

    return Again()


def loader(work: Work, seconds: list[float]) -> Iterable[torch.Tensor]:
    return DataLoader(Items(work, seconds), batch_size=None)


def loop(items: Iterable[object], work: Work, seconds: float) -> float:
    start = time.perf_counter()
    for _ in items:
        work(seconds)
    return time.perf_counter() - start


class Disk:
    """A file on the disk of TMPDIR, read without the page cache, like a first read."""

    def __init__(self, folder: str, mib: int) -> None:
        self.path, self.size = os.path.join(folder, "data"), mib << 20
        with open(self.path, "wb") as file:
            for _ in range(mib):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        self.file = os.open(self.path, os.O_RDONLY)
        self.out = bytearray(1 << 20)
        self.at = 0

    def read(self, mib: float) -> None:
        for _ in range(round(mib)):
            os.preadv(self.file, [self.out], self.at)
            os.posix_fadvise(self.file, self.at, 1 << 20, os.POSIX_FADV_DONTNEED)
            self.at = (self.at + (1 << 20)) % self.size


def spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, default=10.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    blocks_a_second = calibrate()

    def spin(seconds: float) -> None:
        hashing(round(seconds * blocks_a_second))

    ms, steps = options.ms / 1e3, options.steps
    even, uneven = [ms] * steps, [ms / 2, 3 * ms / 2] * (steps // 2)
    folder = tempfile.TemporaryDirectory()
    disk = Disk(folder.name, 64)
    start = time.perf_counter()
    disk.read(64)
    # As many MiB as can be read in the time of a step, and a use of the same duration.
    rate = 64 / (time.perf_counter() - start)
    mib = max(1, round(ms * rate))
    blocks = [float(mib)] * steps
    cases: list[tuple[str, Callable[[Work, list[float]], Iterable[object]], Work, Work, list[float], float]] = [
        ("generator, sleep", generator, time.sleep, time.sleep, even, ms),
        ("DataLoader, sleep", loader, time.sleep, time.sleep, even, ms),
        ("generator, disk; use sleeps", generator, disk.read, time.sleep, blocks, mib / rate),
        ("DataLoader, disk; use takes CPU", loader, disk.read, spin, blocks, mib / rate),
        ("generator, sleep; use takes CPU", generator, time.sleep, spin, even, ms),
        ("loads uneven", generator, time.sleep, time.sleep, uneven, ms),
        ("load half", generator, time.sleep, time.sleep, [ms / 2] * steps, ms),
        ("compute half", generator, time.sleep, time.sleep, even, ms / 2),
        ("generator, both take CPU", generator, spin, spin, even, ms),
        ("DataLoader, both take CPU", loader, spin, spin, even, ms),
    ]
    cases = [case for case in cases if re.search(options.only, case[0])]
    columns: list[list[list[float]]] = [[[] for _ in range(6)] for _ in cases]
    for _ in range(options.rounds):
        for (_, make, load, use, loads, seconds), column in zip(cases, columns, strict=True):
            items = make(load, loads)
            watched, ahead = tb.watch(items), tb.watch(tb.prefetch(items))
            with redirect_stderr(StringIO()):
                loop(watched, use, seconds)
                wall = loop(ahead, use, seconds)
            plain, beside = watched.report(), ahead.report()
            both = free(load, loads, use, seconds)
            prediction = plain.predict(overlap=True)
            assert prediction is not None
            predicted, reached = plain.wall / prediction.wall, plain.wall / wall
            longest, same = (wall / max(report.load, report.compute) for report in (plain, beside))
            found = longest, same, wall / both, predicted, reached, 100 * (reached / predicted - 1)
            for values, value in zip(column, found, strict=True):
                values.append(value)
    print(f"{steps} steps of {options.ms:g} ms, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print("| case | wall / longest | wall / longest, same run | wall / free | predicted | reached | off % |")
    print("| --- " + "| ---: " * 6 + "|")
    for (name, *_), column in zip(cases, columns, strict=True):
        print(f"| {name} | " + " | ".join(map(spread, column)) + " |")


if __name__ == "__main__":
    main()
