"""Where the time of a loop went, as text, as a picture and as a trace."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = ["Report", "Step"]

# By how much loading must exceed computing, or the other way round, to decide alone. The same as in Rust.
_BOUND = 1.25


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a loop. Times are seconds; ``start`` counts from the first step of the report."""

    epoch: int
    step: int
    start: float
    wait: float
    compute: float


@dataclass(frozen=True)
class Report:
    """Where the time of a loop went. Times are seconds of wall-clock time.

    Attributes
    ----------
    name
        The name of the loader or loop, which may be empty.
    epochs, batches
        Epochs that were begun, batches that the loop received.
    wall
        From the first time that a batch of each epoch was asked for to the end of that epoch, added up.
    wait
        The part of ``wall`` in which the loop waited for batches.
    compute
        The part of ``wall`` in which the loop used them.
    load
        What making the batches took, wherever that was done. In a loop that loads in turn it is ``wait``.
    first_wait, first_compute
        The first step, which `au` leaves out.
    overlap
        Whether batches were loaded ahead of their use.
    advice
        One sentence: what to change.
    bytes
        The bytes of all batches, or None if they were not counted.
    steps
        The last steps, for `trace`. Long runs keep only the newest.
    text
        What ``str`` returns, or None for the text that is made from the figures above.
    """

    name: str
    epochs: int
    batches: int
    wall: float
    wait: float
    compute: float
    load: float
    first_wait: float
    first_compute: float
    overlap: bool
    advice: str
    bytes: int | None = None
    steps: Sequence[Step] = field(default=(), repr=False)
    text: str | None = field(default=None, repr=False)

    @property
    def au(self) -> float | None:
        """Accelerator utilization as MLPerf Storage defines it: compute over total, without step 0."""
        total = self.wall - self.first_wait - self.first_compute
        if self.batches < 2 or total <= 0:
            return None
        return min(1.0, max(0.0, (self.compute - self.first_compute) / total))

    @property
    def ideal(self) -> float:
        """The seconds that perfect overlap would take: the longer of loading and computing."""
        return max(self.load, self.compute)

    @property
    def possible_speedup(self) -> float:
        """How many times faster than one after the other perfect overlap is, from 1 to 2."""
        return (self.load + self.compute) / self.ideal if self.ideal > 0 else 1.0

    @property
    def remaining_speedup(self) -> float:
        """How many times faster than it was perfect overlap would be: what can still be gained."""
        return max(1.0, self.wall / self.ideal) if self.ideal > 0 else 1.0

    @property
    def verdict(self) -> str:
        """``Unmeasured``, ``ComputeBound``, ``LoadBound`` or ``Balanced``: which side decides."""
        if self.batches == 0 or self.ideal <= 0:
            return "Unmeasured"
        if self.compute >= _BOUND * self.load:
            return "ComputeBound"
        return "LoadBound" if self.load >= _BOUND * self.compute else "Balanced"

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, without the steps: to log them, or to write them as JSON."""
        figures = {each.name: getattr(self, each.name) for each in fields(self)}
        del figures["steps"], figures["text"]
        derived = ("au", "ideal", "possible_speedup", "remaining_speedup", "verdict")
        return figures | {key: getattr(self, key) for key in derived}

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the steps as a Chrome trace, which https://ui.perfetto.dev shows.

        It has one row, the loop's: when it waited and when it computed.
        """
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": self.name or "loop"}}
        ]
        for step in self.steps:
            args = {"epoch": step.epoch, "step": step.step}
            spans = ("wait", step.start, step.wait), ("compute", step.start + step.wait, step.compute)
            for name, start, seconds in spans:
                event = {"ph": "X", "name": name, "pid": 1, "tid": 1, "args": args}
                events.append(event | {"ts": round(start * 1e6, 3), "dur": round(seconds * 1e6, 3)})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def __str__(self) -> str:
        if self.text is not None:
            return self.text
        if self.batches == 0:
            return "Nothing was measured."
        unit, scale = ("ms", 1e3) if self.wall < 0.5 else ("s", 1.0)
        waited = self.wait / self.wall if self.wall > 0 else 0.0
        au = "" if self.au is None else f", AU {self.au:.3f}"
        name = f"{self.name}: " if self.name else ""
        return (
            f"{name}{self.batches} batches in {self.wall * scale:.3f} {unit}, waited {waited:.0%}{au}\n"
            f"load {self.load * scale:.3f} {unit}, compute {self.compute * scale:.3f} {unit}\n"
            f"{self.verdict}: at best {self.ideal * scale:.3f} {unit}. "
            f"Overlap can still gain at most {self.remaining_speedup:.2f} x.\n{self.advice}"
        )

    def _repr_html_(self) -> str:
        """Draw two bars, wait and compute, for notebooks."""
        wall = max(self.wall, 1e-12)
        bars = []
        for label, seconds, colour in (("wait", self.wait, "#c44e52"), ("compute", self.compute, "#4c72b0")):
            width = 100 * min(1.0, seconds / wall)
            bars.append(
                f'<div style="background:{colour};width:{width:.1f}%;height:1.2em" '
                f'title="{label} {seconds:.3f} s, {width:.0f} %"></div>'
            )
        strip = '<div style="display:flex;max-width:40em">' + "".join(bars) + "</div>"
        return f"<div>{strip}<pre>{html.escape(str(self))}</pre></div>"
