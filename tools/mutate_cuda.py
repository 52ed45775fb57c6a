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
TESTS = [*(f"all {name}::" for name in ("slots", "captures", "leases", "fuzz", "neighbour", "batches")), "driver", "all errors::", "allocations", "--lib"]
STAGER_TESTS = ["all stager::", "all captures::a_scope", "--lib stager", "all fuzz::random_scopes", "all neighbour::waits", "all errors::"]
TIMEOUT_S = 150  # several times what the slowest of them takes

# What a mutant is about, and the program that is likely to see it: tried first.
LIKELY = [
    ("captur", "captures"), ("driver.rs", "driver"), ("context|spin|elsewhere", "neighbour"), ("lease.rs|time", "leases"),
    ("no one|by hand|in flight|least", "batches"), ("settle|leak|lost|error|free", "errors"), ("edge", "leases"),
]

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
    ("slot.rs", "a stream is remembered before it waits, and twice", "if uses.has(stream) {", "if false {"),
    ("slot.rs", "a use that was lost is forgotten", "|error| uses.lost = Some(error)", "drop"),
    ("slot.rs", "a record that failed is not waited for", "unsafe { cu::synchronize(used.stream) }.map_err(|_| error)", "{ drop(error); Ok::<(), Error>(()) }"),
    ("slot.rs", "a slot is freed before its last uses", "cu::twice(|| self.copy_after_uses()).is_err()", "false"),
    ("slot.rs", "the copy's event is for timing always", "Event::new(ctx, timed, true)?", "Event::new(ctx, true, true)?"),
    # Captures.
    ("slot.rs", "a captured stream is used", "return Err(Error::Captured);", "{}"),
    ("slot.rs", "a captured stream is recorded on", "if uses.streams.iter().any(is_captured) {", "if uses.streams.iter().any(is_captured) && false {"),
    ("slot.rs", "only a first use asks for captures", "        if unsafe { cu::is_captured(stream) }? {\n            return Err(Error::Captured);\n        }\n        let uses = &mut *self.uses.borrow_mut();\n        if uses.has(stream) {\n            return Ok(());\n        }", "        let uses = &mut *self.uses.borrow_mut();\n        if uses.has(stream) {\n            return Ok(());\n        }\n        if unsafe { cu::is_captured(stream) }? {\n            return Err(Error::Captured);\n        }"),
    ("slot.rs", "memory that a captured stream uses is freed", "if !self.end_uses() || ", "if "),
    ("slot.rs", "memory whose uses are unknown is freed", "            return;\n        }\n        if self.stream.context().has_async_alloc() {", "        }\n        if self.stream.context().has_async_alloc() {"),
    ("cu.rs", "the default stream is never captured", "Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => Ok(true),", "Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => Ok(false),"),
    ("cu.rs", "the capture mode is not restored", "let _ = exchange(self.before);", "let _ = self.before;"),
    ("cu.rs", "the capture mode is not relaxed", "exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?", "exchange(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)?"),
    ("cu.rs", "the capture mode is relaxed in one try", "twice(once).ok()", "once().ok()"),
    ("lease.rs", "a slot that a capture holds is never released", "captured.extract_if(.., |slot| slot.end_uses())", "captured.extract_if(.., |_| false)"),
    ("lease.rs", "a slot that a capture holds is released at once", "captured.extract_if(.., |slot| slot.end_uses())", "captured.extract_if(.., |_| true)"),
    ("lease.rs", "an owned copy allocates as captures forbid", "        let _apart = cu::apart(&self.shared.ctx)?;\n        // SAFETY: the copy below", "        let _current = Current::enter(&self.shared.ctx)?;\n        // SAFETY: the copy below"),
    ("lease/view.rs", "a view is read in a capture", " && !is_captured()", ""),
    # The caller's context.
    ("cu.rs", "the caller's context is not restored", "if let Some(before) = self.before {", "if let Some(before) = self.before.filter(|_| false) {"),
    ("cu.rs", "no context is not restored", "before: Some(before.unwrap_or(ptr::null_mut()))", "before"),
    ("context.rs", "`context` leaves its context current", "let _current = Current::keep()?;", "();"),
    ("cu.rs", "the context is entered for a free in one try", "twice(|| Self::enter(ctx)).ok()", "Self::enter(ctx).ok()"),
    ("lease/view.rs", "a copy to another context is made", "handle.addr() != LEGACY && ", ""),
    ("lease/view.rs", "a view is read on any stream", "self.uses.borrow().has(handle) && ", ""),
    ("lease.rs", "the per-thread stream is accepted", "if stream.addr() == PER_THREAD {", "if stream.addr() == PER_THREAD + 99 {"),
    # Memory.
    ("cu.rs", "the copy stream is blocking", "result::stream::StreamKind::NonBlocking", "result::stream::StreamKind::Default"),
    ("lent.rs", "host slots are handed out uninitialized", "unsafe { start.write_bytes(0, len) };", ";"),
    ("slot.rs", "device memory without pools is freed without a wait", "            let _ = self.stream.settle();\n", ""),
    ("lent.rs", "host memory is never freed", "let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };", "let _ = self.start;"),
    ("copy.rs", "nothing is settled", "!self.running.is_empty() && self.stream.settle().is_err()", "!self.running.is_empty() && false"),
    # Copies, their order and times.
    ("copy.rs", "one copy in flight more than device slots", "next.seq() - oldest.source.seq() >= self.device.depth() as u64", "next.seq() - oldest.source.seq() > self.device.depth() as u64"),
    ("copy.rs", "one copy in flight", "next.seq() - oldest.source.seq() >= self.device.depth() as u64", "next.seq() > oldest.source.seq()"),
    ("copy.rs", "slots that were dropped are not counted", "next.seq() - oldest.source.seq() >= self.device.depth() as u64", "self.copies.running.len() >= self.device.depth()"),
    # A stager.
    ("stager.rs", "the caller's stream does not wait", "                unsafe { edge::use_after_copy(stream.cu_stream(), done.raw()) }?;", "                ();"),
    ("stager.rs", "the end is not recorded", "                unsafe { cu::record(done.raw(), copies.raw()) }?;", "                ();"),
    ("stager.rs", "a failed scope does not wait", "if ended.is_ok() {\n            mem::forget(drain);", "if true {\n            mem::forget(drain);"),
    ("stager.rs", "a panic does not wait", "OnDrop(|| *lost = copies.settle().err());", "OnDrop(|| if !thread::panicking() { *lost = copies.settle().err() });"),
    ("stager.rs", "copies that cannot be waited for are forgotten", "*lost = copies.settle().err()", "drop(copies.settle())"),
    ("stager.rs", "a stager goes on after that", "        self.lost.clone().map_or(Ok(()), Err)?;\n", ""),
    ("stager.rs", "its slots are freed", "if self.lost.is_some() || self.stream.settle().is_err() {", "if self.stream.settle().is_err() {"),
    ("stager.rs", "slots are freed under copies", "if self.lost.is_some() || self.stream.settle().is_err() {", "if self.lost.is_some() {"),
    ("stager.rs", "an error of a thread is not the scope's", "            fate.get().cloned().map_or(Ok(()), Err)?;\n", ""),
    ("stager.rs", "a stream that is captured by now waits", "                    return Err(Error::Captured.into());", "                    ();"),
    ("stager.rs", "a stream of another context", "if stream.context() != ctx {", "if false {"),
    ("stager/staging.rs", "lengths may differ", "if host == device {", "if true {"),
    ("stager/staging.rs", "memory of another context", "if owner.context() != ctx {", "if false {"),
    ("stager/staging.rs", "an error of a call is not the scope's", "ending(self.fate, usable)", "usable"),
    ("stager/staging.rs", "a captured stream is used", "if captured { Err(Error::Captured) } else { Ok(current) }", "let _ = captured;\n            Ok(current)"),
    ("stager/staging.rs", "neighbours are one allocation", "        within(&self.allocation)\n    }", "        true\n    }"),
    ("stager/staging.rs", "the last slot stays", "let _ = if worked { self.dispatch() } else { Ok(()) };", "let _ = worked;"),
    ("stager/staging.rs", "cudarc records in a capture", "            mem::forget(mem::take(&mut self.guards));", "            ();"),
    ("stager/staging.rs", "an error of cudarc's wait is lost", 'if let Err(error) = check("cuStreamWaitEvent", ctx.check_err()) {', 'if let (Err(error), false) = (check("cuStreamWaitEvent", ctx.check_err()), true) {'),
    ("stager/staging.rs", "cudarc records a use after a failed wait", "            mem::forget(guard);", "            drop(guard);"),
    ("stager/staging.rs", "an error of cudarc's record is lost", 'check("cuEventRecord", ctx.check_err())', 'Ok(drop(ctx.check_err()))'),
    ("stager/staging.rs", "cudarc's record comes before the wait", "        self.used.guards.push(guard);", "        drop(guard);"),
    ("time.rs", "a copy may begin before it was issued", ".min(latest).max(issued)", ".min(latest)"),
    # What one side hands to the other: parts, ends, waits.
    ("copy.rs", "the batch's length is that of the slot before", "(slot.len, slot.issued) = (source.len, Instant::now());", "slot.issued = Instant::now();"),
    ("copy.rs", "a batch does not begin", "        slot.copy_after_uses()?;\n", ""),
    ("copy.rs", "more copies than events", "if self.is_full() {", "if false {"),
    ("copy.rs", "slots are not leaked after a failed settle", "mem::forget(mem::take(&mut self.running));", "self.running.clear();"),
    ("copy.rs", "the callback comes before the slot is free", "        drop(source);\n", "        let _free = source;\n"),
    ("copy.rs", "a slot that a copy holds is the end", "Poll::Pending => return Ok(Needs::Batch),", "Poll::Pending if self.copies.running.is_empty() => return Ok(Needs::Batch),\n                    Poll::Pending => return Ok(Needs::End(false)),"),
    ("copy.rs", "a cancelled slot is the end", "Poll::Ready(Err(RecvError::Cancelled)) => Err(RecvError::Cancelled),", "Poll::Ready(Err(RecvError::Cancelled)) => return Ok(Needs::End(false)),"),
    ("copy.rs", "a cancelled slot is passed over", "                drop(slot.reserve());\n", "                let _ = &mut slot;\n"),
    ("copy.rs", "an abandoned reader has finished", "Poll::Ready(Err(_abandoned)) => return Ok(Needs::End(false)),", "Poll::Ready(Err(_abandoned)) => return Ok(Needs::End(true)),"),
    ("copy.rs", "the context is not entered for a copy", "            let _current = Current::enter(self.copies.stream.context())?;\n", ""),
    ("copy.rs", "copies are not polled while a batch is waited for", "            while self.copies.retire(false)? {}\n            // Nothing", "            // Nothing"),
    ("copy.rs", "the last copies are not told of", "                    while self.copies.retire(true)? {}\n                    return Ok(finished);", "                    return Ok(finished);"),
    ("copy.rs", "an error by hand goes on", "ending(&self.shared.fate, work(&mut engine));\n        if result.is_ok() {", "work(&mut engine);\n        if true {"),
    ("copy.rs", "an error is not told", "Err(error) => drop(fate.set(error)),", "Err(error) => drop((fate, error)),"),
    ("copy.rs", "the end by hand is not told", "engine.into_iter().for_each(|engine| engine.end(finished));", "drop((engine, finished));"),
    ("copy.rs", "the last copies by hand are not told of", "                    while self.copies.retire(true)? {}\n                    return Ok(Some(finished));", "                    return Ok(Some(finished));"),
    ("copy.rs", "`acquire` by hand releases nothing", "let captured = self.shared.release_captured(None);", "let captured = false;"),
    ("copy.rs", "a deadline by hand looks once", "thread::sleep(rest.min(Duration::from_millis(1)));", "thread::sleep(rest);"),
    ("copy.rs", "a deadline by hand gives up at the first look", "            if rest.is_zero() {", "            if true {"),
    ("copy.rs", "a full uploader by hand is not waited for", "while matches!(hosts.try_acquire(), Err(TryAcquireError::Full)) {", "while false {"),
    ("copy.rs", "by hand a waited copy keeps a capture from going on", "                let _apart = cu::apart(engine.copies.stream.context())?;\n                if !engine", "                if !engine"),
    ("slot.rs", "a batch may be longer than its slot", "if len > self.memory.len {", "if false {"),
    ("host.rs", "a slot whose length is refused is lost", "        self.slot.put(len, meta)?;\n        self.copying.committed(self.slot.commit())", "        self.reserve().commit(len, meta)"),
    ("host.rs", "by hand the drop of the filling side is not told", "        // The error is ignored here: later calls of both sides return it.\n        let _ = self.go_on();\n", ""),
    ("host.rs", "a slot by hand is dropped before the copies go on", "    slot: twinbuf_core::ReservedSlot<'static, HostBuf<M>>,\n    copying: Copying<M>,\n", "    copying: Copying<M>,\n    slot: twinbuf_core::ReservedSlot<'static, HostBuf<M>>,\n"),
    ("host.rs", "a commit by hand copies nothing", "        self.go_on()\n    }\n}\n\nimpl<M: 'static> Drop for Copying", "        Ok(())\n    }\n}\n\nimpl<M: 'static> Drop for Copying"),
    ("host.rs", "a commit that no one receives succeeds", "committed.map_err(|Closed| ended(&self.fate))?;", "drop(committed);"),
    ("copy.rs", "the ring of the host slots wakes no one", "        self.0.unpark();", "        let _ = &self.0;"),
    ("copy.rs", "an empty batch is copied", "let copied = (slot.len > 0).then(|| slot.copied.raw());", "let copied = Some(slot.copied.raw());"),
    ("copy.rs", "the caller's code by hand waits for itself", "*lock(&self.user) == Some(thread::current().id())", "false"),
    ("copy.rs", "a panic by hand leaves the thread within", "OnDrop(|| *lock(&self.user) = None)", "OnDrop(|| ())"),
    ("lease.rs", "a capture's slot is released under the lock", "        drop(captured);\n        // Not", "        // Not"),
    ("stager/staging.rs", "an offload fills one place", "Host::Take(rest.split_off_mut(..len).unwrap_or_default())", "Host::Take(rest.split_off_mut(..len).map(|part| &mut part[..0]).unwrap_or_default())"),
    ("host.rs", "the copy thread joins itself", "thread.thread().id() != thread::current().id()", "thread.thread().id() != thread::current().id() || true"),
    ("host.rs", "`finish` gives up open slots", "        self.ring.finish();\n", "        drop(self.ring);\n"),
    ("host.rs", "the drop of the receiving side wakes no one", "        thread.thread().unpark();\n", ""),
    ("copy.rs", "the copy thread waits though no one receives", "(Needs::Batch, _) if self.device.is_closed() =>", "(Needs::Batch, _) if false =>"),
    ("batches.rs", "`recv` releases nothing", "        self.shared.release_captured(None);\n        self.pump();", "        self.pump();"),
    ("batches.rs", "a deadline looks once", "if looks { deadline.min(Instant::now() + Duration::from_millis(1)) } else { deadline }", "deadline"),
    ("batches.rs", "a deadline gives up at the first look", "if !waits || ", "if true || "),
    ("batches.rs", "a task waits for a capture", "if self.held_by_a_capture() || self.hand.is_some() && !self.ring.is_held() {", "if self.hand.is_some() && !self.ring.is_held() {"),
    ("batches.rs", "by hand a task waits for a lease that is gone", "if self.hand.is_some() && received.is_pending() && !self.ring.is_held() {", "if false {"),
    ("copy.rs", "a task by hand is not told of the end", "        self.task.take().into_iter().for_each(Waker::wake);\n", ""),
    ("batches.rs", "a cancelled batch has no number", "Ok(Some(_)) | Err(TryRecvError::Cancelled)", "Ok(Some(_))"),
    ("batches.rs", "a receive by hand copies nothing", "        let _ = self.hand.as_ref().map(|hand| hand.pump());\n", ""),
    ("batches.rs", "within another call by hand a deadline is waited for", "if self.hand.as_ref().is_some_and(|hand| hand.is_within()) {", "if false {"),
    ("batches.rs", "a receive by hand does not wait for other threads", " || self.hand.is_some();\n            let until", ";\n            let until"),
    ("lease.rs", "a stream of another context is accepted", "if *stream.context() != *self.shared.ctx {", "if false {"),
    ("lease.rs", "a batch's value is dropped before its use ends", "        if slot.end_uses() {\n", "        drop(meta);\n        let meta = ();\n        if slot.end_uses() {\n"),
    ("slot.rs", "an uploader's waits spin", "Event::new(ctx, timed, true)?", "Event::new(ctx, timed, false)?"),
    ("stager.rs", "a stager's waits spin", "copied: Event::new(&ctx, false, true)?", "copied: Event::new(&ctx, false, false)?"),
    ("cu.rs", "the last owner's context stays current", "        let _current = twice(Current::keep);\n", ""),
    ("driver.rs", "a stub ends the search", "Ok(Err(error)) => refused = refused.or(Some(error)),", "Ok(Err(error)) => return Err(error),"),
    ("driver.rs", "what is loaded is not asked", "in loaded.chain(found) {", "in loaded.take(0).chain(found) {"),
    ("driver.rs", "cudarc's stub is a call that failed", "        _ if code == STUB_LIBRARY =>", "        _ if false =>"),
    ("stager/order.rs", "a slot is filled under its copies", "        unsafe { edge::refill_after_copy(self.copied.raw(), true) }?;", "        ();"),
    ("stager/order.rs", "copies do not wait for the stream", "        unsafe { edge::copy_after_use(copies.raw(), slot.ready.raw()) }?;", "        ();"),
    ("stager/order.rs", "a slot's copies are looked for, not waited for", "edge::refill_after_copy(self.copied.raw(), true)", "edge::refill_after_copy(self.copied.raw(), false)"),
    ("stager/order.rs", "the event of a slot is not recorded", "        unsafe { cu::record(slot.copied.raw(), copies.raw()) }", "        Ok(())"),
    ("stager/order.rs", "all pieces of a slot are one copy", "pieces.chunk_by(|_, next| next.follows)", "pieces.chunk_by(|_, _| true)"),
    ("stager/order.rs", "each piece is a copy", "pieces.chunk_by(|_, next| next.follows)", "pieces.chunk_by(|_, _| false)"),
    ("stager/order.rs", "each copy is from the start of the slot", ".add(run[0].at) };", ".add(run[0].at * 0) };"),
    ("stager/order.rs", "the last offload is lost", "if let Some(mut before) = mem::replace(&mut last, started) {", "if let (Some(mut before), false) = (mem::replace(&mut last, started), over) {"),
    ("stager/order.rs", "an offload is lost if another follows", "            ending(fate, before.serve())?;", "            drop(before.pieces.pop());"),
    ("stager/order.rs", "a fill's context stays", "        mem::forget(Current::enter(copies.context())?);\n", ""),
    ("stager/order.rs", "a fill thread breaks captures", "ending(fate, cu::apart(copies.context()))?;", "ending(fate, Current::enter(copies.context()))?;"),
    ("stager/order.rs", "a piece is told another place", "Host::Fill(fill, from) => fill(*from, bytes)", "Host::Fill(fill, from) => fill(*from * 0, bytes)"),
    ("stager/order.rs", "a thread that fails ends nothing", "        let _ring = lock(orders).take();", "        drop(lock(orders));"),
    ("stager/order.rs", "pieces are not aligned", "filled.next_multiple_of(align_of::<T>())", "filled"),
    ("stager/order.rs", "elements are cut", "bytes / size_of::<T>() * size_of::<T>()", "bytes"),
    ("stager/staging.rs", "pieces apart in the slot are one copy", "end == Some((device, room.start))", "end.is_some_and(|(end, _)| end == device)"),
    ("stager/staging.rs", "no two pieces are one copy", "end == Some((device, room.start))", "false && end == Some((device, room.start))"),
    ("stager/staging.rs", "one slot has both directions", "order.way != way || ", ""),
    ("stager/staging.rs", "a slot keeps its earlier pieces", "                    order.pieces.clear();\n", ""),
    ("stager/staging.rs", "the stream's work is not recorded", "ending(self.fate, unsafe { cu::record(order.slot.ready.raw(), self.used.stream.cu_stream()) })?;", "();"),
    ("error.rs", "nothing", "#[non_exhaustive]\npub enum Error {", "#[non_exhaustive]\n#[doc(hidden)]\npub enum Error {"),
]

# What -> why no test can kill it.
EXCUSES = {
    "the copy's event is for timing always": "such an event costs time on a device, and nothing else shows it",
    "nothing": "the canary: it must survive",
}


def run(tree, env, tests, package, timeout_s):
    """What killed the library in `tree`, or `None`. A test is a program and a filter, behind another package and `:`."""
    viable = False
    for test in tests:
        of, test = test.split(":", 1) if re.match(r"[a-z-]+:[^:]", test) else (package, test)
        cargo = ["cargo", "test", "-q", "-p", of]
        command = [*cargo, *([] if test.startswith("--") else ["--test"]), *test.split()]
        # Apart, because on a busy machine a build takes longer than a test may. A test that does not compile fails below.
        build = [*command[: len(cargo) + 1 + (command[len(cargo)] == "--test")], "--no-run"]
        viable = viable or not subprocess.run(build, cwd=tree, env=env, capture_output=True).returncode
        if not viable:
            check = ["cargo", "check", "-q", "-p", package]
            if subprocess.run(check, cwd=tree, env=env, capture_output=True).returncode:
                return "UNVIABLE"
        done = subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            stdout, stderr = done.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.communicate()
            return f"{test}, which does not end"
        if done.returncode != 0:
            failed = re.search(r"^(\S+) --- FAILED|^test (\S+) \.\.\. FAILED", stdout, re.M)
            return f"{test}: {failed[1] or failed[2]}" if failed else f"{test}: {(stderr.strip().splitlines() or ['?'])[-1][:80]}"
    return None


def main(description, package, folder, mutants, excuses, tests_of, timeout_s=TIMEOUT_S):
    """Tries the changes of files in `folder`. `tests_of` gives the tests for a file, and first those for a change. A test
    that takes longer than `timeout_s` does not end."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path(os.devnull))
    options = parser.parse_args()
    every = mutants
    mutants = [m for m in every if re.search(options.only, f"{m[0]} {m[1]}")]
    known = options.log.read_text() if options.log.exists() else ""
    mutants = [m for m in mutants if f" {m[0]}: {m[1]}   [" not in known]
    sources = {}
    for file, what, old, new in every:
        sources[file] = (ROOT / folder / file).read_text()
        if sources[file].count(old) != 1:
            print(f"{what}: {sources[file].count(old)} places in {folder}/{file} have {old!r}")
            return 2
    if options.list:
        print(*(f"{file}: {what}" for file, what, *_ in mutants), f"{len(mutants)} mutants", sep="\n")
        return 0
    home = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute() / f"mutate-{package}"
    tree = home / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    skip = shutil.ignore_patterns("target", ".git", "corpus", "artifacts")
    shutil.copytree(ROOT, tree, ignore=skip, copy_function=shutil.copy)
    env = dict(os.environ, CARGO_TARGET_DIR=str(home / "target"), RUST_BACKTRACE="0", CARGO_PROFILE_DEV_DEBUG="0")
    # The usual part of the seeds must find them, also where a step of CI asks for all.
    env |= {"TWINBUF_FUZZ_CASES": "200", "TWINBUF_HUNG_SECONDS": "45", "TWINBUF_TEST_WHOLE": "0"}
    start = time.time()
    # A run that continues another has tried the tests already.
    tests = dict.fromkeys(test for file, what, *_ in mutants for test in tests_of(file, what))
    if not known and (killer := run(tree, env, tests, package, timeout_s)) is not None:
        print(f"the tests fail without any mutant: {killer}")
        return 2
    print(f"{len(mutants)} mutants; the tests without one took {time.time() - start:.0f} s", flush=True)
    lived = []
    for file, what, old, new in mutants:
        path = tree / folder / file
        path.write_text(sources[file].replace(old, new))
        began = time.time()
        killer = run(tree, env, tests_of(file, what), package, timeout_s)
        path.write_text(sources[file])
        os.utime(path)
        if killer == "UNVIABLE" or killer is None and what not in excuses:
            lived.append(what)
        verdict = {None: "excused" if what in excuses else "SURVIVED", "UNVIABLE": "UNVIABLE"}.get(killer, "killed")
        reason = excuses.get(what, "") if killer is None else killer
        line = f"{verdict:8} {file}: {what}   [{reason}] {time.time() - began:.0f} s"
        print(line, flush=True)
        with options.log.open("a") as log:
            print(line, file=log)
    killed = len(mutants) - len(lived) - sum(m[1] in excuses for m in mutants)
    print(f"{killed} of {len(mutants)} killed, not: {lived}, in {time.time() - start:.0f} s")
    return 1 if lived else 0


if __name__ == "__main__":
    tests_of = lambda file, what: sorted(
        STAGER_TESTS if file.startswith("stager") else TESTS,
        key=lambda test: not any(re.search(seen, f"{file} {what}") and test in (name, f"all {name}::") for seen, name in LIKELY),
    )
    sys.exit(main(__doc__, "twinbuf-cuda", "cuda/src", MUTANTS, EXCUSES, tests_of))
