"""One run of one loader: prints `ready`, waits for a line, and prints its measurements as JSON.

    one.py SUBJECT --kind tokens|images|texts --data FILE --seed N [--train REPEATS] [--verify]

CPU time includes all threads and worker processes. Memory is the part that is not file-backed: `Pss_Anon` and
`Pss_Shmem` of smaps_rollup, of the process and its workers, minus what the process had when it was ready.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from subjects import EPOCHS, KINDS, SUBJECTS, Reader


def family() -> list[int]:
    """Return this process and its children."""
    pids = [os.getpid()]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, task.read_text().split())
    return pids


def cpu_s() -> float:
    # The clock of another process, computed like clock_getcpuclockid(3).
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in family())


def memory() -> int:
    """Return KiB."""
    total = 0
    for pid in family():
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1])
    return total


class Trainer:
    """Many small products: a training step that often releases the GIL and takes it back."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.numbers = np.random.default_rng(0).standard_normal((96, 96), dtype=np.float32)
        self.out = np.empty_like(self.numbers)
        self.seconds: list[float] = []

    def step(self) -> None:
        start = time.perf_counter()
        for _ in range(self.repeats):
            np.matmul(self.numbers, self.numbers, out=self.out)
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=0)
    parser.add_argument("--verify", action="store_true")
    args = parser.parse_args()

    make, workers = SUBJECTS[args.subject]
    batches = make(args.kind, args.data, args.seed, workers)
    alone, trainer = Trainer(args.train), Trainer(args.train)
    for _ in range(40):
        alone.step()
    before = memory()
    print("ready", flush=True)
    input()

    wanted = Reader(args.kind, args.data)
    total_batches, size = wanted.count // wanted.batch * EPOCHS, wanted.batch
    shape = KINDS[args.kind][2]
    count, total, waited, mib, cpu, first_cpu = 0, 0, 0.0, 0.0, 0.0, 0.0
    start = asked = first = last = time.perf_counter()
    iterator = iter(batches)
    while (batch := next(iterator, None)) is not None:
        got = time.perf_counter()
        count += 1
        if shape:
            numbers: Any = np.asarray(batch)
            assert numbers.shape == (size, *shape), numbers.shape
            total += int(numbers.reshape(size, -1)[:, 1].sum())
        else:
            numbers = batch
            assert len(numbers) == size, len(numbers)
            total += sum(int(text[0]) for text in numbers)
        if args.verify:
            total += sum(int(np.asarray(record).sum(dtype=np.uint64)) for record in numbers)
        if count == 1:
            first, first_cpu = got, cpu_s()
        else:
            waited += got - asked
        if count == min(20, total_batches):
            mib = (memory() - before) / 1024
        if args.train:
            trainer.step()
        if count == total_batches:  # while the workers exist
            last, cpu = time.perf_counter(), cpu_s()
        del batch, numbers
        asked = time.perf_counter()
    assert count == total_batches, (count, total_batches)
    later = (count - 1) * size
    result = {
        "first_ms": (first - start) * 1e3,
        "rate": later / (last - first),
        "epoch_rate": count * size / (last - start),
        "cpu_us": (cpu - first_cpu) / later * 1e6,
        "mib": mib,
        "waited": waited / (last - first),
        "slowdown": float(np.median(trainer.seconds[1:]) / np.median(alone.seconds)) if args.train else None,
        "sum": total,
    }
    print(json.dumps(result), flush=True)
    # Some have threads that wait for more input.
    os._exit(0)


if __name__ == "__main__":
    main()
