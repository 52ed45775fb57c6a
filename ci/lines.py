#!/usr/bin/env python3
"""Code lines of the library, by crate: no blank lines, comments, docs or unit tests.

    ci/lines.py            fails if a crate has more lines than ci/lines.txt allows
    ci/lines.py --write    takes today's figures as the limits

A limit goes down with the code. It goes up only if what was decided for the crate says so.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "ci/lines.txt"
CRATES = ["core/src", "mmap/src", "cuda/src", "src", "python/src", "python/twinbuf", "capi/src", "adapters/object-store/src"]


def rust(lines):
    """The number of code lines, without modules of unit tests."""
    found, inside = 0, False
    for line, following in zip(lines, [*lines[1:], ""]):
        text = line.strip()
        if inside:
            inside = not line.startswith("}")
        elif text == "#[cfg(test)]" and re.match(r"\s*(pub )?mod \w+ \{", following):
            inside = True
        elif text and not text.startswith("//"):
            found += 1
    return found


def python(lines):
    """The number of code lines, without docstrings."""
    found, doc = 0, False
    for line in lines:
        text = line.strip()
        if doc:
            doc = not text.endswith('"""')
        elif text.startswith(('"""', 'r"""')):
            doc = text.count('"""') < 2
        elif text and not text.startswith("#"):
            found += 1
    return found


def crates():
    """The code lines of each crate."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    total = dict.fromkeys(CRATES, 0)
    for file in files:
        crate = next((crate for crate in CRATES if file.startswith(crate + "/")), None)
        if crate is None or not (ROOT / file).exists() or re.search(r"(^|/)tests(\.rs$|/)", file):
            continue
        lines = (ROOT / file).read_text(encoding="utf8").split("\n") if file.endswith((".rs", ".py", ".pyi")) else []
        total[crate] += rust(lines) if file.endswith(".rs") else python(lines)
    return total


def main():
    found = crates()
    if sys.argv[1:] == ["--write"]:
        LIMITS.write_text("".join(f"{lines:6} {crate}\n" for crate, lines in found.items()))
    elif sys.argv[1:]:
        sys.exit(__doc__)
    limits = {crate: int(lines) for lines, crate in map(str.split, LIMITS.read_text().splitlines())}
    for crate, lines in found.items():
        print(f"{lines:6} of {limits[crate]:6} {crate}")
    print(f"{sum(found.values()):6} of {sum(limits.values()):6} together")
    if over := [crate for crate, lines in found.items() if lines > limits[crate]]:
        sys.exit(f"{', '.join(over)}: more code lines than ci/lines.txt allows")


if __name__ == "__main__":
    main()
