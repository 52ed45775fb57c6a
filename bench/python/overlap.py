#!/usr/bin/env python3
"""How near `prefetch` comes to perfect overlap, and whether `watch` foretells it.

    python bench/python/overlap.py [--steps 200] [--rounds 5] [--ms 10] [--only REGEX]

Each round runs a loop as it is, measured by `watch`, and then with `prefetch`. Loads and uses are sleeps, as a
disk or a device would be waited for, or work on a processor that releases the GIL. Columns, medians of the rounds
with their quartiles:

- `wall / longest`: the loop with `prefetch`, over the longer of all loads and all uses of the loop as it is.
- `foretold`, `reached`: how many times faster `watch` expected `prefetch` to be, and how many it was.
- `difference`: the one against the other, of each round.

- `wall / free`: the loop with `prefetch`, over two threads that do all loads and uses without a hand-off. Where both
  take a processor, this is what the processors allow: other programs, or a shared core, slow both down.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
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
    """Return the blocks that a processor hashes in a second."""
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
    """Return what all loads and all uses take in two threads that do not wait for each other."""

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
    cases: list[tuple[str, Callable[[Work, list[float]], Iterable[object]], Work, Work, list[float], float]] = [
        ("generator, sleep", generator, time.sleep, time.sleep, even, ms),
        ("DataLoader, sleep", loader, time.sleep, time.sleep, even, ms),
        ("generator, CPU", generator, spin, spin, even, ms),
        ("DataLoader, CPU", loader, spin, spin, even, ms),
        ("generator, sleep, CPU", generator, time.sleep, spin, even, ms),
        ("loads uneven", generator, time.sleep, time.sleep, uneven, ms),
        ("load half", generator, time.sleep, time.sleep, [ms / 2] * steps, ms),
        ("compute half", generator, time.sleep, time.sleep, even, ms / 2),
    ]
    cases = [case for case in cases if re.search(options.only, case[0])]
    columns = [[[] for _ in range(5)] for _ in cases]
    for _ in range(options.rounds):
        for (_, make, load, use, loads, seconds), column in zip(cases, columns, strict=True):
            items = make(load, loads)
            watched = tb.watch(items)
            with redirect_stderr(StringIO()):
                loop(watched, use, seconds)
            plain = watched.report()
            wall = loop(tb.prefetch(items), use, seconds)
            both = free(load, loads, use, seconds)
            assert plain.with_prefetch is not None
            foretold, reached = plain.wall / plain.with_prefetch, plain.wall / wall
            found = wall / plain.ideal, wall / both, foretold, reached, 100 * (reached / foretold - 1)
            for values, value in zip(column, found, strict=True):
                values.append(value)
    print(f"{steps} steps of {options.ms:g} ms, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print("| case | wall / longest | wall / free | foretold | reached | difference % |")
    print("| --- " + "| ---: " * 5 + "|")
    for (name, *_), column in zip(cases, columns, strict=True):
        print(f"| {name} | " + " | ".join(map(spread, column)) + " |")


if __name__ == "__main__":
    main()
