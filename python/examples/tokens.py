"""Windows of tokens in a shuffled order, sent to the accelerator, if there is one, a step ahead.

The file is a shard as llm.c has them: a header of 1024 bytes, then tokens of 16 bits. The model is one of
torch where torch is installed, and one of numpy where it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import compare, descend, folder, write

import twinbuf as tb

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

WINDOW, STEP, BATCH, STEPS, VOCABULARY = 1025, 1024, 512, 64, 1024
DEVICE = torch.accelerator.current_accelerator(check_available=True) if torch else None


class TorchModel:
    """Predicts the next token from the one before, by the product of two tables."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(VOCABULARY, 32, device=DEVICE)
        self.out = torch.nn.Linear(32, VOCABULARY, device=DEVICE)
        self.optimizer = torch.optim.SGD([*self.table.parameters(), *self.out.parameters()], 10.0)

    def train(self, tokens: torch.Tensor) -> float:
        tokens = tokens[:, :: WINDOW // 4].long()  # few, as this may be a small processor
        scores = self.out(self.table(tokens[:, :-1]))
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        return descend(self.optimizer, loss)


class NumpyModel:
    """The same without a bias, its gradients by hand."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.table = rng.standard_normal((VOCABULARY, 32), np.float32)
        self.out = rng.standard_normal((32, VOCABULARY), np.float32) / 10

    def train(self, tokens: np.ndarray) -> float:
        tokens = tokens[:, :: WINDOW // 4]
        inputs, targets = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
        rows, each = self.table[inputs], np.arange(len(targets))
        scores = rows @ self.out
        scores -= scores.max(axis=1, keepdims=True)
        loss = float(np.mean(np.log(np.exp(scores).sum(axis=1)) - scores[each, targets]))
        slope = np.exp(scores)
        slope /= slope.sum(axis=1, keepdims=True)
        slope[each, targets] -= 1
        slope /= len(targets)
        before = self.out.copy()
        self.out -= 10 * rows.T @ slope
        np.subtract.at(self.table, inputs, 10 * slope @ before.T)
        return loss


def model() -> Any:
    return TorchModel() if torch else NumpyModel()


def plan() -> tb.Plan:
    return tb.Plan(BATCH * STEPS, batch=BATCH, shuffle="full", seed=1)


def read(path: Path) -> Iterator[np.ndarray]:
    tokens = np.asarray(np.memmap(path, np.uint16, "r", 1024))
    windows = np.lib.stride_tricks.sliding_window_view(tokens, WINDOW)[::STEP]
    order = plan()
    for step in range(len(order)):
        yield windows[order.indices(0, step)]


def plain(path: Path) -> list[float]:
    net, losses = model(), []
    for tokens in read(path):
        losses.append(net.train(torch.from_numpy(tokens).to(DEVICE) if torch else tokens))
    return losses


def changed(path: Path) -> list[float]:
    net, losses = model(), []
    data = tb.Records.open_llm_c(path).windows(WINDOW, STEP)  # changed
    for batch in tb.Loader(data, plan(), device=DEVICE).epochs(1):  # changed
        losses.append(net.train(batch.torch() if torch else batch.numpy()))  # changed
    return losses


def main() -> None:
    with folder() as here:
        header = np.zeros(512, np.uint16)
        header.view(np.int32)[:3] = 20240520, 1, BATCH * STEPS * STEP + 1
        # Some are more frequent than others, as words are.
        tokens = np.random.default_rng(0).random(BATCH * STEPS * STEP + 1, np.float32) ** 4 * VOCABULARY
        path = write(here / "train.bin", np.concatenate([header, tokens.astype(np.uint16)]))
        compare(lambda: plain(path), lambda: changed(path), path)


if __name__ == "__main__":
    main()
