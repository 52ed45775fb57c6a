#!/usr/bin/env python3
"""Gives the Python package the repository's address: project URLs, and absolute links in its description.

    ci/urls.py URL FOLDER     FOLDER has the package's pyproject.toml
"""

import re
import sys
from pathlib import Path


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    url, folder = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    project = folder / "pyproject.toml"
    urls = f'[project.urls]\nRepository = "{url}"\nChangelog = "{url}/blob/main/CHANGELOG.md"\n\n'
    project.write_text(project.read_text().replace("[tool.maturin]", urls + "[tool.maturin]", 1))

    def absolute(link):
        mark, text, path = link.groups()
        path = path.removeprefix("../") if path.startswith("../") else "python/" + path
        return f"{mark}[{text}]({url}/{'raw' if mark else 'blob'}/main/{path})"

    for page in {folder / "README.md", folder / "python/README.md", folder / "PKG-INFO"}:
        if page.exists():
            relative = r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)"
            page.write_text(re.sub(relative, absolute, page.read_text()))


if __name__ == "__main__":
    main()
