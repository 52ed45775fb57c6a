//! The guard: page-locked and managed memory is mapped twice. The device works through one mapping. The other one is
//! the program's: its pages are closed (on x86-64) while the device may use them, so that an access which no
//! synchronization orders stops at its instruction, with its call stack.
//!
//! Pages are coarser than copies. If a closed page is touched where nothing conflicts, it is opened for one instruction,
//! and closed again (`faults`).

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sys;

/// The size of a page on x86-64.
pub(super) const PAGE: u64 = 4096;

/// Whether the kernel has refused to close pages: it counts each range of one protection as a mapping, and limits the number
/// of a process's mappings.
static AT_LIMIT: AtomicBool = AtomicBool::new(false);

/// Whether nothing that is in use may be closed: the program needs mappings too.
pub(super) fn at_limit() -> bool {
    // Relaxed: set and read under the driver's lock.
    AT_LIMIT.load(Ordering::Relaxed)
}

const OPEN: c_int = sys::PROT_READ | sys::PROT_WRITE;

/// A range of pages, from and to as offsets, and the `PROT_*` that the program has there.
pub(super) type Closed = (u64, u64, c_int);

/// The memory of one allocation.
pub(super) struct Mapping {
    /// Where the program sees it.
    pub(super) program: u64,
    /// Where the device sees it; 0 once the contents were given back.
    pub(super) device: u64,
    pub(super) bytes: u64,
    length: usize,
    closed: Vec<Closed>,
}

impl Mapping {
    /// `None` if the memory cannot be made.
    pub(super) fn new(bytes: u64) -> Option<Self> {
        let bytes = bytes.checked_next_multiple_of(PAGE)?;
        let length = usize::try_from(bytes).ok()?;
        let file = sys::memory_file(c"cuda-sim").ok()?;
        file.set_len(bytes).ok()?;
        let map = || {
            // SAFETY: a new mapping of an open file, where the kernel finds room.
            let at = unsafe { sys::mmap(null_mut(), length, OPEN, sys::MAP_SHARED, file.as_raw_fd(), 0) };
            (at.addr() != usize::MAX).then_some(at as u64)
        };
        let device = map()?;
        let mut mapping = Self { program: 0, device, bytes, length, closed: Vec::new() };
        mapping.program = map()?;
        Some(mapping)
    }

    /// Sets the protection of these pages, which are sorted, and opens all others. Those that stay closed are not open in
    /// between.
    pub(super) fn close(&mut self, closed: Vec<Closed>) {
        let ends = |&(from, to, _): &Closed| [from, to];
        let mut cuts: Vec<u64> = self.closed.iter().chain(&closed).flat_map(ends).collect();
        cuts.sort_unstable();
        cuts.dedup();
        for cut in cuts.windows(2) {
            let prot = protection(&closed, cut[0]);
            if prot != protection(&self.closed, cut[0]) {
                self.protect(cut[0], cut[1], prot);
            }
        }
        self.closed = closed;
    }

    /// Opens the page of this offset for one instruction of this thread.
    pub(super) fn open_once(&self, offset: u64) {
        let page = offset / PAGE * PAGE;
        self.protect(page, page + PAGE, OPEN);
        STEPPED.with_borrow_mut(|pages| pages.push((self.program, page)));
    }

    /// Closes the page again.
    pub(super) fn close_again(&self, page: u64) {
        self.protect(page, page + PAGE, protection(&self.closed, page));
    }

    /// Gives the contents back. The program's addresses stay closed, and no other memory gets them.
    pub(super) fn give_back(&mut self) {
        if self.device == 0 {
            return;
        }
        const KEEP: c_int = sys::MAP_PRIVATE | sys::MAP_ANONYMOUS | sys::MAP_NORESERVE | sys::MAP_FIXED;
        let program = self.program as *mut c_void;
        // The kernel joins neighbouring mappings of this kind: the number of a process's mappings is limited.
        // SAFETY: in place of the program's mapping, which this owns and which the program has freed.
        let at = unsafe { sys::mmap(program, self.length, sys::PROT_NONE, KEEP, -1, 0) };
        assert_eq!(at, program, "mmap: {}", std::io::Error::last_os_error());
        // SAFETY: mapped by `new` with this length. The owner has seen to it that no work uses it any more.
        unsafe { sys::munmap(self.device as *mut c_void, self.length) };
        self.device = 0;
        self.closed = vec![(0, self.bytes, sys::PROT_NONE)];
    }

    #[cfg(target_arch = "x86_64")]
    #[allow(clippy::cast_possible_truncation, reason = "x86-64")]
    fn protect(&self, from: u64, to: u64, prot: c_int) {
        let set = |from: u64, to: u64, prot| {
            let at = (self.program + from) as *mut c_void;
            // SAFETY: pages of the program's mapping, which this owns. It is meant to stop accesses through references to them.
            unsafe { sys::mprotect(at, (to - from) as usize, prot) }
        };
        if set(from, to, prot) == 0 {
            return;
        }
        // Relaxed: set and read under the driver's lock.
        if !AT_LIMIT.swap(true, Ordering::Relaxed) {
            let text =
                "cuda-sim: vm.max_map_count is reached: from here on, accesses of the host are not checked\n";
            let _ = std::io::stderr().write_all(text.as_bytes());
        }
        // To open a part may need one more mapping. To open all needs none.
        let code = set(0, self.bytes, OPEN);
        assert_eq!(code, 0, "mprotect: {}", std::io::Error::last_os_error());
    }

    /// Elsewhere there is no trap flag: no page is ever closed.
    #[cfg(not(target_arch = "x86_64"))]
    fn protect(&self, _from: u64, _to: u64, _prot: c_int) {}
}

impl Drop for Mapping {
    fn drop(&mut self) {
        for at in [self.program, self.device].into_iter().filter(|at| *at != 0) {
            // SAFETY: mapped by `new` with this length. The owner has seen to it that nothing uses it any more.
            unsafe { sys::munmap(at as *mut c_void, self.length) };
        }
    }
}

/// The protection of the page at this offset.
fn protection(closed: &[Closed], at: u64) -> c_int {
    let behind = closed.partition_point(|(from, ..)| *from <= at);
    closed[..behind].last().filter(|(_, to, _)| at < *to).map_or(OPEN, |(.., prot)| *prot)
}

thread_local! {
    /// The pages that are open for this thread's next instruction: their mapping, and their offset in it. Not dropped, as what
    /// `machine` has of a thread.
    static STEPPED: RefCell<ManuallyDrop<Vec<(u64, u64)>>> = const { RefCell::new(ManuallyDrop::new(Vec::new())) };
}

/// Takes the list of the pages that were opened for this thread's last instruction.
pub(super) fn stepped() -> Vec<(u64, u64)> {
    ManuallyDrop::into_inner(STEPPED.take())
}

/// What to do with an access that a page fault stopped.
pub(super) enum Verdict {
    /// The fault is not the guard's.
    Foreign,
    /// The driver itself made the access. This thread may hold the lock.
    InCall,
    /// The instruction can continue: the page was opened after a violation, or the guard has made the access itself.
    Resume,
    /// The access conflicts with nothing: the page is open for one instruction.
    Step,
}
