#!/usr/bin/env python3
"""Compares twinbuf with other loaders for Python: the same records, shuffled, in one run on one machine.

    python -m venv target/py && target/py/bin/pip install ./python -r bench/python/requirements.txt
    target/py/bin/python bench/python/loaders.py

Options: --rounds N (5), --size-mib N (96), --epochs N (a run, 1), --cache cold|warm (alone), --only REGEX (subjects),
--kind REGEX, --dir DIR (the disk that is measured), --out DIR, --verify (reads everything once and compares sums, without
timing).

Each run is a separate process (one.py). In a round every subject runs once in each place, in a new order: cold (the
file is not in the page cache) and warm; without compute, and with a trainer that multiplies small matrices for about as
long as the plain loop takes to load a warm batch. Prints the medians with their quartiles, and writes python.csv (every
run) and python.svg into bench/results.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from one import Trainer
from subjects import KINDS, SUBJECTS, Reader, index

HERE = Path(__file__).resolve().parent
BAR = {"cold": "#4c86c6", "warm": "#d9a04c"}


def make(kind: str, path: Path, mib: int) -> None:
    """Write whole batches: every order then uses every record."""
    rng = np.random.default_rng(0)
    _, _, shape, step, size = KINDS[kind]
    with path.open("wb") as file:
        if kind == "tokens":
            header = np.zeros(256, "<i4")
            count = (mib << 19) // (size * step) * size * step + 1
            header[:3] = 20240520, 1, count
            file.write(header.tobytes())
            file.write(rng.integers(0, 50257, count, np.uint16).tobytes())
        elif kind == "texts":
            # 2 KiB on average.
            lengths = rng.integers(100, 3996, (mib << 9) // size * size)
            np.save(index(path), np.concatenate([[0], lengths.cumsum()]))
            file.write(rng.integers(0, 256, lengths.sum(), np.uint8).tobytes())
        else:
            batch = size * int(np.prod(shape))
            file.write(rng.integers(0, 256, (mib << 20) // batch * batch, np.uint8).tobytes())
        file.flush()
        os.fsync(file.fileno())


def cache(path: Path, cold: bool) -> None:
    with path.open("rb") as file:
        if cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while file.read(1 << 22):
                pass


def run(subject: str, kind: str, path: Path, cold: bool, seed: int, *options: str) -> dict[str, Any]:
    """One run; raises RuntimeError with the process's output if it fails."""
    command = [
        sys.executable,
        HERE / "one.py",
        subject,
        "--kind",
        kind,
        "--data",
        path,
        "--seed",
        seed,
        *options,
    ]
    # One thread for the trainer: the others are the loader's.
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([str(part) for part in command], text=True, env=env, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "ready\n":
                break
        cache(path, cold)
        try:
            out, err = process.communicate("go\n", timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError("no end within 60 s") from None
    if process.returncode or not out.strip():
        raise RuntimeError((err.strip().splitlines() or [f"status {process.returncode}"])[-1])
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def repeats(kind: str, path: Path) -> int:
    """Return the number of the trainer's products that take as long as the plain loop's warm load of a batch."""
    cache(path, cold=False)
    read = Reader(kind, path)
    order = read.order(0)[:30]
    loads = []
    for indices in order:
        start = time.perf_counter()
        read(indices)
        loads.append(time.perf_counter() - start)
    trainer = Trainer(20)
    for _ in range(20):
        trainer.step()
    return max(1, round(median(loads) / (median(trainer.seconds) / 20)))


def measure(args: argparse.Namespace, paths: dict[str, Path]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the runs, and the reasons why subjects were left out after a failure."""
    rows = []
    names = [name for name in SUBJECTS if re.search(args.only, name)]
    absent: dict[str, str] = {}
    for round_ in range(args.rounds):
        for kind, path in paths.items():
            train = repeats(kind, path)
            for cold in (True, False) if args.cache is None else (args.cache == "cold",):
                for products in (0, train):
                    for name in random.sample(names, len(names)):
                        if name in absent:
                            continue
                        try:
                            found = run(name, kind, path, cold, round_, "--train", str(products))
                        except RuntimeError as error:
                            print(f"{name}: left out: {error}", file=sys.stderr)
                            absent[name] = str(error)
                            continue
                        place = {"round": round_, "kind": kind, "cache": "cold" if cold else "warm"}
                        rows.append({"subject": name, **place, "products": products, **found})
            print(f"round {round_ + 1} of {args.rounds}, {kind}: done", file=sys.stderr)
    return [row for row in rows if row["subject"] not in absent], absent


def verify(paths: dict[str, Path]) -> None:
    for kind, path in paths.items():
        sums = {}
        for name in SUBJECTS:
            try:
                sums[name] = run(name, kind, path, False, 7, "--verify")["sum"]
            except RuntimeError as error:
                print(f"{kind}, {name}: left out: {error}")
        records = Reader(kind, path).count
        print(f"{kind}, {records} records: {len(sums)} loaders, {len(set(sums.values()))} sum")
        assert len(set(sums.values())) == 1, sums


def processor() -> str:
    """Return the name of the processor; figures of different families are not compared."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    fields = dict(re.findall(r"^(.+?)\s*: (.*)$", info.read_text(), re.MULTILINE))
    return f"{fields['model name']} (family {fields['cpu family']} model {fields['model']})"


class Table:
    """The figures of the runs, by subject, kind, cache and with or without the trainer."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
        self.names = [name for name in SUBJECTS if any(row["subject"] == name for row in rows)]

    def values(self, name: str, kind: str, cache: str, train: bool, key: str) -> list[float]:
        return [
            row[key]
            for row in self.rows
            if (row["subject"], row["kind"], row["cache"], row["products"] > 0) == (name, kind, cache, train)
        ]

    def cell(self, *key: Any, digits: int = 0, scale: float = 1.0) -> str:
        found = [value * scale for value in self.values(*key) if value is not None]
        if len(found) < 2:
            return f"{found[0]:,.{digits}f}" if found else ""
        low, middle, high = quantiles(found, n=4, method="inclusive")
        return f"{middle:,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]".replace(",", " ").replace("  ", ", ")

    def markdown(self) -> str:
        out = []
        for kind in self.kinds:
            out += [
                f"**{kind}**, medians with quartiles\n",
                "| | cold: first, ms | cold: whole epoch, samples/s | warm: samples/s | warm: CPU us each | MiB "
                "| with a trainer, cold: samples/s | waiting, % | its slowdown | warm: samples/s | its slowdown |",
                "| --- " + "| ---: " * 10 + "|",
            ]
            for name in self.names:
                cells = [
                    self.cell(name, kind, "cold", False, "first_ms", digits=1),
                    self.cell(name, kind, "cold", False, "epoch_rate"),
                    self.cell(name, kind, "warm", False, "rate"),
                    self.cell(name, kind, "warm", False, "cpu_us", digits=1),
                    self.cell(name, kind, "warm", False, "mib", digits=1),
                    self.cell(name, kind, "cold", True, "epoch_rate"),
                    self.cell(name, kind, "cold", True, "waited", digits=1, scale=100),
                    self.cell(name, kind, "cold", True, "slowdown", digits=2),
                    self.cell(name, kind, "warm", True, "rate"),
                    self.cell(name, kind, "warm", True, "slowdown", digits=2),
                ]
                out.append(f"| {name} | " + " | ".join(cells) + " |")
            out.append("")
        return "\n".join(out)

    def svg(self) -> str:
        """Bars of samples a second, without and with the trainer; the text is readable on light and dark pages."""
        parts, y = [], 20
        for kind in self.kinds:
            for train in (False, True):
                found = {
                    (name, cache): median(self.values(name, kind, cache, train, "epoch_rate") or [0.0])
                    for name in self.names
                    for cache in BAR
                }
                most = max(found.values(), default=1.0) or 1.0
                title = f"{kind}, {'with a trainer' if train else 'without compute'}: samples a second"
                parts.append(f'<text x="0" y="{y}" font-weight="bold">{title}</text>')
                for name in self.names:
                    y += 30
                    parts.append(f'<text x="0" y="{y}">{name}</text>')
                    for offset, cache in ((-14, "cold"), (-3, "warm")):
                        rate = found[name, cache]
                        parts.append(
                            f'<rect x="150" y="{y + offset}" width="{460 * rate / most:.1f}" height="10" '
                            f'fill="{BAR[cache]}"/><text x="{154 + 460 * rate / most:.1f}" y="{y + offset + 9}" '
                            f'font-size="10">{cache} {rate:,.0f}</text>'
                        )
                y += 50
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {y}" width="720" font-family="sans-serif" '
            'font-size="13"><style>text { fill: #24292f } @media (prefers-color-scheme: dark) '
            f"{{ text {{ fill: #d0d7de }} }}</style>{''.join(parts)}</svg>\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-mib", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--cache", choices=("cold", "warm"))
    parser.add_argument("--only", default="")
    parser.add_argument("--kind", default="")
    parser.add_argument("--dir")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    parser.add_argument("--verify", action="store_true")
    args = parser.parse_args()
    os.environ["EPOCHS"] = str(args.epochs)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        paths = {kind: Path(folder) / f"{kind}.bin" for kind in KINDS if re.search(args.kind, kind)}
        for kind, path in paths.items():
            make(kind, path, args.size_mib)
        if args.verify:
            verify(paths)
            return
        rows, absent = measure(args, paths)
    table = Table(rows)
    machine = (
        f"{processor()}, {os.cpu_count()} processors, {platform.system()} {platform.release()}, Python {platform.python_version()}; "
        f"load {os.getloadavg()[1]:.1f}; files of {args.size_mib} MiB, {args.epochs} epochs; {args.rounds} rounds."
    )
    left_out = "".join(f"\n{name} was left out: `{error}`\n" for name, error in absent.items())
    print(f"{machine}\n\n{table.markdown()}{left_out}")
    args.out.mkdir(exist_ok=True, parents=True)
    with (args.out / "python.csv").open("w", newline="") as file:
        file.write(f"# {machine}\n")
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    (args.out / "python.svg").write_text(table.svg())


if __name__ == "__main__":
    main()
