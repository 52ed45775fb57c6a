#!/usr/bin/env python3
"""The ordering gate: breaks the ring in one place at a time and runs the models, which must notice.

    python3 tools/mutate.py            all mutants; exit status 1 if one survives, or the gate itself is broken (15 minutes)
    python3 tools/mutate.py --write    and writes the list to tests/loom/mutants.txt
    python3 tools/mutate.py --list     only says what would be tried
    python3 tools/mutate.py --only X   only mutants whose description matches the regular expression X
    python3 tools/mutate.py --gate     all of them if the ring or its tests (comments aside) or this script differ from what
                                       the list was written from; otherwise every eighth: they still die here

Kinds of mutant, found in core/src/raw.rs, core/src/waker.rs and core/src/ring.rs:

    weaken    an ordering (of a compare-exchange: on success) one step weaker
    failure   the ordering of a compare-exchange on failure weakened
    torn      a read-modify-write as a load and a store: no longer one step
    blind     a compare-exchange as a store: whatever was there
    wake      a call of `wake` left out

and `logic`, the changes written out in LOGIC below: a protocol step that forgets something; and `promise`, those in
PROMISES: what no model can see, for core's own tests.

A mutant that no test can kill, because it means the same, is excused by a comment on its line or the line
above, `// mutate: ok KIND REASON`. A run of all mutants reports an excuse whose mutant dies
as stale.

The workspace is not touched: every mutant is made in a private copy.
"""

import argparse
import concurrent.futures
import hashlib
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
LIST = ROOT / "tests/loom/mutants.txt"
STATE, RAW, WAKER, RING, PRODUCER, CONSUMER, WAIT, ERROR, SYNC = FILES = tuple(
    f"core/src/{name}.rs" for name in ("state", "raw", "waker", "ring", "producer", "consumer", "wait", "error", "sync")
)
TIMEOUT_S = 600  # many times what the unmutated models take on one core; a mutant that takes it is no success

# Models left out. The step ceilings: a torn exchange is one step more, and would die of that alone. The long
# histories: they take half of the time, and nothing lives until it meets them.
SKIP = ["steps::", "handoff::fifo"]
# The models of the waker cell alone run for its own mutants only.
CELL = "cell::"

# What the pattern-made mutants do not reach: (file, what, the text, which must be there once, its replacement).
COMMIT = "State(self.0 & Self::STICKY | Self::FULL | lap.0)"
CANCEL = "State(self.0 & Self::STICKY | Self::FULL | Self::CANCELLED | lap.0)"
RELEASE = "State(self.0 & Self::STICKY | lap.next().0)"
STICKY = "Self::TX_GONE | Self::TX_ODD | Self::TX_DONE | Self::RX_GONE | Self::RX_ODD;"
ONES = ["TX_GONE", "TX_ODD", "TX_DONE", "RX_GONE", "RX_ODD"]
LOGIC = [
    (STATE, "commit drops the sticky bits", COMMIT, "State(Self::FULL | lap.0)"),
    (STATE, "commit keeps WAITER", COMMIT, "State(self.0 | Self::FULL | lap.0)"),
    (STATE, "commit does not set the lap", COMMIT, "{ let _ = lap; State(self.0 & Self::STICKY | Self::FULL) }"),
    (STATE, "commit does not set FULL", COMMIT, "State(self.0 & Self::STICKY | lap.0)"),
    (STATE, "cancel drops the sticky bits", CANCEL, "State(Self::FULL | Self::CANCELLED | lap.0)"),
    (STATE, "cancel keeps WAITER", CANCEL, "State(self.0 | Self::FULL | Self::CANCELLED | lap.0)"),
    (STATE, "cancel does not set CANCELLED", CANCEL, "{ State(Self::STICKY & self.0 | Self::FULL | lap.0) }"),
    (STATE, "cancel does not set FULL", CANCEL, "State(self.0 & Self::STICKY | Self::CANCELLED | lap.0)"),
    (STATE, "release drops the sticky bits", RELEASE, "State(lap.next().0)"),
    (STATE, "release keeps WAITER", RELEASE, "State(self.0 & (Self::STICKY | Self::WAITER) | lap.next().0)"),
    (STATE, "release keeps FULL", RELEASE, "State(self.0 & (Self::STICKY | Self::FULL) | lap.next().0)"),
    (STATE, "release does not flip the lap", RELEASE, "State(self.0 & Self::STICKY | lap.0)"),
    *((STATE, f"{one} is not sticky", STICKY, " | ".join(f"Self::{other}" for other in ONES if other != one) + ";") for one in ONES[:-1]),
    (STATE, "finish does not set TX_DONE", "State(Self::abandon(next).0 | Self::TX_DONE)", "Self::abandon(next)"),
    (STATE, "finish sets TX_DONE for the other lap", "State(Self::abandon(next).0 | Self::TX_DONE)", "State(Self::abandon(next.next()).0 | Self::TX_DONE)"),
    (STATE, "TX_DONE without the lap", "} else if (self.0 & Self::TX_ODD != 0) == (lap.0 != 0) {", "} else if lap.0 < 9 {"),
    (STATE, "TX_DONE ends the wait for an open slot", "} else {\n            ConsumerView::Empty\n        }", "} else {\n            ConsumerView::Abandoned\n        }"),
    (STATE, "TX_DONE hides that the ring has ended", "} else if self.0 & (Self::TX_DONE | Self::RX_GONE) != Self::TX_DONE {", "} else if self.0 & Self::TX_DONE == 0 {"),
    (STATE, "abandon sets TX_DONE", "State(Self::TX_GONE | if next.0 == 0 { 0 } else { Self::TX_ODD })", "State(Self::TX_GONE | Self::TX_DONE | if next.0 == 0 { 0 } else { Self::TX_ODD })"),
    (STATE, "abandon does not tell the lap", "State(Self::TX_GONE | if next.0 == 0 { 0 } else { Self::TX_ODD })", "{ let _ = next; State(Self::TX_GONE) }"),
    (STATE, "close does not tell the lap", "State(Self::RX_GONE | if next.0 == 0 { 0 } else { Self::RX_ODD })", "{ let _ = next; State(Self::RX_GONE) }"),
    (STATE, "a ring that has ended hands out slots", "DEAD: State = State(Self::TX_GONE | Self::TX_ODD | Self::RX_GONE)", "DEAD: State = State(0)"),
    (STATE, "a leaked handle is not noticed", "!both_gone || next_is_odd", "both_gone && next_is_odd"),
    (STATE, "a leaked guard is not noticed", "!both_gone || next_is_odd != (self.0 & Self::LAP != 0)", "{ let _ = next_is_odd; !both_gone }"),
    (STATE, "a leaked guard is looked for in the other side's lap", "if self.0 & Self::FULL == 0 { Self::TX_ODD }", "if self.0 & Self::FULL != 0 { Self::TX_ODD }"),
    (STATE, "the lap does not flip", "Lap(self.0 ^ State::LAP)", "Lap(self.0)"),
    (STATE, "the producer's lap is not compared", "} else if self.0 & (Self::FULL | Self::LAP) == lap.0 {", "} else if self.0 & Self::FULL == 0 && lap.0 < 9 {"),
    (STATE, "the consumer's lap is not compared", "if self.0 & (Self::FULL | Self::LAP) == Self::FULL | lap.0 {", "if self.0 & Self::FULL != 0 && lap.0 < 9 {"),
    (STATE, "a cancelled slot is read", "if self.0 & Self::CANCELLED != 0 {", "if false && self.0 == 0 {"),
    (STATE, "FULL does not win over TX_GONE", "if self.0 & (Self::FULL | Self::LAP) == Self::FULL | lap.0 {", "if self.0 & (Self::FULL | Self::LAP) == Self::FULL | lap.0 && self.0 & Self::TX_GONE == 0 {"),
    (STATE, "a held slot hides the end", "} else if self.0 & Self::TX_GONE == 0 {", "} else if self.0 & Self::TX_GONE == 0 || self.0 & Self::FULL != 0 {"),
    (STATE, "RX_GONE does not win over FULL", "if self.0 & Self::RX_GONE != 0 {", "if self.0 & Self::RX_GONE != 0 && self.0 & Self::FULL == 0 {"),
    (STATE, "announce does nothing", "State(self.0 | Self::WAITER)", "State(self.0)"),
    (STATE, "WAITER is never seen", "self.0 & Self::WAITER != 0", "false && self.0 != 0"),
    (RAW, "the end is set on one slot only", "for _ in 0..self.len() {", "for _ in 0..1 {"),
    (RAW, "the end is not set on the slot that is next", "for _ in 0..self.len() {", "at = at.next(self.len());\n        for _ in 1..self.len() {"),
    (RAW, "the end is set last on the slot that is next", "for _ in 0..self.len() {", "let first = at;\n        at = at.next(self.len());\n        for n in 1..=self.len() {\n            if n == self.len() { at = first; }"),
    (RAW, "the end tells no lap", "bits(at.lap)", "{ let _ = at.lap; bits(Lap::FIRST) }"),
    (RAW, "no look after registering", "let mut seen = self.state();\n        loop {", "let mut seen = before;\n        loop {"),
    (RAW, "registered only when announced", "Ok(()) => return Poll::Pending,", "Ok(()) => { self.waiting().cell(side).register(waker); return Poll::Pending }"),
    (RAW, "a wake before the handle moves on", "before_wake();\n        let old = State::from_bits(seen);\n        if old.has_waiter() {\n            wake(self.waiting(), Word::new(word), sides);\n        }\n", "let old = State::from_bits(seen);\n        if old.has_waiter() {\n            wake(self.waiting(), Word::new(word), sides);\n        }\n        before_wake();\n"),
    (RAW, "sleeps without an announcement", "if let Err(now) = self.announce(seen) {", "if let Err(now) = Ok::<(), State>(()) {"),
    (RAW, "a panicking waker keeps the next one asleep", "let _rest = Rest(waiting, rest);\n        waiting.cell(*first).wake();", "let _rest = Rest(waiting, &[]);\n        waiting.cell(*first).wake();\n        wake_each(waiting, rest);"),
    (RAW, "a timed wait waits without its deadline", "strategy.wait_until(word, expected, self.0);", "strategy.wait(word, expected);"),
    (RAW, "the deadline is never over", "strategy.expired(self.0).then_some(TimedOut(seen))", "(strategy.expired(self.0) && false).then_some(TimedOut(seen))"),
    (RAW, "the shares of two rings are taken for one's", "ours == theirs && count", "ours != core::ptr::NonNull::dangling() && theirs != core::ptr::NonNull::dangling() && count"),
    (RAW, "a guard's share is not counted", "count.load(Ordering::Relaxed) == 2", "count.load(Ordering::Relaxed) >= 2"),
    (RAW, "a share is never given up", "give_up(block);", "let _ = give_up::<T, W>; let _ = block;"),
    (RAW, "the slots of a ring that is taken apart are freed with its last share", "let block = core::mem::ManuallyDrop::new(self).block?;", "let block = self.block?;"),
    (RING, "split again, the words are not reset", "*word = AtomicU32::new(state.bits());", "let _ = (&word, state);"),
    (RING, "split again, a leaked guard's slot is handed out", "if self.is_leaked() { State::DEAD } else", "if self.is_leaked() && false { State::DEAD } else"),
    (RING, "a leak is not looked for", "self.taken.load(Ordering::Relaxed) != 0 && self", "self.taken.load(Ordering::Relaxed) == 0 && self"),
    (WAKER, "another task's waker is not replaced", "own.is_some() && self.with(place, |cell| cell.as_ref().is_some_and(|old| old.will_wake(waker)))", "own.is_some()"),
    (WAKER, "registers without taking the last registration back", "let (mut seen, own) = self.take_back();\n        // The place", "let (mut seen, own) = (self.state.load(Ordering::Acquire), None::<u32>);\n        // The place"),
    (WAKER, "registers in the place that a wake empties", "own.unwrap_or(if seen & TAKING == 0 { seen & LAST } else { !seen & LAST })", "own.unwrap_or(seen & LAST)"),
    (WAKER, "a second wake is forgotten", "_ => seen | AGAIN,", "_ => seen,"),
    (WAKER, "the place is not flipped after a wake", "_ => (seen & !(TAKING | AGAIN)) ^ LAST,", "_ => seen & !(TAKING | AGAIN),"),
    (WAKER, "a taken registration stays", "REGISTERED => seen & !REGISTERED | TAKING,", "REGISTERED => seen | TAKING,"),
    (WAKER, "a wake of nothing writes nothing", "0 | TAKING => seen,", "0 | TAKING => return (None, false),"),
    (WAKER, "a wake leaves the waker in its place", "self.with(seen & LAST, Option::take)", "self.with(seen & LAST, |waker| waker.clone())"),
    (WAKER, "the end leaves the waker in its place", "self.with(place, Option::take)", "self.with(place, |waker| waker.clone())"),
    (PRODUCER, "what is unread is looked for from the oldest on", "for back in 1..=depth {", "for back in (1..=depth).rev() {"),
    (PRODUCER, "the waker is left behind", "let _waker = self.ring.unregister(Side::Producer);", "();"),
    (CONSUMER, "the waker is left behind", "let _waker = self.ring.unregister(Side::Consumer);", "();"),
    (PRODUCER, "dropped without finish, it is finished", "if self.finished { State::finish }", "if self.finished || true { State::finish }"),
    (PRODUCER, "a reserved slot wakes the consumer only", "BOTH: &[Side] = &[Side::Consumer, Side::Producer];", "BOTH: &[Side] = &[Side::Consumer];"),
    (PRODUCER, "a reserved slot wakes the producer only", "BOTH: &[Side] = &[Side::Consumer, Side::Producer];", "BOTH: &[Side] = &[Side::Producer];"),
    (PRODUCER, "a reservation does not move the producer on", "self.producer.advance();\n        slot\n", "slot\n"),
    (PRODUCER, "a commit does not move the producer on", "|| self.producer.advance()", "|| ()"),
    (PRODUCER, "a reserved slot that is dropped is not cancelled", "self.slot.hand_over(self.seen, BOTH, |s| s.cancel(lap), || ());", "let _ = lap;"),
    (PRODUCER, "a reserved slot that is dropped is committed", "|s| s.cancel(lap)", "|s| s.commit(lap)"),
    (PRODUCER, "a reserved guard has no share", "share: self.producer.share.share(),", "share: Share::BORROWED,"),
    (CONSUMER, "a kept slot has no share", "let share = consumer.share.share();", "let share = Share::BORROWED;"),
    (CONSUMER, "the consumer does not move on from what it keeps", "        consumer.advance();\n        KeptSlot", "        KeptSlot"),
    (CONSUMER, "the consumer does not move on from what it releases", "|| self.consumer.advance());", "|| ());"),
    (CONSUMER, "a cancelled place is not released", "drop(ReadSlot { consumer: self, seen });", "{ let _ = seen; self.advance(); }"),
    (CONSUMER, "a receive does not wait for a held slot", "!matches!(seen.for_consumer(lap), ConsumerView::Empty | ConsumerView::Held)", "!matches!(seen.for_consumer(lap), ConsumerView::Empty)"),
    (CONSUMER, "a kept slot wakes the producer only", "BOTH: &[Side] = &[Side::Producer, Side::Consumer];", "BOTH: &[Side] = &[Side::Producer];"),
    (CONSUMER, "a kept slot wakes the consumer only", "BOTH: &[Side] = &[Side::Producer, Side::Consumer];", "BOTH: &[Side] = &[Side::Consumer];"),
    (CONSUMER, "a held slot is reported as an empty one", "ConsumerView::Held => Err(TryRecvError::Held),\n                _ =>", "ConsumerView::Held => Err(TryRecvError::Empty),\n                _ =>"),
    (CONSUMER, "a try takes a held slot for an empty one", "ConsumerView::Held => Err(TryRecvError::Held),\n            _ =>", "ConsumerView::Held => Err(TryRecvError::Empty),\n            _ =>"),
]
# Where one replacement is not enough: (file, what) -> further replacements in the same mutant.
ALSO = {
    "what is unread is looked for from the oldest on": [("if slot.state().is_unread() {", "if oldest.is_none() && slot.state().is_unread() {")],
    "no look after registering": [("let seen = self.state();\n        if ready(seen) {", "let before = self.state();\n        let seen = before;\n        if ready(seen) {")],
    "registered only when announced": [("        self.waiting().cell(side).register(waker);\n        let mut", "        let mut")],
}

# What no model can see, since it is a bound of a type, the clock of `std` or a promise of a single thread. The same
# entries; killed by core's own tests, CONTRACTS, if these fail or no longer compile, with the library still compiling.
CONTRACTS = ["all -- contracts:: survivors:: asked_for:: wakers::", "memory", "threads"]
PROMISES = [
    (RING, "`Ring` is shared whatever its strategy is", "unsafe impl<T: Send, const N: usize, W: Sync> Sync for Ring<T, N, W> {}", "unsafe impl<T: Send, const N: usize, W> Sync for Ring<T, N, W> {}"),
    (RING, "`Ring` is shared whatever its slots are", "unsafe impl<T: Send, const N: usize, W: Sync> Sync for Ring<T, N, W> {}", "unsafe impl<T, const N: usize, W: Sync> Sync for Ring<T, N, W> {}"),
    (RING, "split again, it can be split as a static too", "self.taken = AtomicU32::new(1);\n", "();\n"),
    (RAW, "handles are sent whatever the strategy is", "unsafe impl<T: Send, W: Sync> Send for RingRef<'_, T, W> {}", "unsafe impl<T: Send, W> Send for RingRef<'_, T, W> {}"),
    (RAW, "handles are sent whatever the slots are", "unsafe impl<T: Send, W: Sync> Send for RingRef<'_, T, W> {}", "unsafe impl<T, W: Sync> Send for RingRef<'_, T, W> {}"),
    (RAW, "guards are sent whatever the strategy is", "unsafe impl<T: Send, W: Sync> Send for SlotRef<'_, T, W> {}", "unsafe impl<T: Send, W> Send for SlotRef<'_, T, W> {}"),
    (RAW, "guards are sent whatever the slots are", "unsafe impl<T: Send, W: Sync> Send for SlotRef<'_, T, W> {}", "unsafe impl<T, W: Sync> Send for SlotRef<'_, T, W> {}"),
    (RAW, "guards are shared whatever the strategy is", "unsafe impl<T: Send + Sync, W: Sync> Sync for SlotRef<'_, T, W> {}", "unsafe impl<T: Send + Sync, W> Sync for SlotRef<'_, T, W> {}"),
    (RAW, "guards are shared with slots that are not", "unsafe impl<T: Send + Sync, W: Sync> Sync for SlotRef<'_, T, W> {}", "unsafe impl<T: Send, W: Sync> Sync for SlotRef<'_, T, W> {}"),
    (RAW, "`relax` counts from the last sleep", "let asleep = seen.announce();", "round = 0;\n            let asleep = seen.announce();"),
    (PRODUCER, "`Producer` is shared", "impl<T, W: Wait> Drop for Producer<'_, T, W> {", "unsafe impl<T, W: Wait> Sync for Producer<'_, T, W> {}\nimpl<T, W: Wait> Drop for Producer<'_, T, W> {"),
    (CONSUMER, "`Consumer` is shared", "impl<T, W: Wait> Drop for Consumer<'_, T, W> {", "unsafe impl<T, W: Wait> Sync for Consumer<'_, T, W> {}\nimpl<T, W: Wait> Drop for Consumer<'_, T, W> {"),
    (WAIT, "a deadline is over a millisecond late", "Instant::now() >= deadline", "Instant::now() > deadline + Duration::from_millis(1)"),
    (RING, "dropped, a leaked guard's value is freed", "if !self.is_leaked() {", "if !self.is_leaked() || true {"),
    (RING, "dropped, the values are not", "if !self.is_leaked() {", "if !self.is_leaked() && false {"),
    (STATE, "RX_ODD is not sticky", STICKY, " | ".join(f"Self::{other}" for other in ONES[:-1]) + ";"),
    (RING, "handles that own their ring drop its strategy anywhere", "W: Wait + Send + Sync + 'r,", "W: Wait + Sync + 'r,"),
    (RING, "handles that own their ring share its strategy whatever it is", "W: Wait + Send + Sync + 'r,", "W: Wait + Send + 'r,"),
    (RING, "handles that own their ring send its slots whatever they are", "T: Send + 'r,", "T: 'r,"),
    (RING, "a ring on the heap may have no slot", 'assert!(!slots.is_empty(), "a ring needs at least one slot");', "();"),
    (RING, "a ring is not aligned to pairs of cache lines", 'repr(align(128))', "repr(align(8))"),
    (RING, "`Ring` survives a panic whatever its slots are", "impl<T: UnwindSafe, const N: usize, W: RefUnwindSafe> RefUnwindSafe for Ring", "impl<T, const N: usize, W: RefUnwindSafe> RefUnwindSafe for Ring"),
    (SYNC, "the words of a ring on the heap are rounded down to lines", "let room = len.next_multiple_of(LINE) + LINE - 1;", "let room = len / LINE * LINE + LINE - 1;"),
    (SYNC, "the words of a ring on the heap begin anywhere", "let first = at.next_multiple_of(LINE) - at;", "let first = (at.next_multiple_of(LINE) - at).min(1);"),
    (RAW, "guards survive a panic whatever the slots are", "impl<T: UnwindSafe, W: RefUnwindSafe> UnwindSafe for SlotRef<'_, T, W> {}", "impl<T, W: RefUnwindSafe> UnwindSafe for SlotRef<'_, T, W> {}"),
    (RAW, "guards survive a panic by reference whatever the slots are", "impl<T: UnwindSafe, W: RefUnwindSafe> RefUnwindSafe for SlotRef<'_, T, W> {}", "impl<T, W: RefUnwindSafe> RefUnwindSafe for SlotRef<'_, T, W> {}"),
    (RAW, "handles survive a panic whatever the strategy is", "impl<T: UnwindSafe, W: RefUnwindSafe> UnwindSafe for RingRef<'_, T, W> {}", "impl<T: UnwindSafe, W> UnwindSafe for RingRef<'_, T, W> {}"),
    (RAW, "the deadline is looked at before the slot", "            if ready(seen) {\n                return Ok(seen);\n            }\n            if let Some(over) = patience.over(strategy, seen) {\n                return Err(over);\n            }\n", "            if let Some(over) = patience.over(strategy, seen) {\n                return Err(over);\n            }\n            if ready(seen) {\n                return Ok(seen);\n            }\n"),
    (PRODUCER, "the future of an acquire stays on its thread", "fn poll_free(&mut self, cx", "fn poll_free(&self, cx"),
    (CONSUMER, "the future of a receive stays on its thread", "fn poll_ready(&mut self, cx", "fn poll_ready(&self, cx"),
    (CONSUMER, "`KeptSlot` may be read on two threads whatever it holds", "impl<T, W: Wait> Drop for KeptSlot<'_, T, W> {", "unsafe impl<T, W: Wait> Sync for KeptSlot<'_, T, W> {}\nimpl<T, W: Wait> Drop for KeptSlot<'_, T, W> {"),
    (WAKER, "a waker is cloned at every poll", "own.is_some() && self.with(place, |cell| cell.as_ref().is_some_and(|old| old.will_wake(waker)))", "own.is_some() && self.with(place, |cell| cell.is_none())"),
    (WAIT, "a timed sleep below a second does not sleep", "tv_nsec: left.subsec_nanos().into(),", "tv_nsec: 0,"),
    (WAIT, "`Auto` never looks", "if round == 0 && !self.looks()", "if round == 0"),
    (WAIT, "`Auto` never sleeps", "self.looked_in_vain();\n            false", "self.looked_in_vain();\n            true"),
    (WAIT, "`Auto` looks 30 times longer", "LOOKS: u32 = 30;", "LOOKS: u32 = 900;"),
    (WAIT, "`Auto` does not learn that looking is in vain", "            self.looked_in_vain();\n", ""),
    (WAIT, "`Auto` does not learn that looking pays", "(last / 2) << 16", "last << 16"),
    (WAIT, "`Auto` forgets that a yield took a time slice", " && left <= Self::LONGEST_PAUSE", ""),
    (WAIT, "`Auto` remembers a yield of a time slice for half as long", "2 * pause", "pause"),
    (WAIT, "`Auto` does not learn from a short sleep", "self.pause.store(0, sync::Ordering::Relaxed);", ""),
    (WAIT, "`Park` spins", "fn relax(&self, _round: u32) -> bool {\n            false\n        }", "fn relax(&self, round: u32) -> bool {\n            round < 1000\n        }"),
    (STATE, "a ring that has ended forgets it", "DEAD: State = State(Self::TX_GONE | Self::TX_ODD | Self::RX_GONE)", "DEAD: State = State(Self::TX_GONE | Self::RX_GONE)"),
    (STATE, "a slot counts as unread while the consumer exists", "self.is_closed() && matches!", "matches!"),
    (STATE, "a kept slot counts as unread", "matches!(self.for_consumer(next), ConsumerView::Full)", "{ let _ = next; self.is_full() && self.0 & Self::CANCELLED == 0 }"),
    (STATE, "a cancelled slot counts as unread", "ConsumerView::Full)\n    }", "ConsumerView::Full | ConsumerView::Cancelled)\n    }"),
    (PRODUCER, "what is unread is looked for at one place alone", "for back in 1..=depth {", "for back in 1..=1 {"),
    (PRODUCER, "the newest unread slot is found", "if slot.state().is_unread() {", "if oldest.is_none() && slot.state().is_unread() {"),
    (PRODUCER, "a commit wakes the producer's own task too", "slot.hand_over(self.seen, &[Side::Consumer], |s| s.commit(lap)", "slot.hand_over(self.seen, BOTH, |s| s.commit(lap)"),
    (CONSUMER, "a slot that is put back is released", "core::mem::forget(self);", "drop(self);"),
    (RING, "the slots of a ring on the heap are numbered from 1", "(0..depth).map(slot)", "(1..=depth).map(slot)"),
    (RAW, "five small slots on a line of four", "values.len() > Line::<T>::MOST ||", "values.len() > Line::<T>::MOST + 1 ||"),
    (RAW, "small slots never share a line", "size_of::<Line<T>>() > align_of::<Line<T>>()", "size_of::<Line<T>>() > 0"),
    (RAW, "a panic in the drop of a small slot leaks the others", "core::ptr::slice_from_raw_parts_mut(slots, self.len).drop_in_place()", "{ for slot in 0..self.len { slots.add(slot).drop_in_place() } }"),
    (ERROR, "a full ring is told as one without a consumer", "Self::Full => FULL,", "Self::Full => CLOSED,"),
    (ERROR, "an empty slot is told as a held one", "Self::Empty => EMPTY,", "Self::Empty => HELD,"),
    (ERROR, "a held slot is told as an empty one", "Self::Held => HELD,", "Self::Held => EMPTY,"),
]

WEAKER = {
    "load": {"Acquire": ["Relaxed"]},
    "store": {"Release": ["Relaxed"]},
    "rmw": {"AcqRel": ["Acquire", "Release"], "Acquire": ["Relaxed"], "Release": ["Relaxed"]},
}
LOAD_HALF = {"AcqRel": "Acquire", "Release": "Relaxed"}
STORE_HALF = {"AcqRel": "Release", "Acquire": "Relaxed"}
NEW_VALUE = {"swap": "{0}", "fetch_or": "old | ({0})", "fetch_add": "old + ({0})", "fetch_sub": "old - ({0})"}


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

    for call in re.finditer(r"((?:\w+(?:\(\))?\s*\.\s*)*\w+(?:\(\))?)\s*\.\s*(load|store|swap|compare_exchange|fetch_or|fetch_add|fetch_sub)\(", code):
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

    for call in re.finditer(r"(?:[\w.]+(?:\(\*?\w+\))?\.|\b)wake\(", code):
        if "fn " in code[code.rfind("\n", 0, call.start()) : call.start()]:
            continue
        end = call_end(code, call.end() - 1)
        text = source[call.start() : end]
        yield mutant("wake", f"no `{text}`", call.start(), call.start(), end, "()")


def written_mutants(kind, entries, file, source):
    for where, what, old, new in entries:
        if where != file:
            continue
        text = source
        for before, after in [(old, new), *ALSO.get(what, [])]:
            if text.count(before) != 1:
                sys.exit(f"tools/mutate.py: {what}: {text.count(before)} places in {file} have {before!r}")
            text = text.replace(before, after)
        yield Mutant(file, source[: source.index(old)].count("\n") + 1, kind, what, text)


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
        self.env |= {"CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_INCREMENTAL": "1"}  # links, and builds again, faster
        self.env |= {"TWINBUF_MODELS_IN_PROCESS": "1"}  # to be killed with the rest
        self.env |= {"TWINBUF_TEST_WHOLE": "0"}  # the usual bounds must find them, also in CI

    def build(self):
        """The models' executable, or the compiler's errors."""
        command = ["cargo", "test", "-q", "-p", "twinbuf-loom", "--test", "models", "--no-run", "--message-format=json"]
        done = subprocess.run(command, cwd=self.tree, env=self.env, capture_output=True, text=True)
        messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode == 0:
            return next(m["executable"] for m in messages if m.get("executable")), ""
        errors = [m["message"]["rendered"] for m in messages if m.get("message", {}).get("level") == "error"]
        return None, "\n".join(errors) or done.stderr

    def test_promises(self):
        """(verdict, by what) of core's own tests."""
        library = ["cargo", "check", "-q", "-p", "twinbuf-core", "--features", "std"]
        done = subprocess.run(library, cwd=self.tree, env=self.env, capture_output=True, text=True)
        if done.returncode != 0:
            return "unviable", next((line for line in done.stderr.splitlines() if line.startswith("error")), "?")
        for name in ["lib", *CONTRACTS, "doc"]:
            what = {"lib": ["--lib"], "doc": ["--doc", "contracts"]}.get(name, ["--test", *name.split()])
            command = ["cargo", "test", "-q", "-p", "twinbuf-core", *what]
            done = subprocess.run(command, cwd=self.tree, env=self.env, capture_output=True, text=True, timeout=TIMEOUT_S)
            if done.returncode != 0:
                failed = re.search(r"^test (\S+) \.\.\. FAILED|^---- (\S+) stdout", done.stdout, re.M)
                return "killed", f"{name}::{failed[1] or failed[2]}" if failed else f"{name}, which does not compile"
        return "SURVIVED", ""

    def run(self, executable, file):
        """The verdict, and the model that made it: stops at the first that fails."""
        # One at a time: the last name printed is the model that runs.
        skip = SKIP if file == WAKER else [*SKIP, CELL]
        command = [executable, "--test-threads=1", *(f"--skip={models}" for models in skip)]
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

    def check(self, file, text, kind=""):
        """(verdict, by what)."""
        path, original = self.tree / file, (self.tree / file).read_text()
        try:
            path.write_text(text)
            if kind == "promise":
                return self.test_promises()
            executable, errors = self.build()
            if executable is None:
                return "unviable", next((line for line in errors.splitlines() if line.startswith("error")), "?")
            return self.run(executable, file)
        finally:
            path.write_text(original)


def digest():
    """Of the ring, its tests and this script; of Rust without comments and blanks."""
    files = [*ROOT.glob("core/src/*.rs"), *ROOT.glob("tests/loom/**/*.rs"), *ROOT.glob("core/tests/all/*.rs"), *ROOT.glob("core/tests/*.rs")]
    code = ["".join(without_comments(file.read_text()).split()) for file in sorted(files) if "target" not in file.parts]
    code.append(pathlib.Path(__file__).read_text())
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def table(mutants):
    count = {verdict: sum(m.verdict == verdict for m in mutants) for verdict in ("killed", "excused", "SURVIVED")}
    lines = [
        "# The mutants of the ring",
        "",
        "Written by `python3 tools/mutate.py --write`: each line is a change to the ring, and the first model or test that",
        f"fails with it. {len(mutants)} mutants: {count['killed']} killed, {count['excused']} excused, {count['SURVIVED']} survived.",
        f"Sources: `{digest()}`.",
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
    parser.add_argument("--gate", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    start = time.time()

    mutants, every_excuse = [], {}
    for file in FILES:
        source = (ROOT / file).read_text()
        found = [*written_mutants("logic", LOGIC, file, source), *written_mutants("promise", PROMISES, file, source)]
        if file in (RAW, WAKER, RING):
            found += pattern_mutants(file, source)
        every_excuse |= {(file, line): excuse for line, excuse in excuses(file, source).items()}
        for m in found:
            for line in (m.line, m.line - 1):
                kind, reason = every_excuse.get((file, line), ("", ""))
                if kind == m.kind:
                    m.excuse = (line, reason)
        mutants += [m for m in found if re.search(options.only, str(m))]
    mutants.sort(key=lambda m: (m.file, m.line))
    if options.gate and digest() in LIST.read_text():
        print(f"the list was written from these sources: every eighth of its {len(mutants)} mutants")
        mutants, options.jobs = mutants[::8], 1  # to build a second copy takes longer than to run half of them
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
            m.verdict, m.why = workshop.check(m.file, m.text, m.kind)
        finally:
            workshops.put(workshop)
        if m.verdict == "SURVIVED" and m.excuse:
            m.verdict, m.why = "excused", m.excuse[1]
        print(f"{m.verdict:8} {m}   [{m.why}]", flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(prepare, range(options.jobs)))
        first = workshops.get()
        for file, kind in ((WAKER, ""), (RING, "promise")):
            verdict, by = first.check(file, (ROOT / file).read_text(), kind)
            if verdict != "SURVIVED":
                sys.exit(f"tools/mutate.py: the tests fail without any mutant: {verdict} {by}")
        workshops.put(first)
        print(f"{len(mutants)} mutants, {options.jobs} at a time; ready after {time.time() - start:.0f} s", flush=True)
        list(pool.map(examine, mutants))

    used = {(m.file, m.excuse[0]) for m in mutants if m.verdict == "excused"}
    stale = [] if options.only or options.gate else sorted(set(every_excuse) - used)
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
