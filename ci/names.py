#!/usr/bin/env python3
"""Counts the names that a user of each published crate sees at its root: modules, re-exports and items, with all features.

    ci/names.py            prints the names; fails if a crate has more than its limit or if the names differ from ci/api
    ci/names.py --write    writes ci/api/CRATE.txt anew
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"twinbuf": ("src", 20), "twinbuf-core": ("core/src", 32), "twinbuf-mmap": ("mmap/src", 28), "twinbuf-cuda": ("cuda/src", 13)}
# An item at the root with its attributes. A function and a module that share a name are one name.
ITEM = re.compile(
    r"^((?:#\[.*\]\n)*)pub (?:(use) ([^;]+);|(?:unsafe |const |async )*"
    r"(mod|fn|struct|enum|union|trait|type|const|static) (\w+))",
    re.MULTILINE,
)


def last(path):
    """The name that a path without braces brings in."""
    return re.split(r"::| as ", path.strip())[-1].strip()


def names(lib):
    """Kind and name of each public item at the root."""
    text = re.sub(r" *//[^\n]*", "", lib.read_text())
    text = re.sub(r"^#\[[^\]]*\n[^\]]*\]\n", "", text, flags=re.MULTILINE)
    found = []
    for attributes, use, path, kind, name in ITEM.findall(text):
        if re.search(r"cfg\((loom|doctest|test)\)|doc\(hidden\)|macro_use", attributes):
            continue
        if not use:
            found.append(f"{kind} {name}")
            continue
        inside = re.search(r"\{(.*)\}", path, re.DOTALL)
        found += [f"use {last(one)}" for one in (inside[1].split(",") if inside else [path]) if one.strip()]
    return sorted(found, key=lambda item: item.split()[::-1])


def main():
    write = sys.argv[1:] == ["--write"]
    if sys.argv[1:] and not write:
        sys.exit(__doc__)
    failed = False
    for crate, (folder, limit) in LIMITS.items():
        found = names(ROOT / folder / "lib.rs")
        distinct = list(dict.fromkeys(item.split()[1] for item in found))
        print(f"{crate}: {len(distinct)} names at the root (limit {limit}): {', '.join(distinct)}")
        if len(distinct) > limit:
            print(f"  more than {limit}", file=sys.stderr)
            failed = True
        text, file = "\n".join(found) + "\n", ROOT / "ci" / "api" / f"{crate}.txt"
        if write:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            print(f"  {file.relative_to(ROOT)} differs: if that is meant, run ci/names.py --write", file=sys.stderr)
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
