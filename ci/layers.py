#!/usr/bin/env python3
"""Finds imports from a module above: the top modules of `src` and of `mmap/src` form layers. A layer uses those below it.

    ci/layers.py            fails if a crate has an import upwards or sideways
    ci/layers.py --test     runs its own tests

What counts as an import is as in circles.py. A module that no layer names is an error.
"""

import sys
import tempfile
from pathlib import Path

from circles import Crate

# Bottom to top. Modules of one layer do not import each other.
LAYERS = {
    "src": ["error sync temporary thread", "transform dataset", "observe", "pipe", "loader generate stream write"],
    "mmap/src": [
        "dtype stats",
        "error buffer",
        "file files",
        "system",
        "limit",
        "plan",
        "ranges",
        "records",
        "format fingerprint transform",
        "cache groups",
        "reader",
    ],
}


def upwards(root, layers):
    """Each import that does not lead to a lower layer, as (file, file)."""
    layer = {module: number for number, names in enumerate(layers) for module in names.split()}
    crate = Crate(root)
    if unnamed := {module[0] for module in crate.file_of if module and module[0] not in layer}:
        sys.exit(f"{root}: name a layer of {', '.join(sorted(unnamed))} in {__file__}")
    found = set()
    for here, others in crate.imports().items():
        for there in others:
            if here and there and here[0] != there[0] and layer[here[0]] <= layer[there[0]]:
                found.add(("::".join(here), "::".join(there)))
    return sorted(found)


def test():
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {
            "lib.rs": "mod a; mod b; mod c; pub use b::B;",
            "a.rs": "pub struct A;",
            "b.rs": "use crate::a::A; use crate::c::C; pub struct B;",
            "c.rs": "use crate::B; pub struct C;",
        }.items():
            Path(folder, name).write_text(text)
        root = Path(folder, "lib.rs")
        assert upwards(root, ["a", "b", "c"]) == [("b", "c")]
        assert upwards(root, ["a", "b c"]) == [("b", "c"), ("c", "b")]
        assert upwards(root, ["b c", "a"]) == [("b", "a"), ("b", "c"), ("c", "b")]
    print("3 cases as wanted")


def main():
    failed = False
    for src, layers in LAYERS.items():
        found = upwards(Path(__file__).resolve().parent.parent / src / "lib.rs", layers)
        print(f"{src}: {len(found)} imports upwards", *(f"  {a} -> {b}" for a, b in found), sep="\n")
        failed |= bool(found)
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:] == ["--test"]:
        test()
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        main()
