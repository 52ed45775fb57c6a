#!/usr/bin/env python3
"""Compares what four published crates say of their features with what exists.

    ci/features.py

Each feature but `default` has a comment in its Cargo.toml. Each name in backticks there is in the code of the crate or of
a crate of ours that it uses, begins with a dependency, or is of a target or `std`. A table of features in a README has exactly
the features but `default`.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Each crate, and the crates of ours that it uses.
CRATES = {"core": [], "mmap": [], "cuda": ["core"], ".": ["core", "mmap", "cuda"]}
# Names of targets, and of the standard library.
ELSEWHERE = re.compile(r"thumbv\w+|(?:std|core)::[\w:]+")


def code(folder):
    """The words of a crate's code, without its comments."""
    files = (path.read_text() for path in (ROOT / folder / "src").rglob("*.rs"))
    return {word for text in files for word in re.findall(r"\w+", re.sub(r"//.*", "", text))}


def wrong(folder, uses):
    manifest = (ROOT / folder / "Cargo.toml").read_text()
    section = re.search(r"^\[features\]\n(.*?)^\[", manifest, re.MULTILINE | re.DOTALL)
    if not section:
        return
    words = code(folder).union(*map(code, uses))
    dependencies = set(re.findall(r"^([\w-]+)(?:\.workspace)? = ", manifest.split("[dependencies]", 1)[1], re.MULTILINE))
    features = []
    for comment, feature in re.findall(r"((?:^#.*\n)*)^([\w-]+) = ", section[1], re.MULTILINE):
        features.append(feature)
        if not comment and feature != "default":
            yield f"the feature `{feature}` has no comment"
        for name in re.findall(r"`([^`]+)`", comment):
            parts = re.findall(r"\w+", name)
            known = ELSEWHERE.fullmatch(name) or parts[0] in dependencies or words.issuperset(parts)
            if not known:
                yield f"the comment of the feature `{feature}` names `{name}`, which is not in the code"
    readme = ROOT / folder / "README.md"
    for table in re.findall(r"^\| feature \|.*\n\|.*\n((?:\|.*\n)+)", readme.read_text(), re.MULTILINE):
        listed = re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)
        if sorted(listed) != sorted(set(features) - {"default"}):
            yield f"README.md lists the features {listed}, there are {features}"


def main():
    found = [f"{folder}/Cargo.toml: {text}" for folder, uses in CRATES.items() for text in wrong(folder, uses)]
    print(f"{len(CRATES)} crates: {len(found)} wrong words about features")
    sys.exit("\n".join(found) or 0)


if __name__ == "__main__":
    main()
