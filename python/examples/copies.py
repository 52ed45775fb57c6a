"""Copies to a GPU ahead of their use, by hand: a stream for copies, two page-locked buffers, an event each.

A buffer must not be filled again before the copy out of it has ended, nor memory on the device be used again
before the kernels that read it have ended. Without a GPU it runs on the stand-in of the tests, whose streams
are as late as they may be: what is not waited for is then seen to be wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import compare, network

import twinbuf as tb

sys.path.append(str(Path(__file__).parent.parent / "tests"))

STEPS, ROWS, WIDTH = 60, 256, 64


def device() -> Any:
    """Streams and events: those of torch, or of the stand-in."""
    if found := torch.accelerator.current_accelerator(check_available=True):
        from twinbuf._streams import Accelerator

        return Accelerator(found)
    from late import Late

    return Late("")


class Batches:
    """Numbers that tell their batch, as if from a disk behind a network."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(STEPS):
            network()
            yield torch.full((ROWS, WIDTH), step + 1.0)


class Ahead:
    """Sends the next batch while one is used."""

    def __init__(self, batches: Iterable[torch.Tensor], on: Any) -> None:
        self.batches, self.on, self.side = iter(batches), on, on.side()
        nbytes = ROWS * WIDTH * 4
        self.host = [on.host(nbytes).view(torch.float32).view(ROWS, WIDTH) for _ in range(2)]
        self.copied = [on.event(), on.event()]
        self.slot = 0

    def send(self) -> tuple[torch.Tensor, Any] | None:
        batch = next(self.batches, None)
        if batch is None:
            return None
        slot, self.slot = self.slot, 1 - self.slot
        self.copied[slot].synchronize()  # the last copy out of this buffer
        self.host[slot].copy_(batch)
        with self.on.using(self.side):
            out = self.on.empty_like(self.host[slot])
            self.on.copy(out, self.host[slot])
        self.copied[slot] = self.on.event()
        self.copied[slot].record(self.side)
        return out, self.copied[slot]

    def __iter__(self) -> Iterator[torch.Tensor]:
        ahead = self.send()
        while ahead:
            (out, copied), ahead = ahead, self.send()
            copied.wait(self.on.current())
            self.on.keep(out, self.on.current())
            yield out


class Model:
    """Notes the mean of what each kernel reads."""

    def __init__(self, on: Any) -> None:
        self.on = on
        self.sums: list[Any] = []

    def train(self, rows: torch.Tensor) -> None:
        time.sleep(0.005)
        if hasattr(self.on, "kernel"):
            self.on.kernel(rows, lambda values: self.sums.append(values.mean()))
        else:
            self.sums.append(rows.mean())

    def losses(self) -> list[float]:
        if hasattr(self.on, "finish"):
            self.on.finish()
        return [float(value) for value in self.sums]


def plain(on: Any) -> list[float]:
    model = Model(on)
    for rows in Ahead(Batches(), on):
        model.train(rows)
    return model.losses()


def changed(on: Any) -> list[float]:
    model = Model(on)
    for rows in tb.prefetch(Batches(), device=on):  # changed
        model.train(rows)
    return model.losses()


def overwritten(losses: list[float]) -> int:
    """The number of batches that were not read as they were."""
    return sum(found != step + 1 for step, found in enumerate(losses))


def main() -> None:
    compare(lambda: plain(device()), lambda: changed(device()))
    wrong = [overwritten(run(device())) for run in (plain, changed)]
    print(f"batches overwritten too early: {wrong[0]} by hand, {wrong[1]} changed")


if __name__ == "__main__":
    main()
