"""Training and validation, with switches, a breakdown every few steps, and validation read early.

    TWINBUF_OVERLAP=0 python toggles.py     # no threads: to see whether they make a difference
    TWINBUF_BREAKDOWN=10 python toggles.py  # where the time goes, every 10 steps of the loop by hand

With the switch no line has to be changed to measure a run without overlap.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from common import compare, descend, folder, network, write

import twinbuf as tb

STEPS, VALID, ROWS, WIDTH, EPOCHS = 40, 8, 4096, 256, 2
OVERLAP = os.environ.get("TWINBUF_OVERLAP", "1") != "0"
BREAKDOWN = int(os.environ.get("TWINBUF_BREAKDOWN", "0"))


class Batches:
    """The batches of a file, normalised."""

    def __init__(self, path: Path, first: int, count: int) -> None:
        self.path, self.first, self.count = path, first, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[torch.Tensor]:
        with self.path.open("rb") as file:
            file.seek(self.first * ROWS * WIDTH * 4)
            for _ in range(self.count):
                network()
                rows = np.fromfile(file, np.float32, ROWS * WIDTH).reshape(ROWS, WIDTH)
                rows -= rows.mean(axis=0)
                rows /= rows.std(axis=0)
                yield torch.from_numpy(rows)


class Model:
    """Predicts the second half of a row from the first."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        half = WIDTH // 2
        self.net = torch.nn.Sequential(torch.nn.Linear(half, 64), torch.nn.ReLU(), torch.nn.Linear(64, half))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        left, right = rows.chunk(2, dim=1)
        return torch.nn.functional.mse_loss(self.net(left), right)

    def train(self, rows: torch.Tensor) -> float:
        return descend(self.optimizer, self.loss(rows))

    @torch.no_grad()
    def validate(self, batches: Iterable[torch.Tensor]) -> float:
        return sum(self.loss(rows).item() for rows in batches) / VALID


class Clock:
    """Measures loads and uses, and prints them every `BREAKDOWN` steps."""

    def __init__(self, batches: Batches) -> None:
        self.batches, self.step, self.load, self.use = batches, 0, 0.0, 0.0

    def __iter__(self) -> Iterator[torch.Tensor]:
        asked = time.perf_counter()
        for rows in self.batches:
            received = time.perf_counter()
            yield rows
            self.load += received - asked
            asked = time.perf_counter()
            self.use += asked - received
            self.step += 1
            if BREAKDOWN and self.step % BREAKDOWN == 0:
                print(f"step {self.step}: load {self.load:.3f} s, use {self.use:.3f} s")


def plain(train: Batches, valid: Batches) -> list[float]:
    model, losses = Model(), []
    batches = Clock(train)
    for _ in range(EPOCHS):
        for rows in batches:
            losses.append(model.train(rows))
        losses.append(model.validate(valid))
    return losses


def changed(train: Batches, valid: Batches) -> list[float]:
    model, losses = Model(), []
    batches = tb.watch(tb.prefetch(train) if OVERLAP else train, name="train")  # changed
    for _ in range(EPOCHS):
        # Its thread starts now: when training is done, two batches are there.
        held = iter(tb.prefetch(valid) if OVERLAP else valid)  # changed
        for rows in batches:
            losses.append(model.train(rows))
        losses.append(model.validate(held))  # changed
    return losses


def main() -> None:
    torch.set_num_threads(1)
    with folder() as here:
        numbers = np.random.default_rng(0).standard_normal((STEPS + VALID) * ROWS * WIDTH, dtype=np.float32)
        path = write(here / "rows.f32", numbers)
        train, valid = Batches(path, 0, STEPS), Batches(path, STEPS, VALID)
        compare(lambda: plain(train, valid), lambda: changed(train, valid), path)


if __name__ == "__main__":
    main()
