//! A fill that two threads share: the loading thread, and the caller while it waits for the batch.
//!
//! The loading thread opens the fill of a batch whose files are in memory. Both threads then take parts of it, from
//! front to back, until there are none. The loading thread closes it: it waits for the part that the caller has.

use std::hint::spin_loop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use twinbuf_mmap::{BatchIndices, Records};

use crate::error::Error;

/// The fewest bytes of a part. Batches of 128 KiB were read a tenth slower in parts of half of it.
const LEAST: usize = 64 << 10;

/// The most parts of a batch: enough for two threads to end at about the same time.
const PARTS: usize = 8;

/// The longest lead of the first part, in 64ths of a part: some of a batch of two parts is left for the caller.
const LEAD: u32 = 48;

/// How often the loading thread looks whether the caller has ended, before it sleeps: for about the time of a part.
const LOOKS: u32 = 1000;

/// Bytes of a slot to fill, and, of a batch that two threads fill, how many of the slot are behind them.
pub(crate) type Room<'r> = (&'r mut [u8], Option<usize>);

/// A number of records that fit the memory.
pub(super) fn count(records: u64) -> usize {
    usize::try_from(records).unwrap_or(usize::MAX)
}

/// What the two threads share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Whether the last load could be shared.
    is_on: AtomicBool,
    /// Whether there is a part to take: a hint for the caller, which looks at it without the lock.
    has_parts: AtomicBool,
    fill: Mutex<Option<Fill>>,
    /// How much longer the first part is than the others, in 64ths of a part. The loading thread takes it while the caller
    /// still has the batch before.
    lead: AtomicU32,
    /// The caller has ended its part.
    returned: Condvar,
}

/// One field of a batch that is being filled.
#[derive(Debug)]
struct Fill {
    field: usize,
    batch: BatchIndices,
    room: Whole,
    /// The number of records in a part, in the first part, and the first record of the next part.
    part: u64,
    first: u64,
    next: u64,
    /// The caller has a part.
    lent: bool,
    /// What the caller could not fill. It takes no more of this batch.
    refused: Option<Range<u64>>,
    help: Help,
}

/// How a batch is cut into parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Split {
    /// The number of records in a part, and the most.
    pub(crate) part: u64,
    pub(crate) most: u64,
    /// Bytes of a record in the slot.
    pub(crate) each: usize,
}

/// What the caller did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Help {
    pub(crate) time: Duration,
    pub(crate) io_calls: u64,
    pub(crate) records: u64,
}

/// Where the records of a field go.
#[derive(Clone, Copy, Debug)]
struct Whole {
    start: NonNull<u8>,
    len: usize,
    /// Bytes of a record.
    each: usize,
}

// SAFETY: it is the address of bytes, which have no thread. Who may write to them is decided by `Fill::take`.
unsafe impl Send for Whole {}

/// Records that one of the threads fills.
struct Part {
    records: Range<u64>,
    batch: BatchIndices,
    room: Whole,
}

impl Part {
    /// The bytes of these records.
    ///
    /// # Safety
    ///
    /// The fill that the part was taken from is still open, and this is called once for a part.
    unsafe fn room<'p>(&self) -> Room<'p> {
        let [start, end] =
            [self.records.start, self.records.end].map(|record| count(record) * self.room.each);
        assert!(end <= self.room.len, "a field has room for its records");
        // SAFETY: the bytes are within the room, and its borrow lasts as long as the fill is open. `take` puts each record
        // in one part only, so the bytes of two parts do not overlap.
        let room = unsafe {
            std::slice::from_raw_parts_mut(self.room.start.as_ptr().wrapping_add(start), end - start)
        };
        (room, Some(self.room.len - end))
    }
}

impl Fill {
    /// The next part, if there is one.
    fn take(&mut self) -> Option<Part> {
        let part = if self.next == 0 { self.first } else { self.part };
        let records = self.next..self.batch.len().min(self.next + part);
        let batch = self.batch.part(records.clone())?;
        self.next = records.end;
        Some(Part { records, batch, room: self.room })
    }
}

impl Shared {
    /// Code of others never runs while it is locked.
    fn lock(&self) -> MutexGuard<'_, Option<Fill>> {
        self.fill.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records of a part, if a batch of this many records of `bytes` bytes in the file is worth sharing. `most`: what the
    /// transforms take at a time.
    pub(crate) fn part(records: u64, bytes: usize, most: Option<u64>) -> Option<u64> {
        let parts = (count(records).saturating_mul(bytes) / LEAST).clamp(1, PARTS);
        let part = records.div_ceil(parts as u64).min(most.unwrap_or(u64::MAX)).max(1);
        (part < records).then_some(part)
    }

    /// Fills `out` with the records of a batch, `each` bytes a record, in parts of `part` records, the first perhaps up to
    /// `most`: calls `fill` for those that the caller does not take. Returns what the caller did.
    ///
    /// The first part becomes longer each time that this thread has to wait for the caller's last part, and shorter each time
    /// that the caller has ended before it. Batches of two parts gained 5 % from Python (`bench/python`).
    pub(crate) fn fill(
        &self,
        (field, batch): (usize, &BatchIndices),
        Split { part, most, each }: Split,
        out: &mut [u8],
        mut fill: impl FnMut(&BatchIndices, Room<'_>) -> Result<(), Error>,
    ) -> Result<Help, Error> {
        let room = Whole { start: NonNull::from(&mut *out).cast(), len: out.len(), each };
        let own = Fill {
            field,
            batch: batch.clone(),
            room,
            part,
            first: (part + part * u64::from(self.lead.load(Ordering::Relaxed)) / 64).min(most),
            next: 0,
            lent: false,
            refused: None,
            help: Help::default(),
        };
        *self.lock() = Some(own);
        // Relaxed: the part is taken under the lock.
        self.has_parts.store(true, Ordering::Relaxed);
        let open = Open(self);
        let mut failed = None;
        // Not within the condition of a loop: the lock would be held for the body.
        let take = || self.lock().as_mut().and_then(Fill::take);
        while let Some(part) = take() {
            // SAFETY: the fill is open until `open` is dropped, and this is the only call for the part.
            if let Err(error) = fill(&part.batch, unsafe { part.room() }) {
                failed = Some((part.records.start, error));
                break;
            }
        }
        let (refused, helped) = open.close();
        // Report the error of the first part that failed. The caller does not report an error. This thread reads the
        // caller's part again, and gets the error here.
        if let Some(part) =
            refused.filter(|part| failed.as_ref().is_none_or(|(first, _)| part.start < *first))
        {
            let (start, behind) = (count(part.start) * each, out.len() - count(part.end) * each);
            if let Some(batch) = batch.part(part) {
                let end = out.len() - behind;
                fill(&batch, (&mut out[start..end], Some(behind)))?;
            }
        }
        failed.map_or(Ok(helped), |(_, error)| Err(error))
    }

    /// Whether loads are shared now. Relaxed: a caller that is told so too late waits as it would without.
    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// The loading thread says whether it shares a load.
    pub(crate) fn turn(&self, on: bool) {
        if self.is_on() != on {
            self.is_on.store(on, Ordering::Relaxed);
        }
    }

    /// The caller takes a part, and calls `fill` for it with the number of the field: that returns whether it is filled.
    /// Returns whether there was a part.
    pub(crate) fn help(&self, fill: impl FnOnce(usize, &BatchIndices, Room<'_>) -> bool) -> bool {
        // Relaxed: it is looked at again under the lock.
        if !self.has_parts.load(Ordering::Relaxed) {
            return false;
        }
        let mut open = self.lock();
        let Some(shared) = open.as_mut().filter(|shared| shared.refused.is_none()) else { return false };
        let (field, Some(part)) = (shared.field, shared.take()) else { return false };
        shared.lent = true;
        drop(open);
        let (started, io_calls) = (Instant::now(), Records::read_calls());
        let mut lent = Lent { shared: self, records: Some(part.records.clone()), help: Help::default() };
        // SAFETY: `lent` is dropped after this, and the fill stays open until then. This is the only call for the part.
        if fill(field, &part.batch, unsafe { part.room() }) {
            let (time, io_calls) = (started.elapsed(), Records::read_calls() - io_calls);
            (lent.records, lent.help) = (None, Help { time, io_calls, records: part.batch.len() });
        }
        drop(lent);
        true
    }
}

/// A fill that is open.
struct Open<'s>(&'s Shared);

impl Open<'_> {
    /// Returns what the caller could not fill, and what it did.
    fn close(self) -> (Option<Range<u64>>, Help) {
        self.take().map_or_else(Default::default, |fill| (fill.refused, fill.help))
    }

    /// Waits for the caller's part, and takes the fill away.
    fn take(&self) -> Option<Fill> {
        self.0.has_parts.store(false, Ordering::Relaxed);
        let mut looks = 0;
        let mut fill = self.0.lock();
        if let Some(open) = fill.as_mut() {
            open.next = open.batch.len();
            // Relaxed: only the loading thread uses it.
            let lead = self.0.lead.load(Ordering::Relaxed);
            if open.lent {
                self.0.lead.store((lead + 1).min(LEAD), Ordering::Relaxed);
            } else if open.help.records > 0 {
                self.0.lead.store(lead.saturating_sub(1), Ordering::Relaxed);
            }
        }
        while fill.as_ref().is_some_and(|open| open.lent) {
            looks += 1;
            if looks < LOOKS {
                drop(fill);
                (0..10).for_each(|_| spin_loop());
                fill = self.0.lock();
            } else {
                fill = self.0.returned.wait(fill).unwrap_or_else(PoisonError::into_inner);
            }
        }
        fill.take()
    }
}

impl Drop for Open<'_> {
    /// By a panic too: the room is the caller's no longer.
    fn drop(&mut self) {
        self.take();
    }
}

/// A part that the caller has. A drop gives it back: `records` if they were not filled.
struct Lent<'s> {
    shared: &'s Shared,
    records: Option<Range<u64>>,
    help: Help,
}

impl Drop for Lent<'_> {
    /// By a panic too: the loading thread waits for it.
    fn drop(&mut self) {
        if let Some(open) = self.shared.lock().as_mut() {
            open.lent = false;
            open.refused = self.records.take();
            open.help.time += self.help.time;
            open.help.io_calls += self.help.io_calls;
            open.help.records += self.help.records;
        }
        self.shared.returned.notify_one();
    }
}

#[cfg(test)]
mod tests;
