#!/usr/bin/env python3
"""Finds import circles between the files of a crate.

    ci/circles.py [SRC[=LIMIT]...]    fails if more files of a crate's `src` are in circles than its limit (default: 0)
    ci/circles.py --test              runs its own tests

An import is any path that begins with `crate`, `super`, `self` or an imported module, in a `use` or elsewhere;
re-exports are followed to the file that defines the item. A parent and its child modules may import each other.
Comments and what is behind `cfg(test)` do not count, nor do strings, but for serde's `try_from = "crate::a::B"`. Macros
are not expanded.
"""

import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

TOKEN = re.compile(
    r"""//[^\n]*
      | (?P<block>/\*)
      | "(?P<path>crate(?:::\w+)+)" # in serde's attributes
      | "(?P<file>\w+\.rs)" # in `path = "file.rs"`
      | b?r(?P<hashes>\#*)".*?"(?P=hashes) | [bc]?"(?:\\.|[^"\\])*"
      | b?'(?:\\.[^']*|[^\\'])' | '\w+
      | (?P<token>(?:r\#)?[^\W\d]\w*|::|[^\s\w])
      | \d\w*""",
    re.VERBOSE | re.DOTALL,
)
DEFINES = {"fn", "struct", "enum", "union", "trait", "type", "const", "static", "macro_rules"}


def tokens(text):
    """Identifiers, `::` and single punctuation marks."""
    found, at = [], 0
    while match := TOKEN.search(text, at):
        at = match.end()
        if match["block"]:  # nested
            depth = 1
            while depth:
                mark = re.compile(r"/\*|\*/").search(text, at)
                depth += 1 if mark[0] == "/*" else -1
                at = mark.end()
        elif match["path"]:
            found += re.findall(r"\w+|::", match["path"])
        elif match["file"]:
            found.append(match["file"])
        elif match["token"]:
            found.append(match["token"])
    return found + [""] * 3


def is_name(token):
    return token[:1].isalpha() or token[:1] == "_"


class Crate:
    """The modules of a crate, as tuples of names, and what each one names, defines and mentions."""

    def __init__(self, root):
        self.file_of = {}  # module -> module of its file
        self.names = defaultdict(dict)  # module -> imported name -> path
        self.globs = defaultdict(list)
        self.defines = defaultdict(set)
        self.paths = []  # (module, path), mentioned anywhere
        self.read(root, root.parent, ())

    def read(self, file, folder, module):
        """Reads a file and the files of the modules that it declares."""
        self.walk(tokens(file.read_text()), folder, module)

    def walk(self, words, folder, file_module):
        self.file_of[file_module] = file_module
        module, opened, at = file_module, [], 0  # `opened`: for each brace, the module around it
        given = []  # the files that attributes name for the next module
        while at < len(words):
            word = words[at]
            if word == "#" and words[at + 1] == "[":
                end = closing(words, at + 1)
                attribute = words[at + 2 : end]
                test_only = attribute[:2] == ["cfg", "("] and "test" in attribute and "not" not in attribute
                at = end_of_item(words, end + 1) if test_only else at + 1
                given += [word for word in attribute if word.endswith(".rs")]
            elif word == "mod" and is_name(words[at + 1]) and words[at + 2] in "{;":
                child = (*module, words[at + 1])
                self.file_of[child] = file_module
                if words[at + 2] == "{":
                    opened.append(module)
                    module = child
                else:
                    inner = folder.joinpath(*child[len(file_module) :])
                    usual = [file for file in (inner.with_suffix(".rs"), inner / "mod.rs") if file.exists()]
                    # Of several, each is the module on another system; here it has the imports of all.
                    for file in [inner.with_name(name) for name in given] or usual[:1]:
                        self.read(file, inner, child)
                given = []
                at += 3
            elif word == "use":
                at = self.tree(words, at + 1, module, ())
            elif is_name(word) and words[at - 1] != "." and (words[at + 1] == "::" or word == "crate"):
                path = [word]
                while words[at + 1] == "::" and is_name(words[at + 2]):
                    path.append(words[at + 2])
                    at += 2
                self.paths.append((module, tuple(path)))
                at += 1
            else:
                if word in DEFINES:
                    self.defines[module].add(words[at + 1].strip("!") or words[at + 2])
                    if words[at + 1] == "!":
                        self.defines[module].add(words[at + 2])
                elif word == "{":
                    opened.append(module)
                elif word == "}":
                    module = opened.pop()
                at += 1

    def tree(self, words, at, module, prefix):
        """One branch of a `use`; returns the place after it."""
        path = list(prefix)
        if words[at] == "::":
            at += 1
        while True:
            if words[at] == "{":
                at += 1
                while words[at] != "}":
                    at = self.tree(words, at, module, tuple(path))
                    if words[at] == ",":
                        at += 1
                return at + 1
            if words[at] == "*":
                self.globs[module].append(tuple(path))
                self.paths.append((module, tuple(path)))
                return at + 1
            path.append(words[at])
            at += 1
            if words[at] != "::":
                break
            at += 1
        if path[-1] == "self" and len(path) > 1:
            path.pop()
        name = path[-1]
        if words[at] == "as":
            name = words[at + 1]
            at += 2
        self.names[module][name] = tuple(path)
        self.paths.append((module, tuple(path)))
        return at

    def resolve(self, module, path, seen=frozenset()):
        """The module that a path leads to, or None if that is another crate's."""
        first, rest = path[0], path[1:]
        if first in ("crate", "$crate"):
            return self.follow((), rest, seen)
        if first == "self":
            return self.follow(module, rest, seen)
        if first == "super":
            return self.follow(module[:-1], rest, seen)
        if (*module, first) in self.file_of or first in self.names[module]:
            return self.follow(module, path, seen)
        return None

    def follow(self, module, path, seen):
        if path and path[0] == "super":
            return self.follow(module[:-1], path[1:], seen)
        if not path or (module, path[0]) in seen:
            return module
        first, rest = path[0], path[1:]
        if (*module, first) in self.file_of:
            return self.follow((*module, first), rest, seen)
        seen = seen | {(module, first)}
        if first in self.names[module]:
            return self.resolve(module, self.names[module][first] + rest, seen)
        if first not in self.defines[module]:
            for glob in self.globs[module]:
                source = self.resolve(module, glob, seen)
                if source is not None and source != module and self.has(source, first):
                    return self.follow(source, path, seen)
        return module

    def has(self, module, name):
        return (*module, name) in self.file_of or name in self.names[module] or name in self.defines[module]

    def imports(self):
        """File -> files that it imports from, but for its ancestors and descendants."""
        graph = defaultdict(set)
        for module, path in self.paths:
            target = self.resolve(module, path)
            if target is not None:
                here, there = self.file_of[module], self.file_of[target]
                shorter = min(len(here), len(there))
                if here[:shorter] != there[:shorter]:
                    graph[here].add(there)
        return graph


def closing(words, at):
    """The place of the bracket that closes the one here."""
    depth = 0
    while True:
        depth += words[at] in tuple("([{")
        depth -= words[at] in tuple(")]}")
        if not depth:
            return at
        at += 1


def end_of_item(words, at):
    """The place after an item or statement: its semicolon, or its block."""
    while words[at] not in (";", ",", "}", ""):
        if words[at] in tuple("([{"):
            block = words[at] == "{"
            at = closing(words, at)
            if block and words[at + 1] not in (";", "else"):
                return at + 1
        at += 1
    return at + 1 if words[at] in tuple(";,") else at


def circles(graph):
    """The sets of files that all reach each other (there are few files: no need for Tarjan)."""
    reach = {}
    for start in graph:
        reached, todo = set(), [start]
        while todo:
            new = graph.get(todo.pop(), set()) - reached
            reached |= new
            todo += new
        reach[start] = reached
    return sorted({frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in reach if a in reach[a]}, key=sorted)


def check(src, limit):
    """Prints a crate's circles; returns whether they are within the limit."""
    roots = [src / name for name in ("lib.rs", "main.rs") if (src / name).exists()]
    assert roots, f"{src}: neither lib.rs nor main.rs"
    count, lines = 0, []
    for root in roots:
        graph = Crate(root).imports()
        for circle in circles(graph):
            count += len(circle)
            for file in sorted(circle):
                lines.append(f"  {'::'.join(file)} -> {', '.join('::'.join(f) for f in sorted(graph[file] & circle))}")
    print(f"{src}: {count} files in circles (limit {limit})", *lines, sep="\n")
    if count > limit:
        print(f"{src}: more files in circles than {limit}", file=sys.stderr)
    return count <= limit


def test():
    def files_in_circles(files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                file = Path(folder, name)
                file.parent.mkdir(exist_ok=True)
                file.write_text(text)
            return sorted("::".join(f) for circle in circles(Crate(Path(folder, "lib.rs")).imports()) for f in circle)

    both = "mod a; mod b; pub use b::B;"
    cases = [
        ({"lib.rs": both, "a.rs": "use crate::b::B;", "b.rs": "pub struct B(crate::a::A);"}, ["a", "b"]),
        # Through a re-export, a nested tree, a rename, a glob.
        ({"lib.rs": both, "a.rs": "use crate::B;", "b.rs": "use super::{a::{self as c, A}};"}, ["a", "b"]),
        ({"lib.rs": both, "a.rs": "use crate::b; fn f() { b::g() }", "b.rs": "use super::a::*;"}, ["a", "b"]),
        ({"lib.rs": "mod a; mod b; pub use b::*;", "a.rs": "use crate::B;", "b.rs": "pub struct B(crate::a::A);"}, ["a", "b"]),
        ({"lib.rs": both, "a.rs": '#[serde(try_from = "crate::b::B")]', "b.rs": "use crate::a::A;"}, ["a", "b"]),
        # Around three, one of them in a folder; an inline module's `super` is its file.
        (
            {
                "lib.rs": "mod a; mod b;",
                "a.rs": "mod inner { use super::super::b::c::C; }",
                "b/mod.rs": "pub mod c; mod d;",
                "b/c.rs": "use super::d::D; pub struct C;",
                "b/d.rs": "use crate::a::A; pub struct D;",
            },
            ["a", "b::c", "b::d"],
        ),
        # A module that is another file on each system.
        (
            {
                "lib.rs": "mod a; mod s;",
                "a.rs": "use crate::s::S;",
                "s/mod.rs": """#[cfg_attr(unix, path = "u.rs")] #[cfg_attr(not(unix), path = "v.rs")] mod this;
                    pub use this::S;""",
                "s/u.rs": "",
                "s/v.rs": "use crate::a::A; pub struct S;",
            },
            ["a", "s::this"],
        ),
        # One way; parent and child; comments, strings, tests.
        ({"lib.rs": both, "a.rs": "use crate::b::B;", "b.rs": "pub struct B;"}, []),
        ({"lib.rs": "mod a; pub struct R(a::A);", "a.rs": "use crate::R; pub struct A;"}, []),
        (
            {
                "lib.rs": both,
                "a.rs": "use crate::b::B;",
                "b.rs": """/* /* */ use crate::a; */ // use crate::a;
                    const S: (&str, char) = (r#"use "crate::a"#, '"'); fn f<'a>() {}
                    #[cfg(test)] mod tests { use crate::a; } #[cfg(test)] use crate::a;""",
            },
            [],
        ),
    ]
    for files, wanted in cases:
        found = files_in_circles(files)
        assert found == wanted, f"{files}: wanted {wanted}, found {found}"
    print(f"{len(cases)} cases as wanted")


if __name__ == "__main__":
    if sys.argv[1:] == ["--test"]:
        test()
    elif not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    else:
        results = []
        for argument in sys.argv[1:]:
            src, _, limit = argument.partition("=")
            results.append(check(Path(src), int(limit or 0)))
        sys.exit(not all(results))
