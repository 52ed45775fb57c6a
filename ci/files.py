#!/usr/bin/env python3
"""Finds files (of code, TOML and Markdown) and folders that the Markdown names in backticks or links to and that are not
there, packages, features, examples, benchmarks and tests that a command of a document, of a comment or of a script names and
that are not there, scripts without a line in CONTRIBUTING.md, and conflicts that a merge has left in the Markdown.

    ci/files.py

A name is looked for in the repository and in the folder of the document, and next to the file or folder
that is named before it. A relative link leads from the folder of the document; its anchor is a heading there.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Not the text of a link.
NAMED = re.compile(r"(?<!\[)`([\w./-]*[\w-]+\.(?:rs|py|sh|toml|md)|[\w.-]+(?:/[\w.-]+)*/)`")
LINK = re.compile(r"\]\(([^():#\s]*)(?:#([^()\s]*))?\)")
# What a run makes, and files of other repositories.
ELSEWHERE = re.compile(r"^(target|bench/target|mm|kernel|Documentation|~)/|/target/|^(hubconf|train|model)\.py$|^Cargo\.toml$")
COMMAND = re.compile(r"cargo (?:\+\w+ )?(?:run|bench|test|build|check|clippy|doc)\b[^`\n]*")
# A program in a command of cargo; names made by a shell are left out.
PROGRAM = re.compile(r"--(example|bench|test) ([\w-]+)(?![\w*-])")
PACKAGE = re.compile(r" (?:-p|--package|--exclude) ([\w-]+)(?![\w*-])")
FEATURES = re.compile(r" (?:-F|--features)[ =]\"?([\w,/-]+)(?![\w,/*-])")


def git_files(*patterns):
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return listed.split()


def not_there():
    """Packages, features and programs that a command names and that no package has."""
    kinds, there, features = {"examples": "example", "benches": "bench", "tests": "test"}, set(), {}
    for path in map(Path, git_files("*.rs")):
        program = path.parent if path.name == "main.rs" else path
        if program.parent.name in kinds:
            there.add((kinds[program.parent.name], program.stem))
    for name in git_files("*Cargo.toml"):
        manifest = tomllib.loads((ROOT / name).read_text())
        for kind in kinds.values():
            there.update((kind, program["name"]) for program in manifest.get(kind, []))
        if "package" in manifest:
            features[manifest["package"]["name"]] = {"default", *manifest.get("features", {})}
    for name in git_files("*.md", "*.rs", "*.sh", "*.py", "*.toml", ".ci/run"):
        for command in COMMAND.findall((ROOT / name).read_text()):
            packages = PACKAGE.findall(command)
            of = set().union(*(features.get(package, set()) for package in packages or features))
            wrong = [f"-p {package}" for package in packages if package not in features]
            wrong += [f"--{' '.join(program)}" for program in PROGRAM.findall(command) if program not in there]
            wanted = (feature.split("/")[-1] for found in FEATURES.findall(command) for feature in found.split(","))
            wrong += [f"--features {feature}" for feature in wanted if feature and feature not in of]
            yield from (f"{name}: {found}" for found in wrong)


def unlisted():
    """Scripts of `ci/` and `tools/` that CONTRIBUTING.md does not name."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in git_files("ci/*.sh", "ci/*.py", "tools/*.sh", "tools/*.py"):
        if name.count("/") == 1 and f"`{Path(name).name}`" not in text:
            yield f"CONTRIBUTING.md: no line for {name}"


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
    documents = git_files("*.md")
    wrong = [f"{name}: {path}" for name in documents for path in (*missing(ROOT / name), *broken(ROOT / name))]
    wrong += [*not_there(), *unlisted()]
    wrong += [f"{name}: a conflict" for name in documents if re.search("^(<{7}|>{7}) ", (ROOT / name).read_text(), re.MULTILINE)]
    print(f"{len(documents)} documents: {len(wrong)} names, links, packages, features and programs that are not there")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
