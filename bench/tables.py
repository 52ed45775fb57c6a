#!/usr/bin/env python3
"""Fills the tables of bench/README.md from bench/results/*.csv, so that their numbers are those files'.

    python3 bench/tables.py            # writes what stands between `<!-- table NAME begin -->` and `... end -->`
    python3 bench/tables.py --check    # changes nothing; fails if a table is not what the files say
"""

import csv
import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = [ROOT / "bench" / "README.md"]

KINDS = ["tokens", "images"]
# Columns of the tables of loaders: order and cache.
PLACES = [(order, cache) for order in ("sequential", "shuffled") for cache in ("cold", "warm")]


def read(name):
    """The head of a file (its first comment) and its rows; no rows if there is no such file."""
    path = RESULTS / name
    if not path.exists():
        return "", []
    lines = path.read_text().splitlines()
    head = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    return head[0] if head else "", list(csv.DictReader(line for line in lines if not line.startswith("#")))


def number(value):
    """Three digits or more."""
    size = abs(value)
    digits = 0 if value == 0 or size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"


def thousands(value):
    return f"{round(value):,}".replace(",", " ")


def percent(value):
    return f"{100 * value:.1f} %"


def table(columns, rows):
    """Markdown. The first column is text, the others are aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def unique(values):
    return list(dict.fromkeys(values))


def loaders(compute, column, show):
    """A table of one figure: a row a subject, a column a place."""
    _, rows = read("loaders.csv")
    if not rows:
        return None
    found = {}
    for row in rows:
        if row["compute"] == compute:
            found[row["subject"], row["kind"], row["order"], row["cache"]] = float(row[column])
    places = [(kind, *place) for kind in KINDS for place in PLACES]
    body = [
        [subject, *(show(found[subject, *place]) if (subject, *place) in found else "" for place in places)]
        for subject in unique(row["subject"] for row in rows)
    ]
    if compute == "balanced":
        times = {(row["kind"], row["order"], row["cache"]): row["compute_us"] for row in rows if row["compute"] == compute}
        body.append(["*compute, us a batch*", *(number(float(times.get(place, 0))) for place in places)])
    return table(["", *(f"{kind}, {order}, {cache}" for kind, order, cache in places)], body)


def loaders_head():
    head, rows = read("loaders.csv")
    if not rows:
        return None
    rounds = min(int(row["rounds"]) for row in rows)
    return f"{head}; {rounds} rounds."


def same():
    """Whether the batches are right, everywhere, and the memory that they take."""
    _, rows = read("loaders-same.csv")
    if not rows:
        return None
    body = []
    for subject in unique(row["subject"] for row in rows):
        of = [row for row in rows if row["subject"] == subject]

        def say(column, of=of):
            return "yes" if all(row[column] == "true" for row in of) else "NO"

        def memory(kind, of=of):
            added = [float(row["memory_most_mib"]) - float(row["memory_ready_mib"]) for row in of if row["kind"] == kind]
            return number(max(added)) if added else ""

        ready = number(max(float(row["memory_ready_mib"]) for row in of))
        body.append([subject, say("order_right"), say("content_right"), say("repeated"), ready, *map(memory, KINDS)])
    columns = ["", "order as asked", "content", "same again", "MiB when ready", "MiB more, tokens", "MiB more, images"]
    return table(columns, body)


def failure(row):
    """One outcome in a cell."""
    text = row["outcome"]
    if row["right"] == "false":
        text += "; **not the batches asked for**"
    words = row["words"]
    if words:
        words = words if len(words) <= 160 else words[:157] + "..."
        # Neither a bar nor a backtick may end the cell.
        text += ": `" + words.replace("|", "/").replace("`", "'") + "`"
    return text


def failures():
    _, rows = read("failures.csv")
    if not rows:
        return None
    faults = unique(row["fault"] for row in rows)
    found = {(row["subject"], row["fault"]): failure(row) for row in rows}
    possible = {row["fault"]: row["possible"] for row in rows}
    lines = [["", *(f"{fault} (possible before: {possible[fault]})" for fault in faults)], ["---"] * (1 + len(faults))]
    for subject in unique(row["subject"] for row in rows):
        lines.append([subject, *(found.get((subject, fault), "no process to kill") for fault in faults)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def loaders_short():
    """The summary: the case where it matters most, and what it costs."""
    _, rows = read("loaders.csv")
    _, checks = read("loaders-same.csv")
    if not rows or not checks:
        return None
    find = {(row["subject"], row["kind"], row["order"], row["cache"], row["compute"]): row for row in rows}
    body = []
    for subject in unique(row["subject"] for row in rows):
        line = [subject]
        for kind in KINDS:
            fast = find.get((subject, kind, "shuffled", "cold", "none"))
            busy = find.get((subject, kind, "shuffled", "cold", "balanced"))
            line.append(number(float(fast["first_ms"])) if fast else "")
            line.append(thousands(float(fast["samples_per_s"])) if fast else "")
            line.append(percent(float(busy["wait_share"])) if busy else "")
            line.append(number(float(busy["cpu_us_per_sample"])) if busy else "")
        added = [
            float(row["memory_most_mib"]) - float(row["memory_ready_mib"])
            for row in checks
            if row["subject"] == subject and row["kind"] == "images"
        ]
        body.append([*line, number(max(added)) if added else ""])
    columns = [""]
    for kind in KINDS:
        columns += [f"{kind}: first, ms", "then a second", "waiting", "CPU us each"]
    return table([*columns, "MiB, images"], body)


def size(batch):
    return f"{batch >> 10} KiB" if batch < 1 << 20 else f"{batch >> 20} MiB"


def scaling():
    """Wall time over the ideal at depth 2, by cache and batch size; and the median and worst of what counts."""
    head, rows = read("scaling.csv")
    if not rows:
        return None
    two = [row for row in rows if row["depth"] == "2"]
    ratios = unique(row["ratio"] for row in two)
    body = []
    for cache, batch in unique((row["cache"], int(row["batch_bytes"])) for row in two):
        of = {row["ratio"]: row for row in two if (row["cache"], int(row["batch_bytes"])) == (cache, batch)}
        load = number(median(float(row["load_ms"]) for row in of.values()))
        cells = []
        for ratio in ratios:
            row = of.get(ratio)
            found = f"{float(row['wall_over_ideal']):.2f}" if row else ""
            cells.append(f"**{found}**" if row and row["counts"] == "true" else found)
        body.append([f"{cache}, {size(batch)}", load, *cells])
    text = table(["depth 2", "load, ms", *(f"compute = {ratio} load" for ratio in ratios)], body)
    counts = [row for row in rows if row["counts"] == "true"]
    if counts:
        ideal, own = ([float(row[column]) for row in counts] for column in ("wall_over_ideal", "wall_over_own"))
        text += (
            f"\n\n**Bold**: load and compute take 1 ms or more. Of the {len(counts)} such cells, at all depths: median"
            f" {median(ideal):.3f}, worst {max(ideal):.3f}; by the load that the loader itself measured in the same epoch"
            f" (`wall_over_own`), median {median(own):.3f}, worst {max(own):.3f}."
        )
    return f"{head}.\n\n{text}"


TABLES = {
    "loaders": loaders_short,
    "loaders-head": loaders_head,
    "loaders-speed": lambda: loaders("none", "samples_per_s", thousands),
    "loaders-wait": lambda: loaders("balanced", "wait_share", percent),
    "loaders-cpu": lambda: loaders("balanced", "cpu_us_per_sample", number),
    "loaders-first": lambda: loaders("none", "first_ms", number),
    "loaders-same": same,
    "failures": failures,
    "scaling": scaling,
}


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
