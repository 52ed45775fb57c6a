//! An engine on `io_uring(7)`: one system call hands over many reads and waits for one of them.
//!
//! # Who owns the memory
//!
//! From the moment that a read's entry is in the ring until its completion has been seen, the kernel may write to its
//! memory at any time. During that time, the read, with its memory and file, is in [`Uring::table`]. [`Uring::reap`]
//! removes reads that have a completion from the table, [`Uring::stop`] those whose entries the kernel has not taken
//! and never will, and [`Uring::enter`] one whose entry does not fit the ring. The drop waits until the table is empty.
//! If the drop panics, the reads in the table leak. The ring itself may be dropped at any time: the kernel keeps its
//! own part until all reads have ended.
//!
//! The thread that hands over a read need not be the one that sees it end, so the ring is set up without
//! `SINGLE_ISSUER` and `DEFER_TASKRUN`. It is also set up without `COOP_TASKRUN`: with this flag, a read would end only
//! when the thread that handed it over next enters the kernel.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

use super::{Engine, READS, Read, Reads};

/// The most times that one read is handed to the kernel.
const TRIES: u8 = 4;

/// The most bytes of one read, below the kernel's limit of 2 GiB less a page (`MAX_RW_COUNT`).
const MOST: u32 = 1 << 30;

/// The pause between two checks for completions where no system call can wait for one.
const PAUSE: Duration = Duration::from_millis(1);

/// The most pauses of one wait while the kernel is short of memory.
const PAUSES: u32 = 1000;

pub(super) struct Uring {
    ring: IoUring,
    /// The reads that the kernel may have. A completion has the index of its read.
    table: ManuallyDrop<[Option<InFlight>; READS]>,
    /// The indices of reads whose entries the kernel has not taken from the ring, the oldest first.
    not_taken: VecDeque<usize>,
    /// Whether the kernel has refused to take entries. If so, no more reads are handed over.
    stopped: bool,
}

/// A read that the kernel may have, and how many times it was handed over.
struct InFlight {
    read: Read,
    tries: u8,
}

impl Uring {
    /// Sets up a ring. Fails if the kernel does not permit it or is older than 5.12.
    pub(super) fn new() -> io::Result<Self> {
        let ring = IoUring::new(u32::try_from(READS).map_err(io::Error::other)?)?;
        // Linux 5.12 brought this feature: the kernel's threads for the ring belong to the process. `opcode::Read` is
        // older.
        if !ring.params().is_feature_native_workers() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // Enter the ring once: a seccomp filter may allow the set-up and refuse this call.
        ring.submit()?;
        Ok(Self {
            ring,
            table: ManuallyDrop::new([const { None }; READS]),
            not_taken: VecDeque::with_capacity(READS),
            stopped: false,
        })
    }

    /// Puts an entry for the read at `index` of the table into the ring.
    fn enter(&mut self, index: usize, reads: &mut Reads) {
        let Some(held) = &mut self.table[index] else { return };
        held.tries += 1;
        let Read { file, offset, into, len, .. } = &mut held.read;
        let into = &mut into[..*len];
        let len = u32::try_from(into.len()).unwrap_or(MOST).min(MOST);
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), into.as_mut_ptr(), len)
            .offset(*offset)
            .build()
            .user_data(index as u64);
        // From its second try on, a read is done by a kernel thread (`ASYNC`), which can wait where the first try could
        // not.
        let flags = if held.tries > 1 { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        let entry = entry.flags(flags);
        // SAFETY: the table owns the memory, of at least `len` bytes, and the file, and keeps both until the kernel is
        // done with them (see the head of this file).
        let full = unsafe { self.ring.submission().push(&entry) }.is_err();
        if !full {
            self.not_taken.push_back(index);
        } else if let Some(held) = self.table[index].take() {
            // Cannot happen: the ring has at least as many entries as the table has places. The
            // kernel has not seen the read.
            reads.end(held.read, Err(io::ErrorKind::ResourceBusy.into()));
        }
    }

    /// Hands the entries in the ring to the kernel, and waits until `want` reads have ended or a signal has come.
    fn call(&mut self, want: usize) -> io::Result<()> {
        let taken = self.ring.submit_and_wait(want);
        // The kernel takes entries in order and moves the ring's head past them: the oldest are taken.
        let left = self.ring.submission().len();
        self.not_taken.drain(..self.not_taken.len().saturating_sub(left));
        match taken {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }

    /// Requeues the reads that the kernel has not taken, and hands over no more reads.
    fn stop(&mut self, reads: &mut Reads) {
        self.stopped = true;
        while let Some(index) = self.not_taken.pop_back() {
            // The kernel takes entries only during a call, and none follows once `stopped` is set: the reads are ours.
            if let Some(held) = self.table[index].take() {
                reads.requeue(held.read);
            }
        }
    }
}

/// Whether the kernel is short of memory and may take entries later.
fn is_short_of_memory(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
}

impl Engine for Uring {
    fn begin(&mut self, read: Read, reads: &mut Reads) {
        // The kernel takes larger offsets for negative numbers, and -1 for the file's cursor.
        if i64::try_from(read.offset).is_err() {
            return reads.end(read, Err(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        let Some(index) = self.table.iter().position(Option::is_none) else {
            // Cannot happen: the queue gives out at most `READS` reads at a time, and the table has as many places.
            return reads.end(read, Err(io::ErrorKind::ResourceBusy.into()));
        };
        self.table[index] = Some(InFlight { read, tries: 0 });
        self.enter(index, reads);
    }

    fn submit(&mut self, reads: &mut Reads) {
        while !self.not_taken.is_empty() {
            let before = self.not_taken.len();
            match self.call(0) {
                // The call stops after an entry that fails at once, such as one with a file of the wrong kind: call
                // again.
                Ok(()) if self.not_taken.len() < before => {}
                Ok(()) => return,
                // The kernel is short of memory: a later call may succeed.
                Err(error) if is_short_of_memory(&error) => return,
                Err(_) => self.stop(reads),
            }
        }
    }

    fn reap(&mut self, reads: &mut Reads) {
        loop {
            let Some(completion) = self.ring.completion().next() else { return };
            let Ok(index) = usize::try_from(completion.user_data()) else { continue };
            let Some(Some(held)) = self.table.get(index) else { continue };
            let result = usize::try_from(completion.result()).map_err(|_| -completion.result());
            // These reads may succeed if they are handed over again. For example, if the thread that handed a read over
            // ends, the kernel cancels the read (`ECANCELED`, on some kernels `EFAULT`).
            let refused = matches!(result, Err(libc::EAGAIN | libc::EINTR | libc::ECANCELED | libc::EFAULT));
            if refused && held.tries < TRIES {
                self.enter(index, reads);
                if self.stopped {
                    self.stop(reads);
                }
            } else if let Some(InFlight { read, .. }) = self.table[index].take() {
                if refused {
                    // All tries failed: the kernel cannot start a thread for the read, as in a container that limits
                    // threads. Stop using the ring.
                    reads.requeue(read);
                    self.stop(reads);
                } else {
                    reads.end(read, result.map_err(io::Error::from_raw_os_error));
                }
            }
        }
    }

    fn wait(&mut self, reads: &mut Reads) {
        let before = reads.in_flight;
        let mut pauses = 0;
        while reads.in_flight == before {
            if self.stopped {
                // The kernel completes the reads that it has, and needs no further call for that: only wait.
                sleep(PAUSE);
            } else if let Err(error) = self.call(1) {
                pauses += 1;
                if is_short_of_memory(&error) && pauses < PAUSES {
                    sleep(PAUSE);
                } else {
                    self.stop(reads);
                }
            }
            self.reap(reads);
        }
    }

    fn works(&self) -> bool {
        !self.stopped
    }
}

impl fmt::Debug for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uring").field("stopped", &self.stopped).finish_non_exhaustive()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let held = || self.table.iter().flatten();
        let (in_flight, bytes) = (held().count(), held().map(|held| held.read.len).sum());
        let mut reads = Reads { in_flight, bytes, ..Reads::default() };
        while reads.in_flight > 0 {
            self.wait(&mut reads);
        }
        // The table is empty now: nothing leaks, although a `ManuallyDrop` does not drop its content.
    }
}
