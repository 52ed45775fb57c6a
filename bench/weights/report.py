#!/usr/bin/env python3
"""Prints what the runs of run.sh show: medians and quartiles of the rounds, ratios of runs of the same round.

    python3 bench/weights/report.py [FILE]     default: bench/results/weights.csv
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from tables import Weights, number, ratio, spread


def main():
    found = Weights(sys.argv[1] if len(sys.argv) > 1 else "weights.csv")
    print(found.head)
    for case in found.cases("layers"):
        longer, own = (spread(values, ratio) for values in (found.over_longer(case), found.over_own(case)))
        print(f"layers, compute {case}: wall / the longer of load and compute {longer}, of the same run's own {own}")
        for way in found.ways("layers", case):
            columns = ("wall_s", "first_pass_s", "cpu_s", "disk_mib", "peak_mib")
            figures = ", ".join(f"{name} {spread(found.values('layers', case, way, name))}" for name in columns)
            tokens = spread([3 / wall for wall in found.values("layers", case, way, "wall_s")])
            over = spread(found.ratios("layers", case, way, "stream"), ratio)
            print(f"    {way}: x {over} of stream, tokens/s {tokens}, {figures}")
        print(f"    results: {found.results('layers', case)}")
    if found.ways("checkpoint", "-"):
        print(f"checkpoint: rate / the best of fio {spread(found.over_fio(), ratio)}")
        for way in found.ways("checkpoint", "-"):
            rates = [4096 / wall for wall in found.values("checkpoint", "-", way, "wall_s")]
            print(f"    {way}: MiB/s {spread(rates)}")
        for name in ("disk_mib", "peak_mib"):
            print(f"    {name} {spread(found.values('checkpoint', '-', 'load', name))}")
    for way in found.ways("candle", "-"):
        over = spread(found.ratios("candle", "-", way, "ours"), ratio)
        figures = [f"{name} {spread(found.values('candle', '-', way, name))}" for name in ("wall_s", "cpu_s")]
        print(f"candle, {way}: x {over} of ours, {', '.join(figures)}; results: {found.results('candle', '-')}")


if __name__ == "__main__":
    main()
