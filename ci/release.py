#!/usr/bin/env python3
"""The published crates in the order in which they can be published, and whether their versions agree.

    ci/release.py            checks the order against the dependencies, and the versions, also of the Python package
    ci/release.py v0.1.0     and that this is the tag of this version, with a date in the changelog
    ci/release.py --crates   prints the name, version and manifest of each crate
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["core", "mmap", "cuda", "cuda/sim", ".", "cli"]
OWN_VERSION = "twinbuf-cuda"


def main():
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    version = workspace["package"]["version"]
    versions, wrong = {}, []
    for folder in ORDER:
        manifest = tomllib.loads((ROOT / folder / "Cargo.toml").read_text())
        package = manifest["package"]
        name, own = package["name"], package["version"]
        own = version if own == {"workspace": True} else own
        if own != version and name != OWN_VERSION:
            wrong.append(f"{name} has version {own}, the workspace {version}")
        # What has no version is left out of a package; the others have to be published before it.
        for kind in ["dependencies", "dev-dependencies"]:
            for needed, how in manifest.get(kind, {}).items():
                if isinstance(how, dict) and how.get("workspace"):
                    how = workspace["dependencies"][needed]
                if not isinstance(how, dict) or "path" not in how or "version" not in how:
                    continue
                if needed not in versions:
                    wrong.append(f"{name} is published before {needed}")
                elif versions[needed] != how["version"]:
                    wrong.append(f"{name} asks for {needed} {how['version']}, which is {versions[needed]}")
        versions[name] = own
        if sys.argv[1:] == ["--crates"]:
            print(name, own, (ROOT / folder / "Cargo.toml").relative_to(ROOT))
    python = tomllib.loads((ROOT / "python/Cargo.toml").read_text())["package"]["version"]
    if python != version:
        wrong.append(f"the Python package has version {python}, the workspace {version}")
    for folder in ["python", "capi"]:
        asked = tomllib.loads((ROOT / folder / "Cargo.toml").read_text())["dependencies"]["twinbuf"]["version"]
        if asked != version:
            wrong.append(f"{folder} asks for twinbuf {asked}, which is {version}")
    if sys.argv[1:] and sys.argv[1] != "--crates":
        if sys.argv[1] != f"v{version}":
            wrong.append(f"the tag is {sys.argv[1]}, the version {version}")
        if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE):
            wrong.append(f"CHANGELOG.md has no date for {version}")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
