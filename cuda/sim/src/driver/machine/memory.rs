//! Page-locked and device memory: allocations, and the check of every access.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Actor, HOST, LEGACY, State};
use crate::driver::clock::{Access, Clock, History};
use crate::driver::codes::{Code, INVALID_VALUE, OUT_OF_MEMORY};
use crate::driver::guard::{Mapping, Verdict, at_limit};
use crate::driver::operand::Instruction;
use crate::driver::stack::Stack;
use crate::driver::violation::Violation;
use crate::options::Options;
use crate::sys;

/// Violations kept until they are read. One broken edge may show in every batch.
const MOST_VIOLATIONS: usize = 16;

/// The last frees whose stacks are kept.
const MOST_FREES: usize = 1024;

/// One allocation. Its entry stays after the free, to recognize a later use. Addresses are not reused within a run.
#[derive(Default)]
pub(in crate::driver) struct Allocation {
    space: Space,
    base: u64,
    bytes: usize,
    /// `CU_MEMHOSTALLOC_*` of host memory.
    flags: u32,
    /// The contents of device memory that is not managed, until the free has run.
    pub(in crate::driver) data: Option<Vec<u8>>,
    /// Memory that the program sees, page-locked or managed: its addresses stay until the next run.
    mapping: Option<Mapping>,
    /// Whether its free was called.
    freed: bool,
    /// Whether a race was found: the contents then stay after the free, as a pool's do. Otherwise the later access would
    /// return an error that the real driver does not return.
    raced: bool,
    history: History,
}

/// The host's page-locked memory, and the device's, of which managed memory is a part. Both are checked the same way.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::driver) enum Space {
    #[default]
    Host,
    Device,
}

impl Space {
    fn name(self) -> &'static str {
        match self {
            Self::Host => "page-locked",
            Self::Device => "device",
        }
    }
}

impl Allocation {
    fn end(&self) -> u64 {
        self.base + self.bytes as u64
    }
}

/// Frees the memory of an earlier run. What the program sees and never freed may still be in use: it stays.
pub(super) fn clear(allocations: &mut BTreeMap<u64, Allocation>) {
    for mut old in std::mem::take(allocations).into_values().filter(|old| !old.freed) {
        if let Some(mut mapping) = old.mapping.take() {
            mapping.close(Vec::new());
            std::mem::forget(mapping);
        }
    }
}

impl State {
    /// The allocation that contains a whole range.
    fn holder(&mut self, space: Space, address: u64, bytes: usize) -> Option<&mut Allocation> {
        let (_, allocation) = self.memory.range_mut(..=address).next_back()?;
        let end = address.checked_add(bytes as u64)?;
        (allocation.space == space && end <= allocation.end()).then_some(allocation)
    }

    /// Where the device sees this page-locked memory; `None` if the memory is pageable.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if the range is page-locked in part, or has device memory in it.
    pub(in crate::driver) fn pinned(&mut self, address: u64, bytes: usize) -> Result<Option<u64>, Code> {
        let end = address.checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
        let (_, last) = self.memory.range(..end).next_back().unzip();
        let Some(last) = last.filter(|last| last.end() > address) else { return Ok(None) };
        // Managed memory counts as device memory, not as memory of the host.
        let inside = last.space == Space::Host && last.base <= address && end <= last.end();
        let mapping = last.mapping.as_ref().filter(|_| inside).ok_or(INVALID_VALUE)?;
        Ok(Some(mapping.device + (address - last.base)))
    }

    /// The memory of an allocation that the program sees.
    pub(in crate::driver) fn mapping(&self, base: u64) -> Option<&Mapping> {
        self.memory.get(&base)?.mapping.as_ref()
    }

    /// Closes and opens the pages of memory that the program sees: of one allocation, or of all that have closed ones after
    /// the host has learnt something. A page is as closed as the host and all host functions that run need it.
    pub(in crate::driver) fn guard(&mut self, base: Option<u64>) {
        // Each host thread has its own clock: a page stays closed, and opens for each access of a thread that may use it.
        let apart = self.options.host_threads_apart;
        let nothing = Clock::default();
        let host = self.hosts.get(&HOST).filter(|_| !apart).unwrap_or(&nothing);
        let clocks: Vec<&Clock> = self.running.iter().map(|at| &*at.clock).chain([host]).collect();
        let bases: Vec<u64> = base.map_or_else(|| self.closed.iter().copied().collect(), |base| vec![base]);
        for base in bases {
            let Some(allocation) = self.memory.get_mut(&base) else { continue };
            let Some(mapping) = &mut allocation.mapping else { continue };
            let all = || vec![(0, mapping.bytes, sys::PROT_NONE)];
            let closed = if allocation.freed {
                all()
            } else if self.told || at_limit() {
                Vec::new()
            } else {
                allocation.history.closed(&clocks)
            };
            // The pages of freed memory stay closed.
            if closed.is_empty() || allocation.freed {
                self.closed.remove(&base);
            } else {
                self.closed.insert(base);
            }
            mapping.close(closed);
        }
        if at_limit() {
            std::mem::take(&mut self.closed).into_iter().for_each(|base| self.guard(Some(base)));
        }
    }

    /// Decides what to do with an access of the program that a page fault stopped.
    pub(super) fn touched(&mut self, address: u64, write: bool, instruction: &mut Instruction) -> Verdict {
        let what = if write { "host write" } else { "host read" };
        let inside = |(base, allocation): (&u64, &Allocation)| {
            let bytes = allocation.mapping.as_ref()?.bytes;
            (address - base < bytes).then_some(*base)
        };
        let found = self.memory.range(..=address).next_back().and_then(inside);
        let Some(base) = found else { return Verdict::Foreign };
        let (offset, actor) = (address - base, self.host_step());
        let Some(allocation) = self.memory.get_mut(&base) else { return Verdict::Foreign };
        let space = allocation.space;
        if allocation.freed {
            if let Some(mapping) = &mut allocation.mapping {
                mapping.close(Vec::new());
            }
            let sentence = format!("{what} of {} memory +{offset:#x} after its free", space.name());
            self.report_freed(base, sentence, (what, actor.stack()));
            return Verdict::Resume;
        }
        let bytes = instruction.bytes(address, write);
        let races = allocation.history.touch((offset, offset + bytes), write, &actor.at);
        if races.is_empty() {
            if let Some(mapping) = self.mapping(base) {
                if instruction.repeat(mapping.device + offset, address, write) {
                    return Verdict::Resume;
                }
                mapping.open_once(offset);
            }
            return Verdict::Step;
        }
        for old in &races {
            // The first byte that both access.
            let from = offset.max(old.from);
            let (at, stack) = (actor.at.clone(), actor.stack());
            let new = Access { at, from, to: from + 1, write, what, stack, reported: true };
            self.report_races(space, &new, std::slice::from_ref(old));
        }
        self.guard(Some(base));
        Verdict::Resume
    }

    /// The bytes of a range of device memory, if one allocation contains it and still has its contents.
    pub(in crate::driver) fn bytes(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let allocation = self.holder(Space::Device, address, bytes)?;
        let from = usize::try_from(address - allocation.base).ok()?;
        match &allocation.mapping {
            Some(mapping) if mapping.device == 0 => None,
            Some(mapping) => {
                let start = (mapping.device as *mut u8).wrapping_add(from);
                // SAFETY: inside the device's mapping of managed memory, which only this driver uses, under its lock.
                Some(unsafe { std::slice::from_raw_parts_mut(start, bytes) })
            }
            None => allocation.data.as_mut()?.get_mut(from..from + bytes),
        }
    }

    /// The start and the size of the device allocation that contains an address, and whether its free was called.
    pub(in crate::driver) fn device_allocation(&mut self, address: u64) -> Option<(u64, usize, bool)> {
        let allocation = self.holder(Space::Device, address, 1)?;
        Some((allocation.base, allocation.bytes, allocation.freed))
    }

    /// Adds a violation, with the stacks of what it names, unless it is kept already or there are too many.
    fn report(&mut self, sentence: String, stacks: Vec<(&'static str, Arc<Stack>)>) {
        let violation = Violation::new(sentence, stacks);
        let known = self.violations.iter_mut().any(|old| old.comes_again(&violation));
        if self.violations.len() < MOST_VIOLATIONS && !known {
            if let Some(report) = &self.report {
                report.violation(&violation);
            }
            self.found += 1;
            self.violations.push(violation);
        }
    }

    /// Adds a use after the free of an allocation, with the stack of the free if that is kept.
    fn report_freed(&mut self, base: u64, sentence: String, used: (&'static str, Arc<Stack>)) {
        let free = self.frees.iter().rev().find(|(freed, ..)| *freed == base);
        let free = free.map(|(_, what, stack)| (*what, stack.clone()));
        self.report(sentence, [Some(used), free].into_iter().flatten().collect());
    }

    fn report_races(&mut self, space: Space, new: &Access, races: &[Access]) {
        for old in races {
            let sentence = format!(
                "{} memory +{:#x}..+{:#x}: {} is not ordered after {}",
                space.name(),
                old.from.max(new.from),
                old.to.min(new.to),
                self.who(new),
                self.who(old),
            );
            self.report(sentence, vec![(new.what, new.stack.clone()), (old.what, old.stack.clone())]);
        }
    }

    /// Checks one access, and records it.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if no allocation contains the range, or if it was freed. The latter is also reported as a
    /// violation.
    pub(in crate::driver) fn access(
        &mut self,
        (space, address, bytes): (Space, u64, usize),
        actor: &Actor,
        write: bool,
        what: &'static str,
    ) -> Result<(), Code> {
        let (pending, told) = (self.pending.clone(), self.told);
        let allocation = self.holder(space, address, bytes).ok_or(INVALID_VALUE)?;
        let from = address - allocation.base;
        let to = from + bytes as u64;
        if allocation.freed {
            let (base, range) = (allocation.base, format!("+{from:#x}..+{to:#x}"));
            let sentence = format!("{what} of {} memory {range} after its free", space.name());
            self.report_freed(base, sentence, (what, actor.stack()));
            return Err(INVALID_VALUE);
        }
        if told {
            return Ok(());
        }
        let (base, seen) = (allocation.base, allocation.mapping.is_some());
        let (at, stack) = (actor.at.clone(), actor.stack());
        let new = Access { at, from, to, write, what, stack, reported: false };
        let races = allocation.history.add(new.clone(), &pending);
        allocation.raced |= !races.is_empty();
        self.report_races(space, &new, &races);
        if seen {
            self.guard(Some(base));
        }
        Ok(())
    }

    fn who(&self, access: &Access) -> String {
        let agent = match access.at.agent {
            HOST => "the host".to_owned(),
            id if id == LEGACY[0] => "the legacy default stream".to_owned(),
            id if id == LEGACY[1] => "the legacy default stream of device 1".to_owned(),
            // The program has not created it.
            id if self.streams.get(&id).is_some_and(|stream| stream.default) => {
                format!("the per-thread default stream {id:#x}")
            }
            id if access.what.starts_with("host") && !self.streams.contains_key(&id) => {
                format!("host thread {id:#x}")
            }
            id => format!("stream {id:#x}"),
        };
        let kind = if access.write { "write" } else { "read" };
        format!("{} ({kind}, {agent})", access.what)
    }

    /// An address that no other allocation has.
    pub(in crate::driver) fn reserve_device(&mut self, bytes: usize) -> u64 {
        let base = self.next_address;
        // 512 is the driver's alignment. A gap follows, so an access past the end is found; some allocations have none, as
        // with the driver: a copy across their border is refused.
        let gap = if self.on_device % 4 == 3 { 0 } else { 512 };
        self.next_address += (bytes as u64).max(1).next_multiple_of(512) + gap;
        base
    }

    /// What is counted of a space: the allocations, their bytes, and the most bytes so far.
    fn books(&mut self, space: Space) -> [&mut u64; 3] {
        let live = &mut self.live;
        match space {
            Space::Host => [&mut live.host_allocations, &mut live.host_bytes, &mut live.peak_host_bytes],
            Space::Device => {
                [&mut live.device_allocations, &mut live.device_bytes, &mut live.peak_device_bytes]
            }
        }
    }

    /// Allocates memory. The program sees that of the host, and managed memory.
    pub(in crate::driver) fn allocate(
        &mut self,
        space: Space,
        seen: bool,
        bytes: usize,
        flags: u32,
    ) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let Options { host_bytes, device_bytes, .. } = self.options;
        let total = self.books(space)[1].saturating_add(bytes as u64);
        if total > if space == Space::Host { host_bytes } else { device_bytes } {
            return Err(OUT_OF_MEMORY);
        }
        let (base, data, mapping) = if seen {
            let mapping = Mapping::new(bytes as u64).ok_or(OUT_OF_MEMORY)?;
            // SAFETY: just mapped, with at least this size.
            unsafe { (mapping.device as *mut u8).write_bytes(0xA5, bytes) };
            self.seen.insert(mapping.program);
            (mapping.program, None, Some(mapping))
        } else {
            (self.reserve_device(bytes), Some(vec![0xCD; bytes]), None)
        };
        let allocation = Allocation { space, base, bytes, flags, data, mapping, ..Allocation::default() };
        self.memory.insert(base, allocation);
        self.on_device += usize::from(space == Space::Device);
        let [allocations, held, peak] = self.books(space);
        *allocations += 1;
        *held = total;
        *peak = total.max(*peak);
        Ok(base)
    }

    /// The flags of the page-locked memory that contains this address.
    pub(in crate::driver) fn host_flags(&mut self, address: u64) -> Option<u32> {
        self.holder(Space::Host, address, 1).map(|allocation| allocation.flags)
    }

    /// Checks a free as a write of the whole allocation by `actor`, and counts it. The contents stay until
    /// [`State::forget`], the addresses until the next run: a use after the free never finds another allocation's data,
    /// and a use by the program is a violation.
    pub(in crate::driver) fn free(
        &mut self,
        space: Space,
        base: u64,
        actor: &Actor,
        what: &'static str,
    ) -> Result<(), Code> {
        let held = |allocation: &&Allocation| allocation.space == space && !allocation.freed;
        let allocation = self.memory.get(&base).filter(held);
        let bytes = allocation.ok_or(INVALID_VALUE)?.bytes;
        self.access((space, base, bytes), actor, true, what)?;
        if let Some(allocation) = self.memory.get_mut(&base) {
            allocation.freed = true;
            allocation.history = History::default();
        }
        self.frees.push_back((base, what, actor.stack()));
        self.frees.drain(..self.frees.len().saturating_sub(MOST_FREES));
        self.seen.remove(&base);
        self.guard(Some(base));
        let [allocations, held, _] = self.books(space);
        *allocations -= 1;
        *held -= bytes as u64;
        Ok(())
    }

    /// [`State::free`] by the calling host thread.
    pub(in crate::driver) fn free_by_host(&mut self, space: Space, base: u64) -> Result<(), Code> {
        let actor = self.host_step();
        self.free(space, base, &actor, "host free")
    }

    /// Drops a freed allocation's contents, unless a race was found.
    pub(in crate::driver) fn forget(&mut self, base: u64) {
        let allocation = self.memory.get_mut(&base);
        if let Some(allocation) = allocation.filter(|allocation| allocation.freed && !allocation.raced) {
            allocation.data = None;
            allocation.mapping.iter_mut().for_each(Mapping::give_back);
        }
    }
}
