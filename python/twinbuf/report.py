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
BOUND = 1.25


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
    depth, workers
        The slots of each reading thread and the number of these threads, as the environment may have set
        them; None of a loop that is no `Loader`.
    with_prefetch
        What the same steps would take with `prefetch`, or None where they are overlapped already. It is more
        than `ideal`: the first load and the last use have nothing beside them, and steps differ.
    with_prefetch_at_worst
        The same, if processors that share a core slow each other down as much as they can. More than
        `with_prefetch` only where loading and use both take processors and there may be too few.
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
    depth: int | None = None
    workers: int | None = None
    with_prefetch: float | None = None
    with_prefetch_at_worst: float | None = None
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
        if self.compute >= BOUND * self.load:
            return "ComputeBound"
        return "LoadBound" if self.load >= BOUND * self.compute else "Balanced"

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values, without the steps: to log them, or to write them as JSON."""
        figures = {each.name: getattr(self, each.name) for each in fields(self)}
        del figures["steps"], figures["text"]
        derived = ("au", "ideal", "possible_speedup", "remaining_speedup", "verdict")
        return figures | {key: getattr(self, key) for key in derived}

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the steps as a Chrome trace, which https://ui.perfetto.dev shows.

        It has one row, the loop's: when it waited and when it computed. `Loader(..., trace=path)` writes one
        with the rows of the reading threads, too.
        """
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": self.name or "loop"}}
        ]
        for step in self.steps:
            args = {"epoch": step.epoch, "step": step.step}
            # Whole nanoseconds: a span begins where the one before it ends.
            received = step.start + step.wait
            asked, received, done = (
                round(seconds * 1e9) for seconds in (step.start, received, received + step.compute)
            )
            for name, start, end in ("wait", asked, received), ("compute", received, done):
                event = {"ph": "X", "name": name, "pid": 1, "tid": 1, "args": args}
                events.append(event | {"ts": start / 1000, "dur": (end - start) / 1000})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def __str__(self) -> str:
        if self.text is not None:
            return self.text
        if self.batches == 0:
            return "Nothing was measured."
        unit, scale = ("ms", 1e3) if self.wall < 0.5 else ("s", 1.0)
        waited = self.wait / self.wall if self.wall > 0 else 0.0
        au = "" if self.au is None else f", AU {self.au:.3f}"
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        prefetch = ""
        if self.with_prefetch:
            best = f"{max(1.0, self.wall / self.with_prefetch):.2f} x"
            worst = f"{max(1.0, self.wall / (self.with_prefetch_at_worst or self.with_prefetch)):.2f}"
            prefetch = f", `prefetch` {best}" if best == f"{worst} x" else f", `prefetch` {worst} to {best}"
        name = f"{self.name}: " if self.name else ""
        return (
            f"{name}{batches} in {self.wall * scale:.3f} {unit}, waited {waited:.0%}{au}\n"
            f"load {self.load * scale:.3f} {unit}, compute {self.compute * scale:.3f} {unit}\n"
            f"{self.verdict}: at best {self.ideal * scale:.3f} {unit}. "
            f"Overlap can still gain at most {self.remaining_speedup:.2f} x{prefetch}.\n{self.advice}"
        )

    def _repr_html_(self) -> str:
        """Draw where the time went, for notebooks: the text has the page's colour, light or dark."""
        return f"<div>{_svg(self)}<pre>{html.escape(str(self))}</pre></div>"


_WAIT, _COMPUTE, _BEST = "#d9594c", "#4c86c6", "#5a9e6f"  # on white and on black alike

# The steps that the picture shows.
_DRAWN = 40


@dataclass(frozen=True)
class _Span:
    """A rectangle of the picture: seconds from the left end, its length, and what it stands for."""

    start: float
    seconds: float
    colour: str
    title: str


def _svg(report: Report) -> str:
    """Draw the bars: as it was, with `prefetch`, at best; and the last steps."""
    wait = _Span(0.0, report.wait, _WAIT, "wait")
    bars = [("as it was", [wait, _Span(report.wait, report.compute, _COMPUTE, "compute")])]
    if report.with_prefetch is not None:
        bars.append(("with prefetch", [_Span(0.0, report.with_prefetch, _BEST, "with prefetch")]))
    bars.append(("at best", [_Span(0.0, report.ideal, _BEST, "the longer of load and compute")]))
    wall = max(report.wall, report.ideal)
    rows = [(label, spans, wall) for label, spans in bars]
    steps = report.steps[-_DRAWN:]
    if steps:
        spans = []
        for step in steps:
            start, name = step.start - steps[0].start, f"epoch {step.epoch}, step {step.step}"
            spans.append(_Span(start, step.wait, _WAIT, f"{name}: wait"))
            spans.append(_Span(start + step.wait, step.compute, _COMPUTE, f"{name}: compute"))
        rows.append((f"last {len(steps)} steps", spans, spans[-1].start + spans[-1].seconds))
    parts = []
    for row, (label, spans, length) in enumerate(rows):
        y, scale = 8 + 26 * row, 560 / max(length, 1e-12)
        parts.append(f'<text x="0" y="{y + 14}" fill="currentColor">{html.escape(label)}</text>')
        for span in spans:
            parts.append(
                f'<rect x="{120 + scale * span.start:.2f}" y="{y}" width="{scale * span.seconds:.2f}" '
                f'height="18" fill="{span.colour}"><title>{span.title} {span.seconds:.4g} s</title></rect>'
            )
    height = 8 + 26 * len(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 690 {height}" width="690" role="img" '
        f'aria-label="where the time went" font-family="sans-serif" font-size="13">{"".join(parts)}</svg>'
    )
