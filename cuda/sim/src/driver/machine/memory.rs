//! Page-locked and device memory: allocations, and the check of every access.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

use super::{Actor, HOST, LEGACY, State};
use crate::driver::clock::{Access, History};
use crate::driver::codes::{Code, INVALID_VALUE, OUT_OF_MEMORY};

/// Page-locked memory is page-aligned, like the driver's.
const PAGE: usize = 4096;
/// Violations kept until they are read. One broken edge may show in every batch.
const MOST_VIOLATIONS: usize = 64;

/// One allocation. Its entry stays after the free, to recognize a later use. Addresses are not reused within a run.
pub(in crate::driver) struct Allocation {
    base: u64,
    bytes: usize,
    /// `CU_MEMHOSTALLOC_*` of host memory.
    flags: u32,
    /// The contents of device memory, until the free has run.
    pub(in crate::driver) data: Option<Vec<u8>>,
    /// Whether its free was called.
    freed: bool,
    history: History,
}

/// The two address spaces. Both are checked the same way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::driver) enum Space {
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

fn host_layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, PAGE).expect("a size that `allocate_host` has checked")
}

/// Frees the host memory of an earlier run. Memory that was never freed may still be in use: it stays.
pub(super) fn clear_host(host: &mut BTreeMap<u64, Allocation>) {
    for (base, old) in std::mem::take(host) {
        if old.freed {
            // SAFETY: allocated by `allocate_host` with this layout; its free was called, and the workers that
            // could still read it have ended.
            unsafe { dealloc(base as *mut u8, host_layout(old.bytes)) };
        }
    }
}

impl State {
    fn allocations(&mut self, space: Space) -> &mut BTreeMap<u64, Allocation> {
        match space {
            Space::Host => &mut self.host,
            Space::Device => &mut self.device,
        }
    }

    /// The allocation that contains a whole range.
    fn holder(&mut self, space: Space, address: u64, bytes: usize) -> Option<&mut Allocation> {
        let (_, allocation) = self.allocations(space).range_mut(..=address).next_back()?;
        let end = address.checked_add(bytes as u64)?;
        (end <= allocation.base + allocation.bytes as u64).then_some(allocation)
    }

    pub(in crate::driver) fn is_pinned(&mut self, address: usize, bytes: usize) -> bool {
        self.holder(Space::Host, address as u64, bytes).is_some()
    }

    /// The bytes of a range of device memory, if one allocation contains it and its free has not run.
    pub(in crate::driver) fn bytes(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let allocation = self.holder(Space::Device, address, bytes)?;
        let from = usize::try_from(address - allocation.base).ok()?;
        allocation.data.as_mut()?.get_mut(from..from + bytes)
    }

    /// The start and the size of the device allocation that contains an address, unless its free was called.
    pub(in crate::driver) fn device_allocation(&mut self, address: u64) -> Option<(u64, usize)> {
        let allocation = self.holder(Space::Device, address, 1)?;
        (!allocation.freed).then_some((allocation.base, allocation.bytes))
    }

    pub(in crate::driver) fn report(&mut self, sentence: String) {
        if self.violations.len() < MOST_VIOLATIONS && !self.violations.contains(&sentence) {
            self.violations.push(sentence);
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
        let allocation = self.holder(space, address, bytes).ok_or(INVALID_VALUE)?;
        let from = address - allocation.base;
        let to = from + bytes as u64;
        if allocation.freed {
            self.report(format!("{what} of {} memory +{from:#x}..+{to:#x} after its free", space.name()));
            return Err(INVALID_VALUE);
        }
        let new = Access { agent: actor.agent, step: actor.step, from, to, write, what };
        let races = allocation.history.add(new, &actor.clock);
        for old in races {
            let sentence = format!(
                "{} memory +{:#x}..+{:#x}: {} is not ordered after {}",
                space.name(),
                old.from.max(from),
                old.to.min(to),
                self.who(&new),
                self.who(&old),
            );
            self.report(sentence);
        }
        Ok(())
    }

    fn who(&self, access: &Access) -> String {
        let agent = match access.agent {
            HOST => "the host".to_owned(),
            id if LEGACY.contains(&id) => "the legacy default stream".to_owned(),
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
        let gap = if self.device.len() % 4 == 3 { 0 } else { 512 };
        self.next_address += (bytes as u64).next_multiple_of(512) + gap;
        base
    }

    pub(in crate::driver) fn allocate_device(&mut self, bytes: usize) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if self.live.device_bytes.saturating_add(bytes as u64) > self.options.device_bytes {
            return Err(OUT_OF_MEMORY);
        }
        let base = self.reserve_device(bytes);
        let data = Some(vec![0xCD; bytes]);
        let history = History::default();
        self.device.insert(base, Allocation { base, bytes, flags: 0, data, freed: false, history });
        self.live.device_allocations += 1;
        self.live.device_bytes += bytes as u64;
        self.live.peak_device_bytes = self.live.peak_device_bytes.max(self.live.device_bytes);
        Ok(base)
    }

    /// The flags of the page-locked memory that contains this address.
    pub(in crate::driver) fn host_flags(&mut self, address: usize) -> Option<u32> {
        self.holder(Space::Host, address as u64, 1).map(|allocation| allocation.flags)
    }

    pub(in crate::driver) fn allocate_host(&mut self, bytes: usize, flags: u32) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let total = self.live.host_bytes.saturating_add(bytes as u64);
        if total > self.options.host_bytes || Layout::from_size_align(bytes, PAGE).is_err() {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: the layout's size is not 0.
        let memory = unsafe { alloc(host_layout(bytes)) };
        if memory.is_null() {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: just allocated with this size.
        unsafe { memory.write_bytes(0xA5, bytes) };
        let base = memory as u64;
        let history = History::default();
        self.host.insert(base, Allocation { base, bytes, flags, data: None, freed: false, history });
        self.live.host_allocations += 1;
        self.live.host_bytes = total;
        self.live.peak_host_bytes = self.live.peak_host_bytes.max(total);
        Ok(base)
    }

    /// Checks a free as a write of the whole allocation by `actor`, and counts it. The contents of device memory stay
    /// until [`State::forget`], host memory stays until the next run: a use after the free never finds another
    /// allocation's data.
    pub(in crate::driver) fn free(
        &mut self,
        space: Space,
        base: u64,
        actor: &Actor,
        what: &'static str,
    ) -> Result<(), Code> {
        let allocation = self.allocations(space).get(&base).filter(|allocation| !allocation.freed);
        let bytes = allocation.ok_or(INVALID_VALUE)?.bytes;
        self.access((space, base, bytes), actor, true, what)?;
        if let Some(allocation) = self.allocations(space).get_mut(&base) {
            allocation.freed = true;
        }
        match space {
            Space::Host => {
                self.live.host_allocations -= 1;
                self.live.host_bytes -= bytes as u64;
            }
            Space::Device => {
                self.live.device_allocations -= 1;
                self.live.device_bytes -= bytes as u64;
            }
        }
        Ok(())
    }

    /// [`State::free`] by the calling host thread.
    pub(in crate::driver) fn free_by_host(&mut self, space: Space, base: u64) -> Result<(), Code> {
        let actor = self.host_step();
        self.free(space, base, &actor, "host free")
    }

    /// Drops a device allocation's contents.
    pub(in crate::driver) fn forget(&mut self, base: u64) {
        if let Some(allocation) = self.device.get_mut(&base) {
            allocation.data = None;
        }
    }
}
