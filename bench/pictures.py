#!/usr/bin/env python3
"""Draws the pictures of bench/results from its CSV files.

    python3 bench/pictures.py

They are as wide as a README on GitHub and follow the reader's light or dark theme.
"""

from tables import RESULTS, Loaders, Weights, library_of, number, quartiles, ratio, read, size, unique

WIDTH = 830

STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: bold; font-size: 13px } .name { text-anchor: end } .mid { text-anchor: middle }
.small { font-size: 11px } .note { font-size: 11px; fill: #57606a } .bold { font-weight: bold }
.ours { fill: #d55e00 } .peer { fill: #4a86c0 } .floor { fill: #8b949e } .pale { opacity: .4 }
.spread { stroke: #24292f; stroke-width: 1.2; opacity: .65 } .frame { fill: none; stroke: #57606a }
.cold { fill: #d1495b } .cool { fill: #4a86c0 }
.lane { fill: #eaeef2 } .read { fill: #0072b2 } .train { fill: #00795a } .wait { fill: #d55e00; opacity: .45 }
.in { text-anchor: middle; font-size: 11px; fill: #fff }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .note { fill: #9198a1 } .peer { fill: #3f78b0 } .ours { fill: #e06c10 }
.spread { stroke: #e6edf3 } .frame { stroke: #9198a1 }
.in { fill: #fff } .lane { fill: #21262d } .read { fill: #2f81c7 } .train { fill: #00906b } .wait { fill: #e8853d }
}
"""


class Picture:
    def __init__(self, title, notes):
        self.title, self.parts, self.y = title, [], 22
        self.text(10, self.y, title, "title")
        for note in notes:
            for line in wrapped(note):
                self.y += 16
                self.text(10, self.y, line, "note")
        self.y += 26

    def text(self, x, y, text, style=""):
        text = str(text).replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{text}</text>')

    def rect(self, x, y, width, height, style, more=""):
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}" class="{style}" {more}/>'
        )

    def label(self, x, y, subject, more=""):
        """The name of a subject to the left of its bars, and their style."""
        ours = subject.startswith("twinbuf")
        self.text(x, y, subject + more, "name bold small" if ours else "name small")
        return "ours" if ours else "peer"

    def bar(self, x, y, width, values, end, style, text):
        """A bar to the median, a line from quartile to quartile, and the text after both."""
        low, middle, high = (width * min(value / end, 1.0) for value in values)
        self.rect(x, y - 10, middle, 12, style)
        if low < high:
            self.parts.append(f'<path d="M{x + low:.1f} {y - 4}H{x + high:.1f}" class="spread"/>')
        self.text(x + max(middle, high) + 5, y, text, "small")

    def bars(self, title, rows):
        """Rows over the whole width: (label, style, quartiles, their text); one scale for all."""
        self.text(10, self.y, title, "bold")
        end = max(values[2] for _, _, values, _ in rows)
        for label, style, values, text in rows:
            self.y += 18
            self.text(190, self.y, label, "name bold" if style == "ours" else "name")
            self.bar(198, self.y, 460, values, end, style, text)
        self.y += 32

    def write(self, path, bottom):
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom:.0f}" width="{WIDTH}" role="img">\n'
            f"<title>{self.title}</title>\n<style>{STYLE}</style>\n" + "\n".join(self.parts) + "\n</svg>\n"
        )
        print(f"drawn: {path}")


def wrapped(text, width=135):
    """Lines of at most this many characters."""
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def random_reads():
    head, rows = read("disk-random.csv")
    if not rows:
        return
    rows = [row for row in rows if row["column"] == "MiB/s"]
    picture = Picture(
        "Random reads of a cold file, compared with fio: MiB/s, median and quartiles",
        [f"{head}.", "bench/run.sh disk. In brackets: what it is of the best of fio in the same round, with quartiles."],
    )
    parts = ("lower", "median", "upper")
    for title in unique(row["table"] for row in rows):
        of, bars = [row for row in rows if row["table"] == title], []
        for row in of:
            label = row["subject"].replace("loader, ", "twinbuf, ReadMode::").replace("loader", "twinbuf, default")
            values = [float(row[part]) for part in parts]
            low, middle, high = (float(row[f"ratio_{part}"]) for part in parts)
            text = f"{number(values[1])}  ({middle:.2f}, {low:.2f}–{high:.2f})"
            bars.append((label, "ours" if label.startswith("twinbuf") else "peer", values, text))
        picture.bars(f"{title}, {of[0]['rounds']} rounds", bars)
    picture.write(RESULTS / "random.svg", picture.y - 14)


def heat():
    head, rows = read("scaling.csv")
    if not rows:
        return
    picture = Picture(
        "Wall time of an epoch / ideal, by bytes of a batch (down) and compute / load (across); medians",
        [f"{head}.", "bench/run.sh grid. Framed: load and compute take 1 ms or more a batch. Red from 1 on, full at 1.5; blue below 1."],
    )
    cells = {(row["cache"], row["depth"], row["batch_bytes"], row["ratio"]): row for row in rows}
    depths, ratios = unique(row["depth"] for row in rows), unique(row["ratio"] for row in rows)
    batches = sorted({int(row["batch_bytes"]) for row in rows})
    left, cell, height = 66, 36, 21
    for cache in unique(row["cache"] for row in rows):
        top = picture.y + 22
        for d, depth in enumerate(depths):
            x0 = left + d * (len(ratios) * cell + 11)
            picture.text(x0, picture.y, f"{cache}, depth {depth}", "bold")
            for r, at in enumerate(ratios):
                picture.text(x0 + (r + 0.5) * cell, top - 5, at, "small mid")
            for b, batch in enumerate(batches):
                y = top + b * height
                if d == 0:
                    picture.text(left - 6, y + 14, size(batch), "small name")
                for r, at in enumerate(ratios):
                    row = cells.get((cache, depth, str(batch), at))
                    if row is None:
                        continue
                    over, counts = float(row["over_ideal"]), row["counts"] == "true"
                    share = min((over - 1) / 0.5, 1) if over >= 1 else min((1 - over) / 0.5, 1)
                    fade = (0.85 if counts else 0.4) * share
                    x = x0 + r * cell
                    picture.rect(x, y, cell - 2, height - 2, "cold" if over >= 1 else "cool", f'fill-opacity="{fade:.2f}"')
                    if counts:
                        picture.rect(x, y, cell - 2, height - 2, "frame")
                    shown = f"{over:.2f}" if over < 10 else f"{over:.0f}"
                    picture.text(x + cell / 2 - 1, y + 14, shown, "small mid")
        picture.y = top + len(batches) * height + 26
    picture.write(RESULTS / "scaling.svg", picture.y - 18)


def loaders():
    found = Loaders()
    if not found.rows:
        return
    picture = Picture(
        "Loaders on the same shuffled records: samples a second and CPU time a sample, median and quartiles",
        [
            f"{found.head}; {found.rounds()} rounds.",
            "bench/run.sh loaders. Each library at the number of workers with the most samples a second. "
            "* does not keep the order.",
        ],
    )
    half, line = WIDTH / 2, 18
    libraries = unique(map(library_of, found.subjects))
    bars = [("samples_per_s", "samples/s", 118, 90), ("cpu_us_per_sample", "CPU us a sample", 272, 85)]
    for cache in ("cold", "warm"):
        top = picture.y
        for column, kind in enumerate(("tokens", "images")):
            x = 8 + column * half
            chosen = [subject for subject in (found.best(library, kind, cache) for library in libraries) if subject]
            figures = {
                figure: {subject: quartiles(found.values(figure, subject, kind, "shuffled", cache, False)) for subject in chosen}
                for figure, *_ in bars
            }
            chosen.sort(key=lambda subject: -figures["samples_per_s"][subject][1])
            picture.text(x, top, f"{kind}, {cache}", "bold")
            for _, title, at, _ in bars:
                picture.text(x + at, top, title, "note")
            for i, subject in enumerate(chosen):
                y = top + (i + 1) * line
                style = picture.label(x + 112, y, subject, " *" if found.order.get(subject) == "NO" else "")
                for figure, _, at, width in bars:
                    end = max(high for _, _, high in figures[figure].values())
                    values = figures[figure][subject]
                    picture.bar(x + at, y, width, values, end, style, number(values[1]))
        picture.y = top + (len(libraries) + 1) * line + 24
    picture.write(RESULTS / "loaders.svg", picture.y - 26)


def handoff():
    head, rows = read("handoff.csv")
    rows = [row for row in rows if row["ratio_median"]]
    if not rows:
        return
    picture = Picture(
        "Hand-offs at depth two: median over the rounds of the ratio to the floor, with quartiles; shorter is better",
        [f"{head}.", "bench/run.sh handoff. The best way of each library; bars end at 8 x the floor."],
    )
    half, line, end = WIDTH / 2, 16, 8.0
    groups = unique(row["table"] for row in rows)
    by_value = {row["subject"].split(" (")[0] for row in rows if row["subject"].endswith((" boxes)", "(moved)"))}
    for measure in unique(group.rsplit(", ", 1)[0] for group in groups):
        panels = [group for group in groups if group.startswith(f"{measure}, ")]
        for first in range(0, len(panels), 2):
            top, most = picture.y, 0
            for column, group in enumerate(panels[first : first + 2]):
                x, best, floor = 8 + column * half, {}, None
                for row in sorted((row for row in rows if row["table"] == group), key=lambda row: float(row["ratio_median"])):
                    subject, way = row["subject"].removesuffix(")").split(" (")
                    if subject == "floor":
                        floor = row
                    else:
                        # A library may be there twice: in place and by value.
                        best.setdefault(subject + " in place" * (way.startswith("in place") and subject in by_value), row)
                picture.text(x, top, f"{group}; floor: {number(float(floor['median']))} {floor['column']}", "bold")
                for i, (subject, row) in enumerate(best.items()):
                    y = top + (i + 1) * line + 2
                    style = picture.label(x + 134, y, subject)
                    values = [float(row[f"ratio_{part}"]) for part in ("lower", "median", "upper")]
                    picture.bar(x + 140, y, 210, values, end, style, ratio(values[1]))
                most = max(most, len(best))
            picture.y = top + (most + 1) * line + 22
    picture.write(RESULTS / "handoff.svg", picture.y - 20)


def weights():
    found = Weights()
    if not found.runs:
        return
    picture = Picture(
        "Weights: seconds, median and quartiles; shorter is better",
        [
            f"{found.head}.",
            "bench/weights/run.sh. Every run is cold. In brackets: its ratio to twinbuf in the same round, with quartiles.",
        ],
    )
    names = {
        "compute": "compute alone",
        "load": "loading alone",
        "stream": "twinbuf::stream",
        "read": "read, then compute",
        "thread": "two buffers by hand",
        "map": "mapping",
        "willneed": "mapping, WILLNEED",
        "candle": "candle's mapping",
    }
    tensors = {"ours": "twinbuf_candle::load", "load": "candle's load", "mmap": "candle's mapping"}
    panels = [
        ("layers", "equal", "stream", names, "Three passes over 24 layers of 64 MiB in a control group of 512 MiB"),
        ("candle", "-", "ours", tensors, "A checkpoint of 1.5 GiB into candle's tensors on the CPU"),
    ]
    for section, case, ours, labels, title in panels:
        bars = []
        for way in (way for way in found.ways(section, case) if way in labels):
            values = quartiles(list(found.walls(section, case, way).values()))
            low, middle, high = quartiles(found.ratios(section, case, way, ours))
            style = "ours" if way == ours else "floor" if section == "layers" and way in ("load", "compute") else "peer"
            bars.append((labels[way], style, values, f"{values[1]:.2f}  ({middle:.2f}, {low:.2f}–{high:.2f})"))
        if bars:
            picture.bars(f"{title}, {len(found.walls(section, case, ours))} rounds", bars)
    picture.write(RESULTS / "weights.svg", picture.y - 14)


if __name__ == "__main__":
    for draw in (random_reads, heat, loaders, handoff, weights):
        draw()
