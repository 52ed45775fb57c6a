"""Verdicts of the report for loops in Python whose truth is known: as `cargo bench --bench verdicts`, in Python.

python bench/python/verdicts.py [--runs 5] [--texts]    # needs the installed package
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import twinbuf as tb

STEPS = 60


class Loads:
    """Items that take some milliseconds each: asleep, or at work with the GIL."""

    def __init__(self, times: list[float], *, works: bool = False) -> None:
        self.times, self.works = times, works

    def __iter__(self) -> Iterator[int]:
        for number, ms in enumerate(self.times):
            if self.works:
                end = time.thread_time() + ms / 1e3
                while time.thread_time() < end:
                    pass
            else:
                time.sleep(ms / 1e3)
            yield number


LATE = [30.0 if step % 8 == 7 else 1.0 for step in range(STEPS)]
START = [200.0, *[1.0] * (STEPS - 1)]
# Each with its items, the milliseconds of a use, and the verdicts that are right.
# Loads that work have the GIL: with it the use waits too, so both may fill the time.
LOOPS: dict[str, tuple[Any, float, set[str]]] = {
    "use": (lambda: tb.prefetch(Loads([1.0] * STEPS)), 4, {"ComputeBound"}),
    "off": (lambda: tb.watch(Loads([6.0] * STEPS)), 2, {"LoadBound"}),
    "off, use": (lambda: tb.watch(Loads([2.0] * STEPS)), 6, {"ComputeBound"}),
    "loads": (lambda: tb.prefetch(Loads([8.0] * STEPS)), 1, {"LoadBound"}),
    "loads that work": (lambda: tb.prefetch(Loads([8.0] * STEPS, works=True)), 1, {"LoadBound", "Balanced"}),
    "late": (lambda: tb.prefetch(Loads(LATE), depth=3), 6, {"Balanced"}),
    "start": (lambda: tb.prefetch(Loads(START)), 5, {"ComputeBound"}),
    "made": (lambda: tb.generate(lambda _: time.sleep(0.008), rounds=STEPS), 1, {"GenerationBound"}),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--texts", action="store_true", help="print the report of each run")
    options = parser.parse_args()
    right = 0
    for name, (make, use, truth) in LOOPS.items():
        found = []
        for _ in range(options.runs):
            items = make()
            for _ in items:
                time.sleep(use / 1e3)
            found.append(items.report())
        good = [report.verdict in truth for report in found]
        right += sum(good)
        print(f"{name:<16} {sum(good)}/{len(good)}")
        for report, fits in zip(found, good, strict=True):
            if options.texts or not fits:
                print(f"    {report:#}".replace("\n", "\n    "))
    print(f"{right} of {len(LOOPS) * options.runs} right")


if __name__ == "__main__":
    main()
