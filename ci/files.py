#!/usr/bin/env python3
"""Finds files and folders that the Markdown names in backticks and that are not there.

    ci/files.py

A name is looked for in the repository and in the folder of the document, and next to the file or folder
that is named before it.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Not the text of a link.
NAMED = re.compile(r"(?<!\[)`([\w./-]*[\w-]+\.(?:rs|py|sh|toml|md)|[\w.-]+(?:/[\w.-]+)*/)`")
# What a run makes, and files of other repositories.
ELSEWHERE = re.compile(r"^(target|bench/target|mm|kernel|Documentation|~)/|/target/|^(hubconf|train|model)\.py$|^Cargo\.toml$")


def missing(document):
    before = None
    for paragraph in document.read_text().split("\n\n"):
        for name in NAMED.findall(paragraph):
            here = [ROOT / name, document.parent / name, *([before / name, before.parent / name] if before else [])]
            found = next((path for path in here if path.exists()), None)
            if found:
                before = found if found.is_dir() else found.parent
            elif not ELSEWHERE.search(name):
                yield name


def main():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wrong = [f"{name}: {path}" for name in listed.split() for path in missing(ROOT / name)]
    print(f"{len(listed.split())} documents: {len(wrong)} names of files that are not there")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
