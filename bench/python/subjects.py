"""The compared loaders: each yields the batches of one epoch, in a random order without repetition."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Tokens of a window. The first token of the next window is the last one of this window.
WINDOW = 1025
SIDE = 224

# kind: type of the numbers, bytes before the first record, shape of a record, numbers from one record to the next,
# records of a batch. Texts have any length: their shape is empty, and where each begins is in the file `index`.
KINDS: dict[str, tuple[str, int, tuple[int, ...], int, int]] = {
    "tokens": ("<u2", 1024, (WINDOW,), WINDOW - 1, 64),
    "images": ("|u1", 0, (SIDE, SIDE, 3), SIDE * SIDE * 3, 32),
    "texts": ("|u1", 0, (), 0, 64),
}


def index(path: Path) -> Path:
    """Return the file with the offsets of the texts, one more than there are texts."""
    return path.with_suffix(".npy")


# One after the other, without a gap: a run lasts a second at least.
EPOCHS = int(os.environ.get("EPOCHS", "1"))

Batches = Iterable[Any]


class Reader:
    """Reads whole batches from a mapping: all Python subjects call this, in their threads or processes."""

    def __init__(self, kind: str, path: Path) -> None:
        dtype, header, shape, step, self.batch = KINDS[kind]
        # A plain array: slicing a `memmap` runs slow Python code.
        numbers = np.asarray(np.memmap(path, dtype, "r", header))
        self.offsets = np.load(index(path)).tolist() if not shape else []
        if self.offsets:
            self.records, self.tokens, self.count = numbers, False, len(self.offsets) - 1
            return
        count = (len(numbers) - int(np.prod(shape))) // step + 1
        strides = (step * numbers.itemsize, *np.empty(shape, dtype).strides)
        self.records = np.lib.stride_tricks.as_strided(numbers, (count, *shape), strides, writeable=False)
        self.tokens, self.count = kind == "tokens", count

    def __call__(self, indices: Any) -> Any:
        if self.offsets:
            return [self.records[self.offsets[i] : self.offsets[i + 1]].copy() for i in indices]
        if self.tokens:
            return self.records[indices]  # not `take`: it would copy the whole map, because the windows overlap
        return self.records.take(indices, axis=0)

    def order(self, seed: int) -> list[Any]:
        count = self.count // self.batch
        rng = np.random.default_rng(seed)
        orders = (rng.permutation(self.count)[: count * self.batch] for _ in range(EPOCHS))
        return [batch for order in orders for batch in order.reshape(count, self.batch)]


def plain(kind: str, path: Path, seed: int, workers: int) -> Batches:
    read = Reader(kind, path)
    return map(read, read.order(seed))


def prefetch(kind: str, path: Path, seed: int, workers: int) -> Batches:
    import twinbuf as tb

    return tb.prefetch(plain(kind, path, seed, workers))


def torch_loader(kind: str, path: Path, seed: int, workers: int) -> Batches:
    """A whole batch is one item: one call per batch, and no collation."""
    import torch
    from torch.utils.data import DataLoader, Dataset, get_worker_info

    read = Reader(kind, path)

    class Items(Dataset[Any]):
        def __getitem__(self, indices: Any) -> Any:
            batch = read(indices)
            if isinstance(batch, list):
                return batch  # torch makes a tensor of each text
            batch = torch.from_numpy(batch)
            # torch passes data in shared memory on without another copy in the pipe.
            return batch.share_memory_() if get_worker_info() else batch

        def __len__(self) -> int:
            return read.count

    options = {"prefetch_factor": 2} if workers else {}
    return DataLoader(Items(), batch_size=None, sampler=read.order(seed), num_workers=workers, **options)


def torch_prefetch(kind: str, path: Path, seed: int, workers: int) -> Batches:
    import twinbuf as tb

    return tb.prefetch(torch_loader(kind, path, seed, workers))


def spdl(kind: str, path: Path, seed: int, workers: int) -> Batches:
    from spdl.pipeline import PipelineBuilder

    read = Reader(kind, path)
    builder = PipelineBuilder().add_source(read.order(seed)).pipe(read, concurrency=workers, output_order="input")
    pipeline = builder.add_sink(2).build(num_threads=workers)

    def batches() -> Iterator[Any]:
        with pipeline.auto_stop():
            yield from pipeline

    return batches()


def grain(kind: str, path: Path, seed: int, workers: int) -> Batches:
    import grain

    read = Reader(kind, path)
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2)
    return grain.MapDataset.source(read.order(seed)).map(read).to_iter_dataset(options)


def dataloader_rs(kind: str, path: Path, seed: int, workers: int) -> Batches:
    from dataloader_rs import PyDataloader, PyDataset

    read = Reader(kind, path)
    order = read.order(seed)

    class Items(PyDataset):
        def __len__(self) -> int:
            return len(order)

        def __getitem__(self, index: int) -> Any:
            return read(order[index])

    return PyDataloader(Items(), num_workers=workers, prefetch_depth=2, collate_fn=lambda batch: batch[0])


def twinbuf(kind: str, path: Path, seed: int, workers: int) -> Batches:
    import twinbuf as tb

    if kind == "tokens":
        # As the others: the numbers of the file.
        data = tb.Records.open_llm_c(path).windows(WINDOW, WINDOW - 1).to("uint16")
    elif kind == "texts":
        data = tb.Records.open_indexed(path, index(path))
    else:
        data = tb.Records.open(path, SIDE * SIDE * 3)
    plan = tb.Plan(data, batch=KINDS[kind][4], shuffle="full", seed=seed)

    def batches() -> Iterator[Any]:
        # Created here: its slots and its threads count like those of the others.
        loader = tb.Loader(data, plan, workers=workers)
        for batch in loader.epochs(EPOCHS):
            numbers = batch.numpy()
            yield numbers.reshape(KINDS[kind][4], *KINDS[kind][2]) if KINDS[kind][2] else numbers

    return batches()


# name: its factory, and its number of workers.
SUBJECTS: dict[str, tuple[Callable[[str, Path, int, int], Batches], int]] = {
    "plain loop": (plain, 0),
    "plain + prefetch": (prefetch, 0),
    "torch 0": (torch_loader, 0),
    "torch 1": (torch_loader, 1),
    "torch 2": (torch_loader, 2),
    "torch 0 + prefetch": (torch_prefetch, 0),
    "SPDL 1": (spdl, 1),
    "SPDL 2": (spdl, 2),
    "Grain 1": (grain, 1),
    "Grain 2": (grain, 2),
    "dataloader-rs 1": (dataloader_rs, 1),
    "dataloader-rs 2": (dataloader_rs, 2),
    "twinbuf": (twinbuf, 1),
    "twinbuf 2": (twinbuf, 2),
}
