"""Windows of tokens in a shuffled order, sent to the accelerator, if there is one, while the last step runs.

The file is a shard as llm.c has them: a header of 1024 bytes, then tokens of 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from common import compare, folder, write

import twinbuf as tb

WINDOW, STEP, BATCH, STEPS, VOCABULARY = 1025, 1024, 512, 64, 1024
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


class Model:
    """Predicts the next token from the one before, by the product of two tables."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(VOCABULARY, 32, device=DEVICE)
        self.out = torch.nn.Linear(32, VOCABULARY, device=DEVICE)
        self.optimizer = torch.optim.SGD([*self.table.parameters(), *self.out.parameters()], 1.0)

    def train(self, tokens: torch.Tensor) -> float:
        tokens = tokens[:, :: WINDOW // 4].long()  # few, as this may be a small processor
        scores = self.out(self.table(tokens[:, :-1]))
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def plan() -> tb.Plan:
    return tb.Plan(BATCH * STEPS, batch=BATCH, shuffle="full", seed=1)


def read(path: Path) -> Iterator[torch.Tensor]:
    tokens = np.asarray(np.memmap(path, np.uint16, "r", 1024))
    windows = np.lib.stride_tricks.sliding_window_view(tokens, WINDOW)[::STEP]
    order = plan()
    for step in range(len(order)):
        yield torch.from_numpy(windows[order.indices(0, step)])


def plain(path: Path) -> list[float]:
    model, losses = Model(), []
    for tokens in read(path):
        losses.append(model.train(tokens.to(DEVICE)))
    return losses


def changed(path: Path) -> list[float]:
    model, losses = Model(), []
    data = tb.Records.open_llm_c(path).windows(WINDOW, STEP)  # changed
    batches = (batch.torch() for batch in tb.Loader(data, plan()).epochs(1))  # changed
    for tokens in tb.prefetch(
        batches, DEVICE, depth=1
    ):  # changed: the copy of the next batch runs beside the step
        losses.append(model.train(tokens))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    with folder() as here:
        header = np.zeros(512, np.uint16)
        header.view(np.int32)[:3] = 20240520, 1, BATCH * STEPS * STEP + 1
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, BATCH * STEPS * STEP + 1, np.uint16)
        path = write(here / "train.bin", np.concatenate([header, tokens]))
        compare(lambda: plain(path), lambda: changed(path), path)


if __name__ == "__main__":
    main()
