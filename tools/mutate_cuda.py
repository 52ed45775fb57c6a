#!/usr/bin/env python3
"""Breaks twinbuf-cuda in one place at a time and runs its tests on the software driver. They must notice.

    python3 tools/mutate_cuda.py            all mutants; exit status 1 if one survives that has no excuse (an hour)
    python3 tools/mutate_cuda.py --only X   only mutants whose description matches the regular expression X
    python3 tools/mutate_cuda.py --list     only says what would be tried
    python3 tools/mutate_cuda.py --log F    appends each verdict to the file F, and skips the mutants that it has

A mutant is killed by the first test program that fails, does not end, or does not compile while the library does. The
workspace is not touched: every mutant is made in a private copy under the target directory. Exit status 2: the gate
itself is broken.
"""

import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Quick ones first. What follows a program's name filters its tests.
TESTS = ["slots", "captures", "leases", "fuzz", "neighbour", "batches", "errors", "allocations", "--lib"]
STAGER_TESTS = ["stager -- --skip call", "captures scope", "--lib stager", "fuzz scopes", "stager call"]
TIMEOUT_S = 600  # several times what the slowest of them takes

# (file in cuda/src, what, the text, present once, its replacement)
MUTANTS = [
    # The edges, and where they are drawn.
    ("edge.rs", "edge 1 does not wait", "if !done && wait {", "if !done && wait && false {"),
    ("edge.rs", "edge 1 takes a query for a wait", "Ok(done || wait)", "Ok(done || true)"),
    ("slot.rs", "edge 2 is missing where a stream is remembered", "            unsafe { edge::use_after_copy(stream, self.copied.raw()) }?;\n        }\n        uses.streams.push", "        }\n        uses.streams.push"),
    ("slot.rs", "edge 3 waits for all streams but the first", "for consumed in &uses.consumed[..uses.recorded] {", "for consumed in uses.consumed[..uses.recorded].iter().skip(1) {"),
    ("slot.rs", "edge 3 waits for the first stream only", "for consumed in &uses.consumed[..uses.recorded] {", "for consumed in uses.consumed[..uses.recorded].iter().take(1) {"),
    ("slot.rs", "edge 3 is drawn once", "        uses.recorded = 0;\n        Ok(())", "        Ok(())"),
    ("slot.rs", "one event for all streams", "if uses.consumed.len() == uses.streams.len() {", "if uses.consumed.is_empty() {"),
    ("slot.rs", "a stream is remembered before it waits, and twice", "if uses.streams.iter().any(|used| used.stream == stream) {", "if false {"),
    ("slot.rs", "a use that was lost is forgotten", "uses.lost = Some(error);", "drop(error);"),
    ("slot.rs", "a record that failed is not waited for", "unsafe { cu::synchronize(used.stream) }.map_err(|_| error)", "{ drop(error); Ok::<(), Error>(()) }"),
    ("slot.rs", "a slot is freed before its last uses", "self.copy_after_uses().or_else(|_| self.copy_after_uses()).is_err()", "false"),
    ("slot.rs", "the batch's length is that of the slot before", "self.len = len;\n        self.last", "self.last"),
    ("slot.rs", "the rest begins at the start", "self.piece = flushed.min(len)..len;", "let _ = flushed; self.piece = 0..len;"),
    ("slot.rs", "a part is the batch's last", "        self.piece = part;\n        self.last = false;", "        self.piece = part;"),
    ("slot.rs", "the copy's event is for timing always", "        if !timed {\n            flags", "        if false {\n            flags"),
    # Captures.
    ("slot.rs", "a captured stream is used", "return Err(Error::Captured);", "{}"),
    ("slot.rs", "a captured stream is recorded on", "if uses.streams.iter().any(is_captured) {", "if uses.streams.iter().any(is_captured) && false {"),
    ("slot.rs", "only a first use asks for captures", "        if unsafe { cu::is_captured(stream) }? {\n            return Err(Error::Captured);\n        }\n        let uses = &mut *self.uses.borrow_mut();\n        if uses.streams.iter().any(|used| used.stream == stream) {\n            return Ok(());\n        }", "        let uses = &mut *self.uses.borrow_mut();\n        if uses.streams.iter().any(|used| used.stream == stream) {\n            return Ok(());\n        }\n        if unsafe { cu::is_captured(stream) }? {\n            return Err(Error::Captured);\n        }"),
    ("slot.rs", "memory that a captured stream uses is freed", "if !self.end_uses() || ", "if "),
    ("slot.rs", "memory whose uses are unknown is freed", "            self.bytes.leak();", "            ();"),
    ("cu.rs", "the default stream is never captured", "Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => Ok(true),", "Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => Ok(false),"),
    ("cu.rs", "the capture mode is not restored", "let _ = exchange(self.before).or_else(|| exchange(self.before));", "let _ = self.before;"),
    ("cu.rs", "the capture mode is not relaxed", "let relaxed = || exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);", "let relaxed = || exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);"),
    ("cu.rs", "the capture mode is relaxed in one try", "relaxed().or_else(relaxed)?", "relaxed()?"),
    ("lease.rs", "a slot that a capture holds is never released", "captured.retain(|slot| !slot.end_uses());", "captured.retain(|_| true);"),
    ("lease.rs", "a slot that a capture holds is released at once", "captured.retain(|slot| !slot.end_uses());", "captured.clear();"),
    ("lease.rs", "an owned copy allocates as captures forbid", "        let _beside = BesideCaptures::enter();\n        // SAFETY: the copy below", "        // SAFETY: the copy below"),
    ("batches.rs", "`recv` releases nothing", "        if let Some(held) = self.held_by_a_capture() {\n            return held;\n        }\n", ""),
    ("copy/by_hand.rs", "`acquire` by hand releases nothing", "        self.shared.release_captured(None);\n", ""),
    ("lease/view.rs", "a view is read in a capture", " && unsafe { cu::is_captured(stream) } != Ok(true)", ""),
    # The caller's context.
    ("cu.rs", "the caller's context is not restored", "if let Some(before) = self.before {", "if let Some(before) = self.before.filter(|_| false) {"),
    ("cu.rs", "no context is not restored", "Some(before.unwrap_or(ptr::null_mut()))\n        };", "before\n        };"),
    ("context.rs", "`context` leaves its context current", "let _current = Current::keep()?;", "();"),
    ("cu.rs", "the context is entered for a free in one try", "Self::enter(ctx).or_else(|_| Self::enter(ctx)).ok()", "Self::enter(ctx).ok()"),
    ("lease/view.rs", "a copy to another context is made", "stream.cu_stream().addr() != LEGACY && ", ""),
    ("lease/view.rs", "a view is read on any stream", "self.slot().is_used_on(stream) && ", "true && "),
    ("lease.rs", "a stream of another context is accepted", "if *stream.context() != self.shared.ctx {", "if false {"),
    ("lease.rs", "the per-thread stream is accepted", "if stream.addr() == PER_THREAD {", "if stream.addr() == PER_THREAD + 99 {"),
    # Memory.
    ("cu.rs", "the copy stream is blocking", "result::stream::StreamKind::NonBlocking", "result::stream::StreamKind::Default"),
    ("uploader.rs", "host slots are always write-combined", "if self.write_combined { sys::CU_MEMHOSTALLOC_WRITECOMBINED } else { 0 }", "sys::CU_MEMHOSTALLOC_WRITECOMBINED"),
    ("uploader.rs", "host slots are never write-combined", "if self.write_combined { sys::CU_MEMHOSTALLOC_WRITECOMBINED } else { 0 }", "0"),
    ("memory.rs", "host slots are handed out uninitialized", "unsafe { start.write_bytes(0, len) };", ";"),
    ("memory.rs", "device memory without pools is freed without a wait", "            let _ = self.stream.settle();\n", ""),
    ("memory.rs", "host memory is never freed", "let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };", "let _ = ctx;"),
    ("copy/by_hand.rs", "slots are not leaked after a failed settle by hand", "mem::forget(mem::take(&mut self.slots));", "self.slots.clear();"),
    ("copy.rs", "slots are not leaked after a failed settle", "            mem::forget(held);", "            drop(held);"),
    ("copy.rs", "nothing is settled", "let settled = self.stream.settle().is_ok();", "let settled = true;"),
    # Copies, their order and times.
    ("uploader.rs", "as many copies in flight as host slots", "let limit = host_depth.min(device_depth);", "let limit = host_depth;"),
    ("uploader.rs", "one copy in flight", "let limit = host_depth.min(device_depth);", "let limit = 1;"),
    ("copy.rs", "the callback comes before the slot is free", "        held.clear();\n        self.spare.push(held);\n", "        let _free = held;\n"),
    ("copy.rs", "vectors are not reused", "        self.spare.push(held);\n", "        drop(held);\n"),
    ("copy.rs", "an abandoned batch is not waited for", "            unsafe { cu::synchronize(self.stream.raw()) }?;\n            self.open.clear();", "            self.open.clear();"),
    ("copy.rs", "the first copy's start is recorded at each chunk", ".filter(|_| !self.started)", ".filter(|_| true)"),
    ("copy/thread.rs", "a slot that a copy holds is the end", "Err(TryRecvError::Empty | TryRecvError::Held) => copies.retire_done()?,", "Err(TryRecvError::Empty) => copies.retire_done()?,"),
    ("copy/thread.rs", "a cancelled slot is the end", "Err(RecvError::Cancelled) => continue, // a slot of several chunks was dropped without a commit", "Err(RecvError::Cancelled) => return Ok(End::Abandoned),"),
    ("copy/thread.rs", "an abandoned reader has finished", "return Ok(if end.is_ok() { End::Finished } else { End::Abandoned });", "return Ok(End::Finished);"),
    ("copy/thread.rs", "batches have one number", "        seq += 1;\n", ""),
    ("copy/by_hand.rs", "a forgotten slot is not waited for", "        // A slot that was forgotten after a flush is this one again.\n        self.abandon();\n", ""),
    ("copy/by_hand.rs", "a panic by hand goes on", "        let device = self.device.take();\n        let room = entered.and_then(|_current| self.copies.make_room());\n        self.device = device;\n", "        let room = entered.and_then(|_current| self.copies.make_room());\n"),
    ("copy/by_hand.rs", "one host slot by hand", "self.turn = (self.turn + 1) % self.slots.len();", ""),
    ("copy/by_hand.rs", "a full uploader by hand is not waited for", "if !self.copies.is_full() {", "if true {"),
    ("host.rs", "a dropped slot keeps its chunks", "        self.0.clear();\n    }\n}\n\n/// A slot of [`ByHand`].", "    }\n}\n\n/// A slot of [`ByHand`]."),
    ("host.rs", "flushed bytes are still accessible", "        self.flushed = until;\n", ""),
    ("host.rs", "the last chunk can be flushed", "(filled / chunk).min(self.layout.chunks() - 1) * chunk", "(filled / chunk).min(self.layout.chunks()) * chunk"),
    ("uploader.rs", "a chunk has no least size", "let least = slot_bytes.div_ceil(Self::MAX_CHUNKS).max(1);", "let least = 1;"),
    # A stager.
    ("stager.rs", "the caller's stream does not wait", "                unsafe { edge::use_after_copy(stream.cu_stream(), done.raw()) }?;", "                ();"),
    ("stager.rs", "the end is not recorded", "                unsafe { cu::record(done.raw(), copies.raw()) }?;", "                ();"),
    ("stager.rs", "a failed scope does not wait", "drain.needed = ended.is_err();", "drain.needed = false;"),
    ("stager.rs", "a panic does not wait", "needed: true };", "needed: false };"),
    ("stager.rs", "copies that cannot be waited for are forgotten", "*self.lost = self.copies.settle().err();", "let _ = self.copies.settle();"),
    ("stager.rs", "a stager goes on after that", "        if let Some(error) = &self.lost {\n            return Err(error.clone());\n        }\n", ""),
    ("stager.rs", "its slots are freed", "if self.lost.is_some() || self.stream.settle().is_err() {", "if self.stream.settle().is_err() {"),
    ("stager.rs", "slots are freed under copies", "if self.lost.is_some() || self.stream.settle().is_err() {", "if self.lost.is_some() {"),
    ("stager.rs", "an error of a thread is not the scope's", "            fate.get().cloned().map_or(Ok(()), Err)?;\n", ""),
    ("stager.rs", "a stream that is captured by now waits", "                    return Err(Error::Captured.into());", "                    ();"),
    ("stager.rs", "a stream of another context", "if stream.context() != ctx {", "if false {"),
    ("stager/lane.rs", "a slot is filled under its copies", "if mem::take(&mut self.copying) {", "if mem::take(&mut self.copying) && false {"),
    ("stager/lane.rs", "copies do not wait for the stream", "        unsafe { edge::copy_after_use(copies.raw(), slot.ready.raw()) }?;", "        ();"),
    ("stager/lane.rs", "copies are not remembered", "slot.copying = true;", "slot.copying = false;"),
    ("stager/lane.rs", "the event of a slot is not recorded", "        unsafe { cu::record(slot.copied.raw(), copies.raw()) }", "        Ok(())"),
    ("stager/lane.rs", "all pieces of a slot are one copy", "pieces.chunk_by(|_, next| next.follows)", "pieces.chunk_by(|_, _| true)"),
    ("stager/lane.rs", "each piece is a copy", "pieces.chunk_by(|_, next| next.follows)", "pieces.chunk_by(|_, _| false)"),
    ("stager/lane.rs", "each copy is from the start of the slot", "host = unsafe { host.add(len) };", "host = unsafe { host.add(len - len) };"),
    ("stager/lane.rs", "the last offload is lost", "return last.map_or(Ok(()), |mut order| order.unload());", "return Ok(());"),
    ("stager/lane.rs", "an offload is lost if another follows", "                    before.unload()?;", "                    drop(before.pieces.pop());"),
    ("stager/lane.rs", "a fill's context stays", "        cu::bind(copies.context())?;\n        // SAFETY: both exist.\n        unsafe { edge", "        // SAFETY: both exist.\n        unsafe { edge"),
    ("stager/lane.rs", "a fill thread breaks captures", "    let _beside = BesideCaptures::enter();\n    // An offload", "    // An offload"),
    ("stager/staging.rs", "lengths may differ", "if host == device {", "if true {"),
    ("stager/staging.rs", "memory of another context", "if owner.context() != ctx {", "if false {"),
    ("stager/staging.rs", "an error of a call is not the scope's", "let _ = self.fate.set(error.clone());", "let _ = error;"),
    ("stager/staging.rs", "a captured stream is used", "if captured { Err(Error::Captured) } else { Ok(current) }", "let _ = captured;\n            Ok(current)"),
    ("stager/staging.rs", "neighbours are one allocation", "        within(&self.allocation)\n    }", "        true\n    }"),
    ("stager/staging.rs", "no two pieces are one copy", "order.end() == Some(device) && ", "false && order.end() == Some(device) && "),
    ("stager/staging.rs", "one slot has both directions", "Some(order) if order.way() == way => order,", "Some(order) => order,"),
    ("stager/staging.rs", "the last slot stays", "let _ = if worked { self.dispatch() } else { Ok(()) };", "let _ = worked;"),
    ("stager/staging.rs", "the stream's work is not recorded", "self.fail(unsafe { cu::record(order.ready().raw(), self.used.stream.cu_stream()) })?;", "();"),
    ("stager/staging.rs", "cudarc records in a capture", "            mem::forget(mem::take(&mut self.guards));", "            ();"),
    ("stager/staging.rs", "an error of cudarc's wait is lost", 'if let Err(error) = check("cuStreamWaitEvent", ctx.check_err()) {', 'if let (Err(error), false) = (check("cuStreamWaitEvent", ctx.check_err()), true) {'),
    ("stager/staging.rs", "cudarc records a use after a failed wait", "            mem::forget(guard);", "            drop(guard);"),
    ("stager/staging.rs", "an error of cudarc's record is lost", 'check("cuEventRecord", ctx.check_err())', 'Ok(drop(ctx.check_err()))'),
    ("stager/staging.rs", "cudarc's record comes before the wait", "        self.used.guards.push(guard);", "        drop(guard);"),
    ("stager/staging.rs", "a free thread is passed over", "Err(TryAcquireError::Full) => {}", "Err(TryAcquireError::Full) => break,"),
    ("time.rs", "a copy may begin before it was issued", ".min(latest).max(issued)", ".min(latest)"),
    ("error.rs", "nothing", "#[non_exhaustive]\npub enum Error {", "#[non_exhaustive]\n#[doc(hidden)]\npub enum Error {"),
]

# What -> why no test can kill it.
EXCUSES = {
    "the copy's event is for timing always": "such an event costs time on a device, and nothing else shows it",
    "a free thread is passed over": "a scope is slower, and right",
    "a dropped slot keeps its chunks": "the next `acquire`, `finish` or drop gives them back",
    "nothing": "the canary: it must survive",
}


def run(tree, env, tests):
    """What killed the library in `tree`, or `None`."""
    cargo = ["cargo", "test", "-q", "-p", "twinbuf-cuda"]
    if subprocess.run(["cargo", "check", "-q", "-p", "twinbuf-cuda"], cwd=tree, env=env, capture_output=True).returncode:
        return "UNVIABLE"
    # Apart, because on a busy machine a build takes longer than a test may. A test that does not compile fails below.
    programs = {word for test in tests if (word := test.split()[0]) != "--lib"}
    subprocess.run([*cargo, "--no-run", "--lib", *(f"--test={name}" for name in programs)], cwd=tree, env=env, capture_output=True)
    for test in tests:
        command = [*cargo, *([] if test.startswith("--") else ["--test"]), *test.split()]
        done = subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            stdout, stderr = done.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.communicate()
            return f"{test}, which does not end"
        if done.returncode != 0:
            failed = re.search(r"^(\S+) --- FAILED|^test (\S+) \.\.\. FAILED", stdout, re.M)
            return f"{test}: {failed[1] or failed[2]}" if failed else f"{test}: {(stderr.strip().splitlines() or ['?'])[-1][:80]}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path(os.devnull))
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if re.search(options.only, f"{m[0]} {m[1]}")]
    known = options.log.read_text() if options.log.exists() else ""
    mutants = [m for m in mutants if f" {m[0]}: {m[1]}   [" not in known]
    sources = {}
    for file, what, old, new in MUTANTS:
        sources[file] = (ROOT / "cuda/src" / file).read_text()
        if sources[file].count(old) != 1:
            print(f"{what}: {sources[file].count(old)} places in cuda/src/{file} have {old!r}")
            return 2
    if options.list:
        print(*(f"{file}: {what}" for file, what, *_ in mutants), f"{len(mutants)} mutants", sep="\n")
        return 0
    home = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute() / "mutate-cuda"
    tree = home / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    skip = shutil.ignore_patterns("target", ".git", "corpus", "artifacts")
    shutil.copytree(ROOT, tree, ignore=skip, copy_function=shutil.copy)
    env = dict(os.environ, CARGO_TARGET_DIR=str(home / "target"), RUST_BACKTRACE="0", CARGO_PROFILE_DEV_DEBUG="0")
    env |= {"TWINBUF_CUDA_SEEDS": "192", "TWINBUF_FUZZ_CASES": "200"}
    start = time.time()
    # A run that continues another has tried the tests already.
    every = dict.fromkeys([*TESTS, *STAGER_TESTS])
    if not known and (killer := run(tree, env, every)) is not None:
        print(f"the tests fail without any mutant: {killer}")
        return 2
    print(f"{len(mutants)} mutants; the tests without one took {time.time() - start:.0f} s", flush=True)
    lived = []
    for file, what, old, new in mutants:
        path = tree / "cuda/src" / file
        path.write_text(sources[file].replace(old, new))
        began = time.time()
        killer = run(tree, env, STAGER_TESTS if file.startswith("stager") else TESTS)
        path.write_text(sources[file])
        os.utime(path)
        if killer == "UNVIABLE" or killer is None and what not in EXCUSES:
            lived.append(what)
        verdict = {None: "excused" if what in EXCUSES else "SURVIVED", "UNVIABLE": "UNVIABLE"}.get(killer, "killed")
        reason = EXCUSES.get(what, "") if killer is None else killer
        line = f"{verdict:8} {file}: {what}   [{reason}] {time.time() - began:.0f} s"
        print(line, flush=True)
        with options.log.open("a") as log:
            print(line, file=log)
    killed = len(mutants) - len(lived) - sum(m[1] in EXCUSES for m in mutants)
    print(f"{killed} of {len(mutants)} killed, not: {lived}, in {time.time() - start:.0f} s")
    return 1 if lived else 0


if __name__ == "__main__":
    sys.exit(main())
