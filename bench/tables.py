#!/usr/bin/env python3
"""Fills the tables of the READMEs with the numbers of the files in bench/results.

    python3 bench/tables.py            # writes what stands between `<!-- table NAME begin -->` and `... end -->`
    python3 bench/tables.py --check    # changes nothing; fails if a table differs from the files

A figure followed by two others in brackets is the median of the rounds, followed by the quartiles. Ratios are of
figures of the same round.
"""

import csv
import re
import sys
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = [ROOT / "README.md", ROOT / "bench" / "README.md"]


def read(name):
    """The head of a file (its first comment) and its rows; no rows if the file does not exist."""
    path = RESULTS / name
    if not path.exists():
        return "", []
    lines = path.read_text().splitlines()
    head = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    return head[0] if head else "", list(csv.DictReader(line for line in lines if not line.startswith("#")))


def number(value):
    """Three digits or more."""
    size = abs(value)
    if size >= 10_000:
        return f"{round(value):,}".replace(",", " ")
    digits = 0 if value == 0 or size >= 100 else 1 if size >= 10 else 2 if size >= 0.995 else 3
    return f"{value:.{digits}f}"


def ratio(value):
    return f"{value:.2f}" if value < 10 else number(value)


def quartiles(values):
    if len(values) < 2:
        return (values[0],) * 3
    return tuple(quantiles(values, n=4, method="inclusive"))


def spread(values, show=number):
    """The median with the quartiles."""
    if not values:
        return ""
    low, middle, high = quartiles(values)
    return show(middle) if len(values) < 2 else f"{show(middle)} [{show(low)}, {show(high)}]"


def table(columns, rows):
    """Markdown. The first column is text, the others are right-aligned."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def unique(values):
    return list(dict.fromkeys(values))


def size(batch):
    return f"{batch >> 10} KiB" if batch < 1 << 20 else f"{batch >> 20} MiB"


# Loaders.


class Loaders:
    """The runs of loaders.csv."""

    def __init__(self):
        self.head, self.rows = read("loaders.csv")
        self.subjects = unique(row["subject"] for row in sorted(self.rows, key=lambda row: row["round"] != "0"))
        # In the order of loaders-same.csv, the program's order.
        _, same = read("loaders-same.csv")
        order = unique(row["subject"] for row in same)
        same = [row for row in same if not row["error"]]
        self.subjects.sort(key=lambda subject: order.index(subject) if subject in order else len(order))
        # Whether a subject keeps the order, for subjects with a known result.
        self.order = {}
        for row in same:
            kept = self.order.get(row["subject"], "yes") == "yes" and row["order_right"] == "true"
            self.order[row["subject"]] = "yes" if kept else "NO"
        # By place and round.
        self.index = {}
        for row in self.rows:
            place = (row["subject"], row["kind"], row["order"], row["cache"], row["trains"] == "true")
            if not row["error"]:
                self.index.setdefault(place, {})[row["round"]] = row

    def rounds(self):
        return len({row["round"] for row in self.rows})

    def values(self, column, *place):
        return [float(row[column]) for _, row in sorted(self.index.get(place, {}).items())]

    def slowdown(self, *place):
        return [float(row["step_us"]) / float(row["step_alone_us"]) for _, row in sorted(self.index.get(place, {}).items())]

    def best(self, library, kind, cache):
        """The setting of a library with the most samples a second."""
        of = [subject for subject in self.subjects if library_of(subject) == library]
        return self.fastest(of, kind, "shuffled", cache, False)

    def fastest(self, of, *place):
        """The one of these subjects with the most samples a second."""
        speeds = {subject: found for subject in of if (found := self.values("samples_per_s", subject, *place))}
        return max(speeds, key=lambda subject: median(speeds[subject]), default=None)

    def to_best(self, ours, *place):
        """The rate of `ours` to that of the best other subject of its language that keeps the order."""
        same = bool(PYTHON.search(ours))
        others = [
            subject
            for subject in self.subjects
            if not subject.startswith("twinbuf") and self.order.get(subject) == "yes" and bool(PYTHON.search(subject)) == same
        ]
        mine, best = (self.values("samples_per_s", subject, *place) for subject in (ours, self.fastest(others, *place)))
        return ratio(median(a / b for a, b in zip(mine, best))) if mine and best else None


# The names of Python's subjects.
PYTHON = re.compile(r" py\b|^(torch|SPDL|Grain)\b")


def library_of(subject):
    return re.sub(r" (\d+|direct)$", "", subject)


def loaders_short():
    """twinbuf's default, and each library at its best setting, for images from the disk."""
    found = Loaders()
    if not found.rows:
        return None
    body = []
    best = (found.best(library, "images", "cold") for library in unique(map(library_of, found.subjects)))
    for subject in unique(["twinbuf", *best]):
        if subject is None:
            continue
        alone, trained = ((subject, "images", "shuffled", "cold", trains) for trains in (False, True))
        body.append(
            [
                subject,
                spread(found.values("samples_per_s", *alone)),
                spread(found.values("cpu_us_per_sample", *alone)),
                spread(found.values("au", *trained), "{:.2f}".format),
                spread(found.slowdown(*trained), "{:.2f}".format),
                found.order.get(subject, ""),
            ]
        )
    columns = ["", "samples/s", "CPU us a sample", "AU with a trainer", "the trainer's slowdown", "order kept"]
    return table(columns, body) + f"\n\n{found.head}; {found.rounds()} rounds."


def loaders_cells():
    """In each place, twinbuf's default to the best other subject that keeps the order: Rust's, then Python's."""
    found = Loaders()
    if not found.rows:
        return None
    body = []
    for place in unique((row["kind"], row["order"]) for row in found.rows):
        runs = [(*place, cache, trains) for cache in ("cold", "warm") for trains in (False, True)]
        pairs = [[found.to_best(ours, *run) for ours in ("twinbuf", "twinbuf py")] for run in runs]
        body.append([", ".join(place), *("; ".join(filter(None, pair)) for pair in pairs)])
    return table(["", "cold", "with a trainer", "warm", "with a trainer"], body)


def train():
    """The output of the main job, with the machine in the first line."""
    path = RESULTS / "train.txt"
    if not path.exists():
        return None
    head, *lines = path.read_text().rstrip().splitlines()
    return "\n".join([f"{head}:", "", "```text", *lines, "```"])


TABLES = {
    "loaders-cells": loaders_cells,
    "loaders-short": loaders_short,
    "train": train,
}


# Weights.


class Weights:
    """The runs of weights.csv."""

    def __init__(self):
        self.head, rows = read("weights.csv")
        self.runs = {}
        for row in rows:
            self.runs.setdefault((row["section"], row["case"], row["way"]), {})[row["round"]] = row

    def ways(self, section, case):
        """The fastest first."""
        found = [way for *of, way in self.runs if of == [section, case]]
        return sorted(found, key=lambda way: median(self.walls(section, case, way).values()))

    def walls(self, section, case, way):
        """The wall time of each round."""
        return {at: float(row["wall_s"]) for at, row in self.runs.get((section, case, way), {}).items()}

    def ratios(self, section, case, way, to):
        """The wall times, to those of another way in the same round."""
        others = self.walls(section, case, to)
        return [wall / others[at] for at, wall in self.walls(section, case, way).items() if at in others]


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    wrong = []

    def fill(match):
        begin, name, old, end = match.groups()
        if name not in TABLES:
            sys.exit(f"tables.py: no such table: {name}; there are {', '.join(TABLES)}")
        new = TABLES[name]()
        if new is None or old.strip() == new:
            return match.group()
        wrong.append(name)
        return f"{begin}\n{new}\n{end}"

    for document in DOCUMENTS:
        text = document.read_text()
        marked = re.compile(r"(<!-- table (\S+) begin -->)\n(.*?)(<!-- table \2 end -->)", re.DOTALL)
        filled = marked.sub(fill, text)
        if filled != text and not check:
            document.write_text(filled)
            print(f"filled: {document.relative_to(ROOT)}")
    if check and wrong:
        sys.exit(f"tables.py: not what bench/results says: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
