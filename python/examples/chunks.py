"""Chunks of a large file, with a profile of where the time goes.

Each chunk is read from the disk, normalised, and used for several steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from common import compare, descend, folder, network, write

import twinbuf as tb

CHUNKS, ROWS, WIDTH, BATCH = 64, 8192, 128, 1024


def chunks(path: Path) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        for _ in range(CHUNKS):
            network()
            chunk = np.fromfile(file, np.float32, ROWS * WIDTH).reshape(ROWS, WIDTH)
            chunk -= chunk.mean(axis=0)
            chunk /= chunk.std(axis=0)
            yield chunk


class Model:
    """An autoencoder with one hidden layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, WIDTH)
        )
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-2)

    def train(self, chunk: np.ndarray) -> float:
        for batch in torch.from_numpy(chunk).split(BATCH):
            loss = descend(self.optimizer, torch.nn.functional.mse_loss(self.net(batch), batch))
        return loss


def plain(path: Path) -> list[float]:
    model, losses = Model(), []
    for chunk in chunks(path):
        losses.append(model.train(chunk))
    return losses


def changed(path: Path) -> list[float]:
    model, losses = Model(), []
    trace = path.with_suffix(".json")  # https://ui.perfetto.dev shows it
    for chunk in tb.watch(tb.prefetch(chunks(path), name="chunks", trace=trace)):  # changed
        losses.append(model.train(chunk))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    with folder() as here:
        numbers = np.random.default_rng(0).standard_normal(CHUNKS * ROWS * WIDTH, dtype=np.float32)
        path = write(here / "chunks.f32", numbers)
        compare(lambda: plain(path), lambda: changed(path), path)
        print(f"the trace has {path.with_suffix('.json').stat().st_size} bytes")


if __name__ == "__main__":
    main()
