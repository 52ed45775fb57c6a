"""A memory-mapped file through two buffers that were written by hand, with a flag for each part.

python mapped.py --no-overlap    # fills and trains in turn
python mapped.py --no-willneed   # the loop by hand does not ask the system for the next rows ahead
"""

from __future__ import annotations

import argparse
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import compare, folder, write

import twinbuf as tb

STEPS, BATCH, WIDTH = 64, 4096, 256


class Mapped:
    """A thread fills one buffer with float32 from the mapping while the other one is used."""

    def __init__(self, path: Path, overlap: bool, willneed: bool) -> None:
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.rows = np.frombuffer(self.map, np.uint8).reshape(STEPS, BATCH, WIDTH)
        self.buffers = [np.empty((BATCH, WIDTH), np.float32) for _ in range(2)]
        self.free, self.full = threading.Semaphore(2), threading.Semaphore(0)
        self.overlap, self.willneed = overlap, willneed

    def fill(self, step: int) -> np.ndarray:
        if self.willneed and step + 1 < STEPS:
            self.map.madvise(mmap.MADV_WILLNEED, (step + 1) * BATCH * WIDTH, BATCH * WIDTH)
        # By numpy's SIMD loops.
        return np.multiply(self.rows[step], np.float32(1 / 255), out=self.buffers[step % 2])

    def fill_all(self) -> None:
        for step in range(STEPS):
            self.free.acquire()
            self.fill(step)
            self.full.release()

    def __iter__(self) -> Iterator[np.ndarray]:
        if not self.overlap:
            yield from map(self.fill, range(STEPS))
            return
        thread = threading.Thread(target=self.fill_all)
        thread.start()
        for step in range(STEPS):
            self.full.acquire()
            yield self.buffers[step % 2]
            self.free.release()
        thread.join()


class Model:
    """Predicts the last number of a row from the others."""

    def __init__(self) -> None:
        self.weights = np.zeros(WIDTH - 1, np.float32)

    def train(self, rows: np.ndarray) -> float:
        loss = 0.0
        for _ in range(4):
            errors = rows[:, :-1] @ self.weights - rows[:, -1]
            loss = float(errors @ errors) / len(rows)
            self.weights -= 0.002 * (errors @ rows[:, :-1]) / len(rows)
        return loss


def plain(path: Path, overlap: bool, willneed: bool) -> list[float]:
    model, losses = Model(), []
    for rows in Mapped(path, overlap, willneed):
        losses.append(model.train(rows))
    return losses


def changed(path: Path, overlap: bool, willneed: bool) -> list[float]:
    model, losses = Model(), []
    data = tb.Records.open(path, WIDTH).to("float32", mean=0, std=1)  # changed
    for batch in tb.Loader(data, tb.Plan(data, BATCH), overlap=overlap).epoch(0):  # changed
        losses.append(model.train(batch.numpy()))  # changed
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--no-willneed", action="store_true")
    flags = parser.parse_args()
    options = not flags.no_overlap, not flags.no_willneed and hasattr(mmap, "MADV_WILLNEED")
    with folder() as here:
        numbers = np.random.default_rng(0).integers(0, 256, STEPS * BATCH * WIDTH, np.uint8)
        path = write(here / "rows.u8", numbers)
        compare(lambda: plain(path, *options), lambda: changed(path, *options), path)


if __name__ == "__main__":
    main()
