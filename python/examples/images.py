"""Memory-mapped images, cut and mirrored at random, in a shuffled order, through torch's DataLoader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from common import compare, descend, folder, write
from torch.utils.data import DataLoader, Dataset

import twinbuf as tb

IMAGES, SIDE, CUT, BATCH = 2400, 160, 128, 48


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Whole batches of images, as float planes."""

    def __init__(self, path: Path) -> None:
        self.images = np.memmap(path, np.uint8, "r", shape=(IMAGES, SIDE, SIDE, 3))

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        out = np.empty((len(numbers), CUT, CUT, 3), np.uint8)
        for place, number in zip(out, numbers, strict=True):
            # Of each image's own, so that nothing depends on which thread draws first.
            random = np.random.default_rng(number)
            y, x = random.integers(0, SIDE - CUT + 1, 2)
            image = self.images[number, y : y + CUT, x : x + CUT]
            np.copyto(place, image[:, ::-1] if random.random() < 0.5 else image)
        planes = torch.from_numpy(out).permute(0, 3, 1, 2).float().div_(255)
        return planes, torch.tensor(numbers) % 10


def loader(path: Path) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    data = Images(path)
    sampler = torch.utils.data.RandomSampler(data, generator=torch.Generator().manual_seed(1))
    batches = torch.utils.data.BatchSampler(sampler, BATCH, drop_last=True)
    return DataLoader(data, batch_size=None, sampler=batches)


class Model:
    """A small convolutional net."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 5, stride=4),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(128, 10),
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)

    def train(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        return descend(self.optimizer, torch.nn.functional.cross_entropy(self.net(images), labels))


def plain(path: Path) -> list[float]:
    model, losses = Model(), []
    for images, labels in loader(path):
        losses.append(model.train(images, labels))
    return losses


def changed(path: Path) -> list[float]:
    model, losses = Model(), []
    for images, labels in tb.prefetch(loader(path)):  # changed; on a GPU: prefetch(..., device="cuda")
        losses.append(model.train(images, labels))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    with folder() as here:
        pixels = np.random.default_rng(0).integers(0, 256, IMAGES * SIDE * SIDE * 3, np.uint8)
        path = write(here / "images.u8", pixels)
        compare(lambda: plain(path), lambda: changed(path), path)


if __name__ == "__main__":
    main()
