#!/usr/bin/env python3
"""Compares the ring's hand-offs with those of another revision: is this tree slower than that one?

    bench/compare.py HEAD~1
    bench/compare.py v0.1.0 --rounds 25 --only 'spin/stream 8 B/twinbuf'

Builds `handoff` twice, here and in a checkout of REV under bench/target, each from its sources. Then runs the two
programs alternately: old, new, new, old, and so on. For each subject that both have, prints the ratio new / old of the
programs' figures in one round: its median over the rounds and its quartiles. A program's figure is the median of its
samples or, with `--by min`, their minimum, less affected by a busy machine. The floor is the same source in both. Its
row shows the resolution of the comparison: a ratio within the floor's quartiles is no difference.

Ends with status 1 if a twinbuf subject is slower: if the lower quartile of its ratio is above 1.05 and above the
floor's upper quartile.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
TARGET = BENCH / "target"


def run(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, **options)


def commit(revision):
    name = f"{revision}^{{commit}}"
    done = run("git", "-C", ROOT, "rev-parse", "--verify", name, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def checkout(name):
    """The tree of that commit, in a worktree that later comparisons use again."""
    tree = TARGET / "compare" / "tree"
    if not (tree / ".git").exists():
        shutil.rmtree(tree, ignore_errors=True)
        run("git", "-C", ROOT, "worktree", "prune")
        run("git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, name)
    run("git", "-C", tree, "checkout", "--quiet", "--force", "--detach", name)
    return tree


def build(tree, name):
    """The program of that tree. Both trees share one target folder: the peers are compiled once."""
    folder = tree / "bench" / "handoff"
    manifest = (folder if folder.exists() else tree / "bench") / "Cargo.toml"
    command = ["cargo", "build", "--release", "--locked", "--bin", "handoff", "--manifest-path", manifest]
    run(*command, env={**os.environ, "CARGO_TARGET_DIR": str(TARGET)})
    program = TARGET / "compare" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(TARGET / "release" / "handoff", program)
    return program


def measure(program, options, by, out):
    """The figures of one run: {(wait, measure, subject, way): (role, ns)}."""
    run(program, *options, "--out", out, stdout=subprocess.DEVNULL)
    lines = (out / "handoff.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    key = ("wait", "measure", "subject", "way")
    # A row with one field too many: a name with a comma, written without quotes by revisions before this script.
    return {tuple(row[k] for k in key): (row["role"], float(row[by])) for row in rows if None not in row}


def spread(values):
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", metavar="REV", help="what git calls the other revision")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each program (default: 15, at least 2)")
    parser.add_argument("--only", default="(stream|round trip).*/twinbuf", metavar="REGEX",
                        help="the subjects, as for `handoff --only` (default: %(default)s)")
    parser.add_argument("--by", choices=("median", "min"), default="median", help="a program's figure (default: median)")
    parser.add_argument("--cpus", metavar="A,B", help="as for `handoff --cpus`")
    asked = parser.parse_args()

    old_commit = commit(asked.revision)
    changed = run("git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no", stdout=subprocess.PIPE).stdout
    old = build(checkout(old_commit), "old")
    new = build(ROOT, "new")

    # Short runs: samples of 5 ms, five of each subject.
    options = ["--quick", "--rounds", "5", "--only", asked.only]
    options += ["--cpus", asked.cpus] if asked.cpus else []
    runs = []
    with tempfile.TemporaryDirectory() as place:
        for number in range(max(asked.rounds, 2)):
            order = [("old", old), ("new", new)]
            both = {}
            for name, program in order if number % 2 == 0 else reversed(order):
                print(f"\rround {number + 1} of {asked.rounds}, {name} ", end="", file=sys.stderr, flush=True)
                both[name] = measure(program, options, asked.by, Path(place) / name)
            runs.append(both)
    print("\r\033[K", end="", file=sys.stderr)

    here = commit("HEAD")[:12] + (" with changes" if changed else "")
    print(f"new: {here}; old: {old_commit[:12]}; {len(runs)} rounds\n")
    print(f"| {'':<50} | {'old, ns':>9} | {'new, ns':>9} | {'new/old':>7} | {'quartiles':>13} |")
    print(f"| {'':-<50} | {'':->8}: | {'':->8}: | {'':->6}: | {'':->12}: |")
    shared = [key for key in runs[0]["new"] if key in runs[0]["old"]]
    ratios = {key: [both["new"][key][1] / both["old"][key][1] for both in runs] for key in shared}
    floors = {key[:2]: key for key in shared if runs[0]["new"][key][0] == "floor"}
    slower = []
    for key in sorted(shared, key=lambda key: (key[0], key[1], runs[0]["new"][key][0] != "floor")):
        low, middle, high = spread(ratios[key])
        ns = [median(both[name][key][1] for both in runs) for name in ("old", "new")]
        print(f"| {' / '.join(key[:3]):<50} | {ns[0]:9.1f} | {ns[1]:9.1f} | {middle:7.3f} | "
              f"{f'{low:.3f}–{high:.3f}':>13} |")
        floor = spread(ratios[floors[key[:2]]])[2] if key[:2] in floors else 1.0
        if runs[0]["new"][key][0] == "ours" and low > max(1.05, floor):
            slower.append(" / ".join(key[:3]))
    if slower:
        print("\nslower: " + "; ".join(slower))
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
