//! `io_uring(7)`: one call hands over many reads and waits for one of them.
//!
//! # Whose the memory is
//!
//! From the moment that a read's entry is in the ring until its completion has been seen, the kernel may write to its
//! memory at any time. During that time the read, with its memory and file, is in [`Uring::slots`]. Only
//! [`Uring::reap`] and [`Uring::stop`] remove reads from there: `reap` those that have a completion, `stop` those whose
//! entries the kernel has not taken and never will. The drop waits until the slots are empty. If it panics, what they
//! hold leaks. The ring itself may be dropped at any time: the kernel keeps its own part until all reads have ended.
//!
//! The thread that hands over a read need not be the one that sees it end, so the ring is set up without
//! `SINGLE_ISSUER` and `DEFER_TASKRUN`; and without `COOP_TASKRUN`: with it, a read would end only when the thread that
//! handed it over next enters the kernel.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::{Engine, READS, Read, Reads};

/// Most times that a read is handed over.
const TRIES: u8 = 4;

/// Most bytes of one read, below the kernel's limit of 2 GiB less a page (`MAX_RW_COUNT`).
const MOST: u32 = 1 << 30;

/// How long to wait where the kernel cannot.
const PAUSE: Duration = Duration::from_millis(1);

/// Most consecutive pauses while the kernel has no memory for a read.
const PAUSES: u32 = 1000;

pub(super) struct Uring {
    ring: IoUring,
    /// The reads that the kernel may have; a completion carries the index.
    slots: ManuallyDrop<[Option<Slot>; READS]>,
    /// The empty slots.
    empty: Vec<usize>,
    /// Slots whose entries the kernel has not taken from the ring, the oldest first.
    not_taken: VecDeque<usize>,
    /// The kernel refuses to take entries.
    stopped: bool,
}

#[derive(Debug)]
struct Slot {
    read: Read,
    tries: u8,
}

impl Uring {
    /// Sets up a ring, if the kernel permits it and is 5.12 or newer.
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
            slots: ManuallyDrop::new([const { None }; READS]),
            empty: (0..READS).collect(),
            not_taken: VecDeque::with_capacity(READS),
            stopped: false,
        })
    }

    /// Puts the entry of the read in slot `index` into the ring.
    fn enter(&mut self, index: usize, reads: &mut Reads) {
        let Some(slot) = &mut self.slots[index] else { return };
        slot.tries += 1;
        let Read { file, offset, into, len, .. } = &mut slot.read;
        let into = &mut into[..*len];
        let len = u32::try_from(into.len()).unwrap_or(MOST).min(MOST);
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), into.as_mut_ptr(), len)
            .offset(*offset)
            .build()
            .user_data(index as u64);
        // From its second try on, a read goes to a kernel thread (`ASYNC`), which waits where the first try could not.
        let flags = if slot.tries > 1 { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        let entry = entry.flags(flags);
        // SAFETY: the slot owns the memory, of at least `len` bytes, and the file, and keeps both until the kernel is
        // done with them (see the head of this file).
        let full = unsafe { self.ring.submission().push(&entry) }.is_err();
        if !full {
            self.not_taken.push_back(index);
        } else if let Some(slot) = self.take(index) {
            // Cannot happen: the ring has as many entries as there are slots. The kernel has not seen the read.
            reads.end(slot.read, Err(io::ErrorKind::ResourceBusy.into()));
        }
    }

    /// Empties a slot whose read the kernel never had, or no longer has.
    fn take(&mut self, index: usize) -> Option<Slot> {
        let slot = self.slots[index].take()?;
        self.empty.push(index);
        Some(slot)
    }

    fn completion(&mut self) -> Option<cqueue::Entry> {
        self.ring.completion().next()
    }

    /// Hands over what is in the ring and waits until `want` reads have ended, or a signal has come.
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

    /// Takes back what the kernel has not taken, and hands over nothing any more.
    fn stop(&mut self, reads: &mut Reads) {
        self.stopped = true;
        while let Some(index) = self.not_taken.pop_back() {
            // The kernel takes entries only during a call, and no call follows once `stopped` is set.
            if let Some(slot) = self.take(index) {
                reads.requeue(slot.read);
            }
        }
    }
}

/// Whether the same read may succeed if it is handed over again. The thread that did so may have ended: that cancels its
/// reads (`ECANCELED`), on some kernels with `EFAULT`.
fn is_worth_a_retry(errno: i32) -> bool {
    matches!(errno, libc::EAGAIN | libc::EINTR | libc::ECANCELED | libc::EFAULT)
}

/// Whether the kernel may take entries later.
fn is_short_of_memory(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM))
}

impl Engine for Uring {
    fn begin(&mut self, read: Read, reads: &mut Reads) {
        // The kernel reads larger offsets as negative numbers, and -1 as the file's cursor.
        if i64::try_from(read.offset).is_err() {
            return reads.end(read, Err(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        match self.empty.pop() {
            Some(index) => {
                self.slots[index] = Some(Slot { read, tries: 0 });
                self.enter(index, reads);
            }
            // Cannot happen: the queue gives out at most `READS` reads at a time, and there are as many slots.
            None => reads.end(read, Err(io::ErrorKind::ResourceBusy.into())),
        }
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
        while let Some(completion) = self.completion() {
            let Ok(index) = usize::try_from(completion.user_data()) else { continue };
            let Some(slot) = self.slots.get(index) else { continue };
            let result = usize::try_from(completion.result()).map_err(|_| -completion.result());
            match (result, slot) {
                (Err(errno), Some(Slot { tries, .. })) if is_worth_a_retry(errno) && *tries < TRIES => {
                    self.enter(index, reads);
                    if self.stopped {
                        self.stop(reads);
                    }
                }
                // All tries failed: the kernel cannot start a thread for the read, as in a container that limits
                // threads. Do without the ring.
                (Err(errno), Some(_)) if is_worth_a_retry(errno) => {
                    if let Some(slot) = self.take(index) {
                        reads.requeue(slot.read);
                    }
                    self.stop(reads);
                }
                (result, _) => {
                    if let Some(slot) = self.take(index) {
                        reads.end(slot.read, result.map_err(io::Error::from_raw_os_error));
                    }
                }
            }
        }
    }

    fn wait(&mut self, reads: &mut Reads) {
        let before = reads.in_flight;
        let mut pauses = 0;
        while reads.in_flight == before {
            if self.stopped {
                // The kernel ends the reads that it has taken without a further call.
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
        let Self { ring: _, slots, empty: _, not_taken, stopped } = self;
        f.debug_struct("Uring")
            .field("reads", &slots.iter().flatten().count())
            .field("not_taken", &not_taken.len())
            .field("stopped", stopped)
            .finish_non_exhaustive()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let held = || self.slots.iter().flatten();
        let (in_flight, bytes) = (held().count(), held().map(|slot| slot.read.len).sum());
        let mut reads = Reads { in_flight, bytes, ..Reads::default() };
        while reads.in_flight > 0 {
            self.wait(&mut reads);
        }
        // The slots are empty now: nothing leaks, although a `ManuallyDrop` does not drop them.
    }
}
