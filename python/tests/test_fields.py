"""Several data sets in one batch, matched by number."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import saved
from sets import Numbers

import twinbuf as tb


class Labels(Numbers):
    shape = ()

    def read_into(self, indices: np.ndarray, out: memoryview) -> None:
        super().read_into(indices * 3, out)


def pair(folder: Path) -> tuple[tb.Records, tb.Records, np.ndarray, np.ndarray]:
    images = np.random.default_rng(1).integers(0, 256, (50, 3, 7)).astype(np.uint8)
    labels = np.arange(50) * 3
    return saved(folder / "images.npy", images), saved(folder / "labels.npy", labels), images, labels


@pytest.mark.parametrize("labels_in", ["a file", "Python"])
def test_fields_are_matched_by_number(tmp_path: Path, labels_in: str) -> None:
    x, y, images, labels = pair(tmp_path)
    data = (x, y if labels_in == "a file" else Labels(50))
    plan = tb.Plan(data, 8, shuffle="full", seed=1, drop_last=False)
    assert (len(plan), plan.indices(0, 0).max() < 50) == (7, True)
    loader = tb.Loader(data, plan, depth=3)
    for batch in loader.epochs(2):
        pixels, numbers = batch.numpy()
        assert np.array_equal(pixels, images[batch.indices])
        assert np.array_equal(numbers, labels[batch.indices])
        tensors = batch.torch()
        assert [tensor.data_ptr() for tensor in tensors] == [
            array.__array_interface__["data"][0] for array in (pixels, numbers)
        ]
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
        tensors[1][0] = -1
        assert numbers[0] == -1
        assert len(batch) == len(numbers)
        assert "uint8" in repr(batch) and "int64" in repr(batch)
        for one in (memoryview, np.from_dlpack, torch.from_dlpack):
            with pytest.raises(BufferError, match="2 arrays"):
                one(batch)
        del pixels, numbers, tensors


def test_one_field_keeps_the_memory_of_all(tmp_path: Path) -> None:
    x, y, _, labels = pair(tmp_path)
    loader = tb.Loader((x, y), tb.Plan((x, y), 10), depth=1, overlap=False)
    kept = [(batch.torch()[1], batch.numpy()[1], batch.indices) for batch in loader.epoch(0)]
    del loader
    gc.collect()
    for tensor, array, indices in kept:
        assert np.array_equal(tensor.numpy(), labels[indices])
        assert np.array_equal(array, labels[indices])


def test_the_default_window_counts_the_bytes_of_all(tmp_path: Path) -> None:
    x, _, _, _ = pair(tmp_path)
    assert tb.Plan((x, x), 5, shuffle=tb.Window(2)) == tb.Plan(50, 5, shuffle=tb.Window(2, (1 << 20) // 42))
