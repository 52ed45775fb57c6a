"""Walks one batch through the files: those of ours that its calls enter, thread by thread, in order.

    CARGO_PROFILE_DEV_DEBUG=true cargo build --example hello
    gdb -q -batch -x tools/walk.py --args target/debug/examples/hello FILE

FILE is any file of a few MiB. A breakpoint on each function of `core`, `mmap` and `src` finds the files of one batch on
each of two threads: from one wait for a slot to the next, and from one call of the iterator to the next.
Fails if a file that ARCHITECTURE.md numbers is not entered, or if the
numbered files of a thread are entered first in another order. Needs gdb.
"""

import re
import sys
from pathlib import Path

import gdb

# The batch that is followed.
AT = 5
# Where a batch begins, and the heading of its list in ARCHITECTURE.md.
THREADS = {"src/pipe/turn.rs:take": "The reading thread:", "src/pipe/items.rs:advance": "The caller:"}


def functions():
    """(file, line, name) of each function of ours in the program."""
    file = None
    for line in gdb.execute("info functions -n .", to_string=True).splitlines():
        if found := re.match(r"File (.*):$", line):
            file = found[1]
        elif (found := re.match(r"(\d+):\s+(.*)", line)) and file and re.match(r"(core/|mmap/)?src/", file) and Path(file).exists():
            name = found[2].split("(")[0]
            while "<" in name and name != (name := re.sub(r"<[^<>]*>", "", name)):
                pass
            yield file, int(found[1]), name.split("::")[-1]


class Entry(gdb.Breakpoint):
    """A function: its first call on the thread adds its file to the walk."""

    files = {}

    def __init__(self, file, line):
        super().__init__(f"{file}:{line}", internal=True)
        self.silent, self.enabled, self.file = True, False, file

    def stop(self):
        self.files[self.file] = None
        self.enabled = False
        return False


def walk(begin, entries):
    """The files of batch AT on the thread that calls `begin`, in the order of their first calls."""
    start = gdb.Breakpoint(begin, internal=True)
    start.ignore_count = AT
    gdb.execute("run", to_string=True)
    start.thread = gdb.selected_thread().global_num
    Entry.files = {begin.split(":")[0]: None}
    for entry in entries:
        entry.thread, entry.enabled = start.thread, True
    gdb.execute("continue", to_string=True)
    gdb.execute("kill", to_string=True)
    start.delete()
    for entry in entries:
        entry.enabled, entry.thread = False, None
    return list(Entry.files)


def numbered(heading):
    """The first file of each numbered line below the heading."""
    text = Path("ARCHITECTURE.md").read_text().split("## The way of one batch")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]*)`", text.split(heading)[1].split("\nThe caller:\n")[0], re.MULTILINE)


def main():
    gdb.execute("set pagination off")
    gdb.execute("set breakpoint pending off")
    places = sorted(set(functions()))
    entries = [Entry(file, line) for file, line, _ in places]
    every, failed = [], False
    for begin, heading in THREADS.items():
        file, name = begin.split(":")
        line = next(line for at, line, called in places if (at, called) == (file, name))
        files, named = walk(f"{file}:{line}", entries), numbered(heading)
        every += files
        print(heading, *(f"  {file}" for file in files), sep="\n")
        if missing := [file for file in named if file not in files]:
            print(f"not entered: {', '.join(missing)}")
            failed = True
        order = [file for file in files if file in named]
        if order != [file for file in named if file in files]:
            print(f"numbered in another order than they are entered: {', '.join(order)}")
            failed = True
    print(f"{len(set(every))} files")
    gdb.execute(f"quit {int(failed)}")


try:
    main()
except Exception as error:  # gdb would go on and exit with 0
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    gdb.execute("quit 2")
