"""Interrupts at random points of ``next()``: each item comes once, in order, and nothing hangs.

python python/tests/interrupts.py [interrupts] [kind ...]

A timer of the process takes the place of Ctrl-C; its handler raises KeyboardInterrupt. The loop continues
with the same iterator. Prints for each kind: interrupts, items lost, items that came twice, other exceptions.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import twinbuf as tb

STEPS = 64


class Now:
    """A device in host memory, whose streams are done at once."""

    def done(self, *_: object) -> None:
        """Do nothing."""

    record = wait = synchronize = keep = done

    def side(self) -> str:
        return "side"

    def current(self) -> str:
        return "main"

    def using(self, stream: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def event(self) -> Now:
        return self

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes + 63, dtype=torch.uint8)[:nbytes]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def copy(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out.copy_(tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        return False

    pinned = owns


@contextlib.contextmanager
def handled(number: int, function: Callable[..., object]) -> Iterator[None]:
    """Let the function handle the signal. The process's timer is off afterwards."""
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)


def slow(number: int) -> int:
    """Take a random time."""
    time.sleep(random.choice([0, 0, 2e-5]))
    return number


class Numbers:
    """Counts in C: an interrupt cannot end it."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __iter__(self) -> Iterator[int]:
        return map(slow, self.numbers)


def loader(folder: Path, **options: Any) -> tb.Loader:
    path = folder / "numbers.npy"
    if not path.exists():
        np.save(path, np.arange(STEPS * 4))
    data = tb.Records.open_npy(path)
    return tb.Loader(data, tb.Plan(data, 4), **options)


def passes(folder: Path) -> Iterator[tb.Group]:
    """Pass after pass, by an iterator that is written in C."""
    path = folder / "model.safetensors"
    save_file({f"{step:02}": torch.zeros(1 << 14) for step in range(STEPS)}, path)
    stream = tb.stream(tb.Tensors.open(path), lambda name: name)
    return itertools.chain.from_iterable(itertools.repeat(stream))


def makers(folder: Path) -> dict[str, Callable[[], Iterator[Any]]]:
    return {
        "Loader": lambda: loader(folder).epochs(10**6),
        "Loader(device=)": lambda: loader(folder, device=Now()).epochs(10**6),
        "Loader(device=, overlap=False)": lambda: loader(folder, device=Now(), overlap=False).epochs(10**6),
        "watch(Loader)": lambda: iter(tb.watch(loader(folder).epochs(10**6))),
        "watch": lambda: iter(tb.watch(itertools.count())),
        "prefetch": lambda: iter(tb.prefetch(Numbers())),
        "prefetch(device=)": lambda: iter(tb.prefetch((torch.tensor(n) for n in Numbers()), device=Now())),
        "watch(prefetch)": lambda: iter(tb.watch(tb.prefetch(Numbers()))),
        "generate": lambda: tb.generate(slow),
        "generate(before=)": lambda: tb.generate(slow, before=lambda number: None),
        "stream": lambda: passes(folder),
    }


@dataclass
class Count:
    interrupts: int = 0
    items: int = 0
    lost: int = 0
    twice: int = 0
    broken: int = 0


def drive(items: Iterator[Any], wanted: int, kind: str, raised: type[BaseException]) -> Count:
    """Interrupt the iterator until it was interrupted that often."""
    count, got = Count(), []
    add, arm, draw = got.append, signal.setitimer, random.uniform
    while count.interrupts < wanted and count.broken < 100:
        # On a busy machine it takes longer to begin.
        longest = 1e-4 if count.items else 1e-4 * (1 + count.interrupts / 20)
        try:
            arm(signal.ITIMER_REAL, draw(1e-6, longest))
            # Between the end of `next` and that of `append` the interpreter handles no signal.
            if "Loader" in kind:
                for batch in items:
                    add(batch.epoch * STEPS + batch.step)
                    del batch
                    arm(signal.ITIMER_REAL, draw(1e-6, 1e-4))
            elif kind == "stream":
                for group in items:
                    add(group.number)
                    del group
                    arm(signal.ITIMER_REAL, draw(1e-6, 1e-4))
            else:
                for item in items:
                    add(item)
                    arm(signal.ITIMER_REAL, draw(1e-6, 1e-4))
        except raised:
            count.interrupts += 1
        except Exception as error:
            count.broken += 1
            print(f"  {type(error).__name__}: {error}", file=sys.stderr)
        while True:
            try:
                arm(signal.ITIMER_REAL, 0)
                note(count, got, STEPS if kind == "stream" else sys.maxsize)
                break
            except raised:
                pass
    return count


def note(count: Count, got: list[Any], rounds: int) -> None:
    """Compare the numbers with those that should come; they begin again after so many."""
    while got:
        item = got[0]
        number = int(item)
        if rounds < sys.maxsize:
            number = count.items + (number - count.items) % rounds
        lost, twice = max(0, number - count.items), number < count.items
        # From here to the end nothing is called, so no signal is handled.
        del got[0]
        count.lost, count.twice, count.items = count.lost + lost, count.twice + twice, number + 1


def run(kind: str, wanted: int, folder: Path, raised: type[BaseException] = KeyboardInterrupt) -> Count:
    def handler(*_: object) -> None:
        raise raised

    faulthandler.dump_traceback_later(60 + wanted / 50, exit=True)
    try:
        with handled(signal.SIGALRM, handler):
            return drive(makers(folder)[kind](), wanted, kind, raised)
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    logging.disable()
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        for kind in sys.argv[2:] or makers(Path(folder)):
            start = time.monotonic()
            found = run(kind, wanted, Path(folder))
            print(f"{kind:30} {found} in {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
