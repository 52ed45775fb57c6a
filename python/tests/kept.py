"""Loops that keep batches: seconds for 100 batches of 3 KiB. A kept batch costs one wait of 0.1 s at most.

python python/tests/kept.py
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

import twinbuf as tb

BATCHES = 100


def loop(batches: Iterable[Any]) -> None:
    for batch in batches:
        batch.numpy().sum()


def accumulate(count: int) -> Callable[[Iterable[Any]], None]:
    def run(batches: Iterable[Any]) -> None:
        iterator = iter(batches)
        while group := list(islice(iterator, count)):
            for batch in group:
                batch.numpy().sum()

    return run


def pairs(batches: Iterable[Any]) -> None:
    for one, other in pairwise(batches):
        assert one.step + 1 == other.step


# name: options of the loader, and the loop.
LOOPS: dict[str, tuple[dict[str, Any], Callable[[Iterable[Any]], object]]] = {
    "for, depth=2": ({"depth": 2}, loop),
    "accumulate 2, depth=2": ({"depth": 2}, accumulate(2)),
    "accumulate 4": ({}, accumulate(4)),
    "pairwise, depth=2": ({"depth": 2}, pairs),
    "list(loader)": ({}, list),
    "list(loader), overlap=False": ({"overlap": False}, list),
    "for, depth=1, overlap=False": ({"depth": 1, "overlap": False}, loop),
}


def seconds(
    folder: Path, options: dict[str, Any], run: Callable[[Iterable[Any]], object]
) -> tuple[float, int]:
    np.save(folder / "x.npy", np.zeros((BATCHES * 6, 128), "float32"))
    data = tb.Records.open_npy(folder / "x.npy")
    loader = tb.Loader(data, tb.Plan(data, 6), **options)
    start = time.perf_counter()
    run(loader.epoch(0))
    return time.perf_counter() - start, loader.report().kept


def main() -> None:
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        for name, (options, run) in LOOPS.items():
            took, kept = seconds(Path(folder), options, run)
            print(f"{name:28} {took:7.4f} s, {kept} kept")


if __name__ == "__main__":
    main()
