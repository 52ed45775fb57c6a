"""What the examples share: files that are not in the page cache, and the comparison of two runs."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that is removed afterwards; TMPDIR names the disk to put it on."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def write(path: Path, numbers: np.ndarray) -> Path:
    """Write the numbers to the disk, and not only to the page cache."""
    with path.open("wb") as file:
        numbers.tofile(file)
        os.fsync(file.fileno())
    return path


def cold(*paths: Path) -> None:
    """Remove the files from the page cache, where the system can."""
    for path in paths:
        if hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def network() -> None:
    """Wait as a disk behind a network may: one of this machine may be too fast."""
    time.sleep(0.005)


def descend(optimizer: Any, loss: Any) -> float:
    """Change a model of torch by the gradient of the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def compare(plain: Callable[[], list[float]], changed: Callable[[], list[float]], *paths: Path) -> None:
    """Run both twice with a cold cache, print the shorter times, and check that the losses are the same."""
    seconds = {plain: float("inf"), changed: float("inf")}
    losses: dict[Callable[[], list[float]], list[float]] = {}
    for run in (plain, changed, changed, plain):
        cold(*paths)
        start = time.perf_counter()
        losses[run] = run()
        seconds[run] = min(seconds[run], time.perf_counter() - start)
    assert losses[plain] == losses[changed], "the losses differ"
    first, last = losses[plain][0], losses[plain][-1]
    print(f"plain loop       {seconds[plain]:.3f} s, {len(losses[plain])} losses, {first:.4f} -> {last:.4f}")
    print(f"changed          {seconds[changed]:.3f} s, the same losses")
