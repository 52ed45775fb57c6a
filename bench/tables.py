#!/usr/bin/env python3
"""Fills the tables of the READMEs from bench/results, so that their numbers are those files'.

    python3 bench/tables.py            # writes what stands between `<!-- table NAME begin -->` and `... end -->`
    python3 bench/tables.py --check    # changes nothing; fails if a table is not what the files say

Where a figure has two others in brackets behind it, it is the median of the rounds, and they are the quartiles. Ratios
are of figures of the same round.
"""

import csv
import re
import sys
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = [ROOT / "README.md", ROOT / "bench" / "README.md"]

# Places where loaders are measured, with a trainer too.
PLACES = [(kind, cache) for cache in ("cold", "warm") for kind in ("tokens", "images")]


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
    if size >= 10_000:
        return f"{round(value):,}".replace(",", " ")
    digits = 0 if value == 0 or size >= 100 else 1 if size >= 10 else 2 if size >= 0.995 else 3
    return f"{value:.{digits}f}"


def ratio(value):
    return f"{value:.2f}" if value < 10 else number(value)


def percent(value):
    return f"{100 * value:.1f} %"


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


def words(text):
    """What a program said, for a cell."""
    text = text if len(text) <= 160 else text[:157] + "..."
    # Neither a bar nor a backtick may end the cell.
    return "`" + text.replace("|", "/").replace("`", "'") + "`"


def speed(values, errors, rounds):
    """The median with the quartiles, and in how many rounds it failed and why."""
    failed = [f"failed in {len(errors)} of {rounds} rounds: {words(errors[0])}"] if errors else []
    return "; ".join([spread(values), *failed] if values else failed)


def table(columns, rows):
    """Markdown. The first column is text, the others are aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def unique(values):
    return list(dict.fromkeys(values))


def size(batch):
    return f"{batch >> 10} KiB" if batch < 1 << 20 else f"{batch >> 20} MiB"


# Hand-offs.


def handoff_groups():
    """The rows of each wait and measure, the best way of each library only, fastest first."""
    head, rows = read("handoff.csv")
    groups = []
    for key in unique((row["measure"], row["wait"]) for row in rows):
        of = sorted((row for row in rows if (row["measure"], row["wait"]) == key), key=lambda row: float(row["min"]))
        best, seen = [], set()
        for row in of:
            by_value = row["role"] == "peer" and not row["way"].startswith("in place")
            if by_value and row["subject"] in seen:
                continue
            if by_value:
                seen.add(row["subject"])
            best.append(row)
        groups.append((*key, sorted(best, key=lambda row: row["role"] != "floor")))
    return head, groups


def handoff():
    head, groups = handoff_groups()
    if not groups:
        return None
    out = [f"{head}."]
    for measure, wait, rows in groups:
        columns = ["", "way", "minimum", "median", "x floor", "CPUs"]
        body = []
        for row in rows:
            of = [row["ratio_lower_quartile"], row["median_ratio_to_floor"], row["ratio_upper_quartile"]]
            low, middle, high = (ratio(float(value)) if value else "" for value in of)
            name = f"**{row['subject']}**" if row["role"] == "ours" else row["subject"]
            figures = [number(float(row[column])) for column in ("min", "median")]
            against = f"{middle} [{low}, {high}]" if middle else ""
            body.append([name, row["way"], *figures, against, f"{float(row['cpus']):.2f}"])
        out.append(f"**{measure}, {wait}** ({rows[0]['unit']})\n\n{table(columns, body)}")
    return "\n\n".join(out)


# The disk.


def with_quartiles(row, prefix="", show=number):
    low, middle, high = (show(float(row[f"{prefix}{which}"])) for which in ("lower", "median", "upper"))
    return middle if low == middle == high else f"{middle} [{low}, {high}]"


def disk(section):
    """All tables of a section: a row a subject, a column a figure; ratios where there is a reference."""
    head, rows = read(f"disk-{section}.csv")
    if not rows:
        return None
    out = [f"{head}."]
    for title in unique(row["table"] for row in rows):
        of = [row for row in rows if row["table"] == title]
        columns = unique(row["column"] for row in of)
        compared = {row["column"] for row in of if row["ratio_median"]}
        found = {(row["subject"], row["column"]): row for row in of}
        heads = [""]
        for column in columns:
            heads += [column, "ratio"] if column in compared else [column]
        body = []
        for subject in unique(row["subject"] for row in of):
            line = [subject]
            for column in columns:
                row = found.get((subject, column))
                # The figures that a table is about have their spread, the others explain them.
                about = column in compared or column == columns[0]
                line.append("" if not row else with_quartiles(row) if about else number(float(row["median"])))
                if column in compared:
                    line.append(with_quartiles(row, "ratio_", ratio) if row and row["ratio_median"] else "")
            body.append(line)
        out.append(f"**{title}** ({of[0]['rounds']} rounds)\n\n{table(heads, body)}")
    return "\n\n".join(out)


def random_short():
    """What the loader reaches of the best of fio in the same round."""
    head, rows = read("disk-random.csv")
    if not rows:
        return None
    of = [row for row in rows if row["column"] == "MiB/s"]
    titles = unique(row["table"] for row in of)
    body = []
    for subject in unique(row["subject"] for row in of if row["subject"].startswith("loader")):
        line = [subject.replace("loader, ", "").replace("loader", "default")]
        for title in titles:
            row = next(row for row in of if (row["table"], row["subject"]) == (title, subject))
            line.append(f"{number(float(row['median']))} MiB/s, {with_quartiles(row, 'ratio_', ratio)}")
        body.append(line)
    return table(["", *(title.split("records of ")[1] for title in titles)], body) + f"\n\n{head}."


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
        for at in ratios:
            row = of.get(at)
            found = over_ideal(row) if row else ""
            cells.append(f"**{found}**" if row and row["counts"] == "true" else found)
        body.append([f"{cache}, {size(batch)}", load, *cells])
    text = table(["depth 2", "load, ms", *(f"compute = {at} load" for at in ratios)], body)
    counts = [row for row in rows if row["counts"] == "true"]
    if counts:
        ideal, own = ([float(row[column]) for row in counts] for column in ("over_ideal", "wall_over_own"))
        worst = max(counts, key=lambda row: float(row["over_ideal"]))
        where = f"{worst['cache']}, {size(int(worst['batch_bytes']))}, depth {worst['depth']}, ratio {worst['ratio']}"
        text += (
            f"\n\n**Bold**: load and compute take 1 ms or more. Of the {len(counts)} such cells, at all depths: median"
            f" with quartiles {spread(ideal, '{:.3f}'.format)}; worst {over_ideal(worst)} ({where}). By the load that the"
            f" loader itself measured in the same epoch (`wall_over_own`): {spread(own, '{:.3f}'.format)}, worst"
            f" {max(own):.3f}."
        )
    return f"{head}.\n\n{text}"


def over_ideal(row):
    low, middle, high = (ratio(float(row[f"over_ideal{which}"])) for which in ("_lower", "", "_upper"))
    return middle if low == middle == high else f"{middle} [{low}, {high}]"


# Loaders.


class Loaders:
    """The runs of loaders.csv."""

    def __init__(self):
        self.head, self.rows = read("loaders.csv")
        self.subjects = unique(row["subject"] for row in sorted(self.rows, key=lambda row: row["round"] != "0"))
        # In the order of loaders-same.csv, which is that of the program.
        _, same = read("loaders-same.csv")
        order = unique(row["subject"] for row in same)
        same = [row for row in same if not row["error"]]
        self.subjects.sort(key=lambda subject: order.index(subject) if subject in order else len(order))
        # Whether a subject keeps the order, of those of which that is known.
        self.order = {}
        for row in same:
            kept = self.order.get(row["subject"], "yes") == "yes" and row["order_right"] == "true"
            self.order[row["subject"]] = "yes" if kept else "NO"
        self.memory = {}
        for row in same:
            added = float(row["memory_most_mib"]) - float(row["memory_ready_mib"])
            self.memory[row["subject"], row["kind"]] = added
        # By place and round: what was measured, and why a run failed.
        self.index, self.errors = {}, {}
        for row in self.rows:
            place = (row["subject"], row["kind"], row["order"], row["cache"], row["trains"] == "true")
            if row["error"]:
                self.errors.setdefault(place, []).append(row["error"])
            else:
                self.index.setdefault(place, {})[row["round"]] = row

    def rounds(self):
        return len({row["round"] for row in self.rows})

    def speed(self, *place):
        return speed(self.values("samples_per_s", *place), self.errors.get(place), self.rounds())

    def values(self, column, *place):
        return [float(row[column]) for _, row in sorted(self.index.get(place, {}).items())]

    def against(self, column, place, other):
        """Ratios round by round."""
        ours, theirs = self.index.get(place, {}), self.index.get(other, {})
        return [float(ours[n][column]) / float(theirs[n][column]) for n in sorted(ours) if n in theirs]

    def slowdown(self, *place):
        return [float(row["step_us"]) / float(row["step_alone_us"]) for _, row in sorted(self.index.get(place, {}).items())]

    def best(self, library, kind, cache):
        """The setting of a library with the most samples a second."""
        of = [subject for subject in self.subjects if library_of(subject) == library]
        speeds = {subject: self.values("samples_per_s", subject, kind, "shuffled", cache, False) for subject in of}
        found = [subject for subject in of if speeds[subject]]
        return max(found, key=lambda subject: median(speeds[subject])) if found else None


def library_of(subject):
    return re.sub(r" (\d+|direct)$", "", subject)


def loaders(kind, cache):
    """All figures of shuffled records of one kind."""
    found = Loaders()
    if not found.rows:
        return None
    body = []
    for subject in found.subjects:
        alone, trained = ((subject, kind, "shuffled", cache, trains) for trains in (False, True))
        if alone not in found.index and alone not in found.errors:
            continue
        ours = ("twinbuf", *alone[1:])
        memory = found.memory.get((subject, kind))
        body.append(
            [
                subject,
                found.speed(*alone),
                "" if subject == "twinbuf" else spread(found.against("samples_per_s", ours, alone), ratio),
                spread(found.values("cpu_us_per_sample", *alone)),
                spread(found.values("first_ms", *alone)),
                found.speed(*trained),
                spread(found.values("au", *trained), "{:.2f}".format),
                spread(found.slowdown(*trained), "{:.2f}".format),
                "" if memory is None else number(memory),
                found.order.get(subject, ""),
            ]
        )
    columns = ["", "samples/s", "twinbuf / it", "CPU us a sample", "first batch, ms", "with a trainer: samples/s", "AU"]
    return table([*columns, "slowdown", "MiB", "order"], body)


def loaders_sequential():
    found = Loaders()
    if not found.rows:
        return None
    columns, body = [""], []
    for kind, cache in PLACES:
        columns += [f"{kind}, {cache}", "twinbuf / it"]
    for subject in found.subjects:
        line = [subject]
        for kind, cache in PLACES:
            place, ours = ((name, kind, "sequential", cache, False) for name in (subject, "twinbuf"))
            line.append(found.speed(*place))
            line.append("" if subject == "twinbuf" else spread(found.against("samples_per_s", ours, place), ratio))
        body.append(line)
    return table(columns, body)


def loaders_head():
    found = Loaders()
    return f"{found.head}; {found.rounds()} rounds." if found.rows else None


def loaders_short():
    """Each library at its best setting for images from the disk."""
    found = Loaders()
    if not found.rows:
        return None
    body = []
    for library in unique(map(library_of, found.subjects)):
        subject = found.best(library, "images", "cold")
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
    columns = ["", "samples/s", "CPU us a sample", "AU beside a trainer", "the trainer's slowdown", "order kept"]
    return table(columns, body) + f"\n\n{loaders_head()}"


def decode():
    head, rows = read("decode.csv")
    if not rows:
        return None
    rounds = len({row["round"] for row in rows})
    speeds, body = {}, []
    for row in rows:
        of = speeds.setdefault(row["subject"], {})
        if not row["error"]:
            of[row["round"]] = float(row["samples_per_s"])
    twinbuf = speeds.get("twinbuf 2", {})
    for subject, of in speeds.items():
        errors = [row["error"] for row in rows if row["subject"] == subject and row["error"]]
        ours = [twinbuf[n] / of[n] for n in of if n in twinbuf]
        kept = all(row["order_right"] == "true" for row in rows if row["subject"] == subject and not row["error"])
        figures = [speed(list(of.values()), errors, rounds), spread(ours, ratio)]
        body.append([subject, *figures, ("yes" if kept else "NO") if of else ""])
    return table(["", "samples/s", "twinbuf 2 / it", "order kept"], body) + f"\n\n{head}; {rounds} rounds."


def same():
    """Whether the batches are right, and the memory that they take."""
    _, rows = read("loaders-same.csv")
    if not rows:
        return None
    body = []
    for subject in unique(row["subject"] for row in rows):
        of = [row for row in rows if row["subject"] == subject]

        def say(column, of=of):
            return "yes" if all(row[column] == "true" for row in of) else "NO"

        if errors := [row["error"] for row in of if row["error"]]:
            body.append([subject, f"failed: {words(errors[0])}", *[""] * 5])
            continue

        def memory(kind, of=of):
            added = [float(row["memory_most_mib"]) - float(row["memory_ready_mib"]) for row in of if row["kind"] == kind]
            return number(max(added)) if added else ""

        ready = number(max(float(row["memory_ready_mib"]) for row in of))
        figures = [memory(kind) for kind in ("tokens", "images")]
        body.append([subject, say("order_right"), say("content_right"), say("repeated"), ready, *figures])
    columns = ["", "order as asked", "content", "same again", "MiB when ready", "MiB more, tokens", "MiB more, images"]
    return table(columns, body)


def failure(row):
    """One outcome in a cell."""
    text = row["outcome"]
    if row["right"] == "false":
        text += "; **not the batches asked for**"
    return f"{text}: {words(row['words'])}" if row["words"] else text


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


def train():
    """What the main job printed, with the machine in the first line."""
    path = RESULTS / "train.txt"
    if not path.exists():
        return None
    head, *lines = path.read_text().rstrip().splitlines()
    return "\n".join([f"{head}:", "", "```text", *lines, "```"])


TABLES = {
    "handoff": handoff,
    **{f"disk-{section}": lambda section=section: disk(section)
       for section in ("random", "sequential", "shuffled", "resident", "ranks", "memory")},
    "random-short": random_short,
    "scaling": scaling,
    "loaders-head": loaders_head,
    "loaders-short": loaders_short,
    **{f"loaders-{kind}-{cache}": lambda kind=kind, cache=cache: loaders(kind, cache) for kind, cache in PLACES},
    "loaders-sequential": loaders_sequential,
    "loaders-same": same,
    "decode": decode,
    "failures": failures,
    "train": train,
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
