#!/usr/bin/env python3
"""The ordering gate: breaks the ring in one place at a time and runs the models, which must notice.

    python3 tools/mutate.py            all mutants; exit status 1 if one survives (some minutes on two cores)
    python3 tools/mutate.py --write    and writes the list to tests/loom/MUTANTS.md
    python3 tools/mutate.py --list     only says what would be tried
    python3 tools/mutate.py --only X   only mutants whose description matches the regular expression X

Kinds of mutant, found in core/src/ring.rs and core/src/waker.rs:

    weaken    an ordering (of a compare-exchange: on success) one step weaker
    failure   the ordering of a compare-exchange on failure weakened
    torn      a read-modify-write as a load and a store: no longer one step
    blind     a compare-exchange as a store: whatever was there
    wake      a call of `wake` left out

and `logic`, the changes written out in LOGIC below: a protocol step that forgets something.

A mutant that no test can kill, because it means the same, is excused by a comment on its line or the line
above, `// mutate: ok KIND REASON`. An excuse whose mutant dies is reported as stale.

The workspace is not touched: every mutant is made in a private copy. Exit status 2: the gate itself is broken.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "tests/loom/MUTANTS.md"
RING, WAKER, STATE = "core/src/ring.rs", "core/src/waker.rs", "core/src/state.rs"
PRODUCER, CONSUMER = "core/src/producer.rs", "core/src/consumer.rs"
TIMEOUT_S = 600  # many times what the unmutated models take on one core; a mutant that takes it is no success

# Models left out. The step ceilings: a torn exchange is one step more, and would die of that alone. The long
# histories: they take half of the time, and nothing lives until it meets them.
SKIP = ["steps::", "handoff::fifo", "handoff::two_laps"]

# What the pattern-made mutants do not reach: (file, what, the text, which must be there once, its replacement).
LOGIC = [
    (STATE, "commit drops the sticky bits", "State(self.0 & Self::STICKY | Self::FULL | lap.0)", "State(Self::FULL | lap.0)"),
    (STATE, "commit keeps WAITER", "State(self.0 & Self::STICKY | Self::FULL | lap.0)", "State(self.0 | Self::FULL | lap.0)"),
    (STATE, "commit does not set the lap", "State(self.0 & Self::STICKY | Self::FULL | lap.0)", "{ let _ = lap; State(self.0 & Self::STICKY | Self::FULL) }"),
    (STATE, "commit does not set FULL", "State(self.0 & Self::STICKY | Self::FULL | lap.0)", "State(self.0 & Self::STICKY | lap.0)"),
    (STATE, "release drops the sticky bits", "State(self.0 & Self::STICKY)\n", "State(0)\n"),
    (STATE, "release keeps WAITER", "State(self.0 & Self::STICKY)\n", "State(self.0 & (Self::STICKY | Self::WAITER))\n"),
    (STATE, "release keeps the lap and FULL", "State(self.0 & Self::STICKY)\n", "State(self.0 & !Self::WAITER)\n"),
    (STATE, "TX_GONE is not sticky", "Self::TX_GONE | Self::TX_DONE | Self::RX_GONE;", "Self::TX_DONE | Self::RX_GONE;"),
    (STATE, "TX_DONE is not sticky", "Self::TX_GONE | Self::TX_DONE | Self::RX_GONE;", "Self::TX_GONE | Self::RX_GONE;"),
    (STATE, "RX_GONE is not sticky", "Self::TX_GONE | Self::TX_DONE | Self::RX_GONE;", "Self::TX_GONE | Self::TX_DONE;"),
    (STATE, "finish does not set TX_DONE", "State(Self::TX_GONE | Self::TX_DONE)", "State(Self::TX_GONE)"),
    (STATE, "abandon sets TX_DONE", "ABANDON: State = State(Self::TX_GONE)", "ABANDON: State = State(Self::TX_GONE | Self::TX_DONE)"),
    (STATE, "the lap does not flip", "Lap(self.0 ^ State::LAP)", "Lap(self.0)"),
    (STATE, "the lap is not compared", "if self.0 & Self::LAP == lap.0 {", "if true || lap.0 == 0 {"),
    (STATE, "FULL does not win over TX_GONE", "if self.0 & Self::FULL != 0 {\n            if self.0 & Self::LAP", "if self.0 & Self::FULL != 0 && self.0 & Self::TX_GONE == 0 {\n            if self.0 & Self::LAP"),
    (STATE, "RX_GONE does not win over FULL", "if self.0 & Self::RX_GONE != 0 {", "if self.0 & Self::RX_GONE != 0 && self.0 & Self::FULL == 0 {"),
    (STATE, "announce does nothing", "State(self.0 | Self::WAITER)", "State(self.0)"),
    (STATE, "nobody ever waits", "self.0 & Self::WAITER != 0", "false && self.0 != 0"),
    (RING, "the end is told on the first slot only", "for word in self.words() {", "for word in &self.words()[..1] {"),
    (RING, "the end is not told on the first slot", "for word in self.words() {", "for word in &self.words()[self.len().min(2) - 1..] {"),
    (RING, "no look after registering", "let mut seen = self.state();\n        loop {", "let mut seen = before;\n        loop {"),
    (RING, "registered only when announced", "Ok(()) => return None,", "Ok(()) => { self.waiting.cell(side).register(waker); return None }"),
    (RING, "a wake before the handle moves on", "before_wake();\n        let old = State::from_bits(seen);\n        if old.has_waiter() {", "let old = State::from_bits(seen);\n        if old.has_waiter() {"),
    (RING, "sleeps without an announcement", "if let Err(now) = self.announce(seen) {", "if let Err(now) = Ok::<(), State>(()) {"),
    (WAKER, "the other task's waker is forgotten", "old.filter(|old| !same_task(old, waker))", "old.filter(|_| false)"),
    (WAKER, "a task wakes itself when it registers again", "old.filter(|old| !same_task(old, waker))", "old"),
    (WAKER, "the waker is cloned with the cell taken", "let new = waker.clone();\n", "let new = ();\n"),
    (PRODUCER, "the waker is left behind", "self.ring.take_waker(Side::Producer);", "();"),
    (CONSUMER, "the waker is left behind", "self.ring.take_waker(Side::Consumer);", "();"),
    (PRODUCER, "dropped without finish, it is finished", "end: State::ABANDON,", "end: State::FINISH,"),
]
# Where one replacement is not enough: (file, what) -> further replacements in the same mutant.
ALSO = {
    "no look after registering": [("if let Some(found) = ready(self.state()) {", "let before = self.state();\n        if let Some(found) = ready(before) {")],
    "registered only when announced": [("        self.waiting.cell(side).register(waker);\n        let mut", "        let mut")],
    "a wake before the handle moves on": [("            self.waiting.cell(side).wake();\n        }\n        old\n", "            self.waiting.cell(side).wake();\n        }\n        before_wake();\n        old\n")],
    "the waker is cloned with the cell taken": [("            new.wake();\n            return;", "            waker.wake_by_ref();\n            return;"), ("        // SAFETY: `state` is REGISTERING, moved there by us", "        let () = new;\n        let new = waker.clone();\n        // SAFETY: `state` is REGISTERING, moved there by us")],
}

WEAKER = {
    "load": {"Acquire": ["Relaxed"]},
    "store": {"Release": ["Relaxed"]},
    "rmw": {"AcqRel": ["Acquire", "Release"], "Acquire": ["Relaxed"], "Release": ["Relaxed"]},
}
LOAD_HALF = {"AcqRel": "Acquire", "Release": "Relaxed"}
STORE_HALF = {"AcqRel": "Release", "Acquire": "Relaxed"}
NEW_VALUE = {"swap": "{0}", "fetch_or": "old | ({0})", "fetch_and": "old & ({0})"}


@dataclass
class Mutant:
    file: str
    line: int
    kind: str
    what: str
    text: str  # the whole mutated file
    excuse: tuple[int, str] | None = None  # its line, the reason
    verdict: str = ""
    why: str = ""

    def __str__(self):
        return f"{self.file}:{self.line} {self.kind}: {self.what}"


def without_comments(source):
    """The source with comments blanked, every other character where it was."""
    return re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), source)


def call_end(code, opening):
    """The position behind the bracket that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(code)):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if depth == 0:
            return at + 1
    raise ValueError("unbalanced brackets")


def arguments(code, opening):
    """The (start, end) of each argument of the call whose bracket opens at `opening`."""
    spans, start, at, end = [], opening + 1, opening + 1, call_end(code, opening) - 1
    while at <= end:
        if at == end or code[at] == ",":
            blank = len(code[start:at]) - len(code[start:at].lstrip())
            if code[start:at].strip():
                spans.append((start + blank, start + len(code[start:at].rstrip())))
            start = at = at + 1
        else:
            at = call_end(code, at) if code[at] in "([{" else at + 1
    return spans


def pattern_mutants(file, source):
    code = without_comments(source)

    def mutant(kind, what, at, start, end, replacement):
        line = source.count("\n", 0, at) + 1
        return Mutant(file, line, kind, what, source[:start] + replacement + source[end:])

    for call in re.finditer(r"((?:\w+\s*\.\s*)*\w+)\s*\.\s*(load|store|swap|compare_exchange|fetch_or|fetch_and)\(", code):
        target, operation, at = "".join(call[1].split()), call[2], call.start(2)
        spans = arguments(code, call.end() - 1)
        values = [source[start:end] for start, end in spans]
        end = call_end(code, call.end() - 1)
        cas = operation == "compare_exchange"
        orderings = {"compare_exchange": [2, 3], "load": [0]}.get(operation, [1])
        for position in orderings:
            start, stop = spans[position]
            now = values[position].removeprefix("Ordering::")
            ladder = WEAKER["load" if position == 3 or operation == "load" else "rmw"]
            for weaker in ladder.get(now, []):
                kind = "failure" if position == 3 else "weaken"
                yield mutant(kind, f"{operation} {now} -> {weaker}", start, start, stop, f"Ordering::{weaker}")
        if operation in ("load", "store"):
            continue
        ordering = values[orderings[0]].removeprefix("Ordering::")
        load = f"{target}.load(Ordering::{LOAD_HALF.get(ordering, ordering)})"
        store = f"{target}.store({{}}, Ordering::{STORE_HALF.get(ordering, ordering)})"
        if cas:
            expected, new = values[:2]
            failed = f"{target}.load({values[3]})"
            torn = f"{{ let old = {load}; if old == {expected} {{ {store.format(new)}; Ok(old) }} else {{ Err({failed}) }} }}"
            blind = f"{{ {store.format(new)}; Ok::<u32, u32>({expected}) }}"
            yield mutant("blind", f"{operation} as a store", at, call.start(), end, blind)
        else:
            new = NEW_VALUE[operation].format(values[0])
            torn = f"{{ let old = {load}; {store.format(new)}; old }}"
        yield mutant("torn", f"{operation} as a load and a store", at, call.start(), end, torn)

    for call in re.finditer(r"[\w.]+(?:\(\w+\))?\.wake\(", code):
        if "fn " in code[code.rfind("\n", 0, call.start()) : call.start()]:
            continue
        end = call_end(code, call.end() - 1)
        text = source[call.start() : end]
        yield mutant("wake", f"no `{text}`", call.start(), call.start(), end, "()")


def logic_mutants(file, source):
    for where, what, old, new in LOGIC:
        if where != file:
            continue
        text = source
        for before, after in [(old, new), *ALSO.get(what, [])]:
            if text.count(before) != 1:
                sys.exit(f"tools/mutate.py: LOGIC: {what}: {text.count(before)} places in {file} say {before!r}")
            text = text.replace(before, after)
        yield Mutant(file, source[: source.index(old)].count("\n") + 1, "logic", what, text)


def excuses(file, source):
    """Line -> kind -> reason."""
    found = {}
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.search(r"// mutate: ok (\w+) (.+)", line):
            found[number] = (match[1], match[2])
    return found


class Workshop:
    """A private copy of the workspace under the target directory, and a target directory of its own."""

    def __init__(self, number):
        home = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute() / f"mutate/{number}"
        self.tree = home / "tree"
        shutil.rmtree(self.tree, ignore_errors=True)
        # `copy`, not `copy2`: with new times, so that nothing built from an earlier mutant passes for fresh.
        skip = shutil.ignore_patterns("target", ".git", "corpus", "artifacts")
        shutil.copytree(ROOT, self.tree, ignore=skip, copy_function=shutil.copy)
        self.env = dict(os.environ, CARGO_TARGET_DIR=str(home / "target"), RUST_BACKTRACE="0")
        self.env |= {"CARGO_PROFILE_DEV_DEBUG": "0"}  # links faster

    def build(self):
        """The models' executable, or the compiler's errors."""
        command = ["cargo", "test", "-q", "-p", "twinbuf-loom", "--test", "models", "--no-run", "--message-format=json"]
        done = subprocess.run(command, cwd=self.tree, env=self.env, capture_output=True, text=True)
        messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode == 0:
            return next(m["executable"] for m in messages if m.get("executable")), ""
        errors = [m["message"]["rendered"] for m in messages if m.get("message", {}).get("level") == "error"]
        return None, "\n".join(errors) or done.stderr

    def run(self, executable):
        """The verdict, and the model that made it: stops at the first that fails."""
        # One at a time: the last name printed is the model that runs.
        command = [executable, "--test-threads=1", *(f"--skip={models}" for models in SKIP)]
        process = subprocess.Popen(command, cwd=self.tree, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        late = threading.Event()
        timer = threading.Timer(TIMEOUT_S, lambda: (late.set(), process.kill()))
        timer.start()
        output, failed = b"", None
        while not failed and (chunk := process.stdout.read1()):
            output += chunk
            failed = re.search(rb"^test (\S+) \.\.\. FAILED", output, re.M)
        timer.cancel()
        if failed:
            process.kill()  # the rest need not run
        if process.wait() == 0:
            return "SURVIVED", ""
        # A model that deadlocks while it unwinds aborts them all: then it is the last one named.
        last = failed or list(re.finditer(rb"^test (\S+) \.\.\. *", output, re.M))[-1]
        return "TIMEOUT" if late.is_set() else "killed", last[1].decode().removesuffix("::fast")

    def check(self, file, text):
        """(verdict, by what)."""
        path, original = self.tree / file, (self.tree / file).read_text()
        try:
            path.write_text(text)
            executable, errors = self.build()
            if executable is None:
                return "unviable", next((line for line in errors.splitlines() if line.startswith("error")), "?")
            return self.run(executable)
        finally:
            path.write_text(original)


def table(mutants):
    count = {verdict: sum(m.verdict == verdict for m in mutants) for verdict in ("killed", "excused", "SURVIVED")}
    lines = [
        "# The mutants of the ring",
        "",
        "Written by `python3 tools/mutate.py --write`: each line is a change to the ring, and the first model that",
        f"fails with it. {len(mutants)} mutants: {count['killed']} killed, {count['excused']} excused, {count['SURVIVED']} survived.",
        "",
        "| where | kind | change | killed by |",
        "| --- | --- | --- | --- |",
    ]
    for m in mutants:
        by = f"`{m.why}`" if m.verdict == "killed" else f"{m.verdict}: {m.why}".rstrip(": ")
        lines.append(f"| `{m.file.removeprefix('core/src/')}:{m.line}` | {m.kind} | {m.what.replace('|', chr(92) + '|')} | {by} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    start = time.time()

    mutants, every_excuse = [], {}
    for file in (STATE, RING, WAKER, PRODUCER, CONSUMER):
        source = (ROOT / file).read_text()
        found = list(logic_mutants(file, source))
        if file in (RING, WAKER):
            found += pattern_mutants(file, source)
        every_excuse |= {(file, line): excuse for line, excuse in excuses(file, source).items()}
        for m in found:
            for line in (m.line, m.line - 1):
                kind, reason = every_excuse.get((file, line), ("", ""))
                if kind == m.kind:
                    m.excuse = (line, reason)
        mutants += [m for m in found if re.search(options.only, str(m))]
    mutants.sort(key=lambda m: (m.file, m.line))
    if options.list:
        print(*mutants, f"{len(mutants)} mutants", sep="\n")
        return 0

    workshops = queue.Queue()

    def prepare(number):
        workshop = Workshop(number)
        # The canary: what cannot be compiled must not compile, or the mutants would not be compiled either.
        ring = (ROOT / RING).read_text()
        verdict, error = workshop.check(RING, ring + '\ncompile_error!("canary");\n')
        if (verdict, "canary" in error) != ("unviable", True):
            sys.exit(f"tools/mutate.py: the canary lives: {verdict} {error}")
        workshops.put(workshop)

    def examine(m):
        workshop = workshops.get()
        try:
            m.verdict, m.why = workshop.check(m.file, m.text)
        finally:
            workshops.put(workshop)
        if m.verdict == "SURVIVED" and m.excuse:
            m.verdict, m.why = "excused", m.excuse[1]
        print(f"{m.verdict:8} {m}   [{m.why}]", flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(prepare, range(options.jobs)))
        first = workshops.get()
        verdict, by = first.check(RING, (ROOT / RING).read_text())
        workshops.put(first)
        if verdict != "SURVIVED":
            sys.exit(f"tools/mutate.py: the models fail without any mutant: {verdict} {by}")
        print(f"{len(mutants)} mutants, {options.jobs} at a time; ready after {time.time() - start:.0f} s", flush=True)
        list(pool.map(examine, mutants))

    used = {(m.file, m.excuse[0]) for m in mutants if m.verdict == "excused"}
    stale = [] if options.only else sorted(set(every_excuse) - used)
    for file, line in stale:
        print(f"STALE    {file}:{line}: its mutant is gone, or dies")
    bad = [m for m in mutants if m.verdict not in ("killed", "excused")]
    for m in bad:
        print(f"{m.verdict} {m} {m.why}")
    killed, excused = (sum(m.verdict == v for m in mutants) for v in ("killed", "excused"))
    print(f"{killed} of {len(mutants)} killed, {excused} excused, {len(bad)} not, in {time.time() - start:.0f} s")
    if options.write:
        LIST.write_text(table(mutants))
    return 1 if bad or stale else 0


if __name__ == "__main__":
    sys.exit(main())
