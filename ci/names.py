#!/usr/bin/env python3
"""Counts the names that a user of four published crates sees at each root: modules, re-exports and items, with all features.

    ci/names.py            prints them; fails if a crate has more than its limit

It reads the snapshots of the public API in ci/api. `ci/api.sh` compares them with the code.
"""

import re
import sys
from pathlib import Path

API = Path(__file__).resolve().parent / "api"
LIMITS = {"twinbuf": 24, "twinbuf-core": 20, "twinbuf-mmap": 35, "twinbuf-cuda": 17}


def names(crate):
    """Each name once: a function and a module may share one."""
    item = rf"^(?:#\[.*\] )*pub [a-z ]*\b{crate.replace('-', '_')}::(\w+)(?!\w|::)"
    return sorted(set(re.findall(item, (API / f"{crate}.txt").read_text(), re.MULTILINE)))


def main():
    if sys.argv[1:]:
        sys.exit(__doc__)
    failed = False
    for crate, limit in LIMITS.items():
        found = names(crate)
        print(f"{crate}: {len(found)} names at the root (limit {limit}): {', '.join(found)}")
        failed |= len(found) > limit
    sys.exit(failed)


if __name__ == "__main__":
    main()
