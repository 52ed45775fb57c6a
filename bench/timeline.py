#!/usr/bin/env python3
"""Draws the README's picture: the same steps of the main job, serial and with two buffers, from measured traces.

    python3 bench/timeline.py [--first STEP] [--steps N] [--runs N] [--out docs/timeline.svg]

Runs `cargo run --release --example train` alternately in the modes `serial` and `double+willneed`, each with a
trace, and draws the run of each mode in which those steps took the median time. The bars are the spans of its trace:
`disk_load` on the reader's row, `train` and `queue_wait` on the trainer's.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
from pathlib import Path

from pictures import Picture

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ["cargo", "run", "--quiet", "--release", "--example", "train", "--", "--rounds", "1"]
MODES = [("serial", "one buffer: read, then train"), ("double+willneed", "two buffers: read while training")]
SPANS = {"disk_load": "read", "train": "train", "queue_wait": "wait"}
LEFT, WIDE, ROW, GAP = 60, 750, 22, 5


def trace(mode):
    """The spans of one epoch: (kind, step, start, end) in ms."""
    path = ROOT / "target" / "twinbuf" / f"timeline-{mode}.json"
    subprocess.run([*COMMAND, "--mode", mode, "--trace", str(path)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    spans = []
    for event in json.loads(path.read_text()):
        kind = SPANS.get(event.get("name"))
        if event.get("ph") == "X" and kind:
            start, end = event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000
            spans.append((kind, event["args"]["step"], start, end))
    return spans


def window(spans, first, steps):
    """The spans between the end of the step before the first one and the end of the last one; times from 0."""
    begin = min(end for kind, step, _, end in spans if step == first - 1 and kind == "train")
    end = max(end for kind, step, _, end in spans if step == first + steps - 1 and kind == "train")
    cut = [(kind, step, max(start, begin) - begin, min(stop, end) - begin) for kind, step, start, stop in spans]
    return [span for span in cut if span[2] < span[3]], end - begin


def machine():
    text = Path("/proc/cpuinfo").read_text()
    vendor = re.search(r"model name\s*: (.*)", text)[1].strip()
    family = re.search(r"cpu family\s*: (\d+)", text)[1]
    return f"{os.cpu_count()} vCPU of {vendor} (family {family}), {platform.system()} {platform.release().split('-')[0]}"


def tick(long):
    """1, 2 or 5 times a power of ten, for at most 10 marks."""
    power = 10 ** (len(str(int(long / 10))) - 1)
    return next(power * n for n in (1, 2, 5, 10) if power * n * 10 >= long)


def draw(found, args):
    first, steps = args.first, args.steps
    longest = max(long for _, long in found.values())
    scale = WIDE / longest
    picture = Picture(
        "Measured timeline: serial against double buffering",
        [
            f"Steps {first} to {first + steps - 1} of the main job, each 4 MiB, cold page cache, the median of {args.runs} runs. "
            f"{machine()}; {datetime.date.today()}."
        ],
    )
    for mode, title in MODES:
        spans, long = found[mode]
        gain = "" if long == longest else f": {longest / long:.2f} × faster"
        picture.text(LEFT, picture.y, f"{title}: {long:.0f} ms for {steps} steps{gain}", "title")
        picture.y += 8
        for row, kinds in (("reader", {"read"}), ("trainer", {"train", "wait"})):
            picture.text(LEFT - 8, picture.y + 15, row, "name")
            picture.rect(LEFT, picture.y, WIDE, ROW, "lane")
            for kind, step, start, stop in sorted(spans, key=lambda span: span[2]):
                if kind in kinds:
                    x, width = LEFT + start * scale, (stop - start) * scale
                    picture.rect(x, picture.y, width, ROW, kind)
                    if kind != "wait" and width > 20:
                        picture.text(x + width / 2, picture.y + 15, step, "in")
            picture.y += ROW + GAP
        picture.y += 26
    axis = picture.y - 22
    for at in range(0, int(longest) + 1, tick(longest)):
        picture.rect(LEFT + at * scale, axis, 1, 5, "floor")
        picture.text(LEFT + at * scale, axis + 17, f"{at} ms", "small mid")
    for at, (kind, text) in enumerate((("read", "read one batch"), ("train", "train on it"), ("wait", "the trainer waits"))):
        picture.rect(LEFT + 150 * at, axis + 30, 14, 12, kind)
        picture.text(LEFT + 150 * at + 20, axis + 40, text)
    picture.write(args.out, axis + 52)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=40)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "timeline.svg")
    args = parser.parse_args()
    runs = {mode: [] for mode, _ in MODES}
    for _ in range(args.runs):
        for mode, _ in MODES:
            runs[mode].append(window(trace(mode), args.first, args.steps))
    # The run of the median.
    found = {mode: sorted(every, key=lambda run: run[1])[len(every) // 2] for mode, every in runs.items()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(found, args)
    print(f"{args.out}: " + ", ".join(f"{mode} {long:.1f} ms" for mode, (_, long) in found.items()))


if __name__ == "__main__":
    main()
