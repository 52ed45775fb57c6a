#!/usr/bin/env python3
"""Finds files and folders that the Markdown names in backticks or links to and that are not there.

    ci/files.py

A name is looked for in the repository and in the folder of the document, and next to the file or folder
that is named before it. A relative link leads from the folder of the document; its anchor is a heading there.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Not the text of a link.
NAMED = re.compile(r"(?<!\[)`([\w./-]*[\w-]+\.(?:rs|py|sh|toml|md)|[\w.-]+(?:/[\w.-]+)*/)`")
LINK = re.compile(r"\]\(([^():#\s]*)(?:#([^()\s]*))?\)")
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


def anchors(document):
    headings = re.findall(r"^#+ +(.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(document):
    for path, anchor in LINK.findall(document.read_text()):
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"link to {path}{'#' * bool(anchor)}{anchor}"


def main():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wrong = [f"{name}: {path}" for name in listed.split() for path in (*missing(ROOT / name), *broken(ROOT / name))]
    print(f"{len(listed.split())} documents: {len(wrong)} names and links of files that are not there")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
