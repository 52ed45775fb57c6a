//! Reads batches into the caller's buffer.

use std::cell::Cell;

use crate::ahead::{Ahead, Copy, LARGE, PIECE, Room, SPILL, Stretch, Taken};
use crate::around::Around;
use crate::direct::{BounceBuffer, Direct};
use crate::file::{Opened, READ_CALLS, read_at};
use crate::records::Records;
use crate::shard::Shard;
use crate::spans::Span;
use crate::{BatchPlan, Error, Plan, ReadMode, Shuffle, limit, system};

impl Records {
    /// The same files, which were opened for [`ReadMode::Pread`], in another mode.
    pub(crate) fn in_mode(mut self, mode: ReadMode) -> Result<Self, Error> {
        match mode {
            ReadMode::Auto => return Ok(self.with_fitting_mode(limit::memory())),
            ReadMode::Pread => {}
            ReadMode::Direct => self.open_direct(Ahead::new(true, u64::MAX))?,
        }
        Ok(self)
    }

    /// [`ReadMode::Auto`], with so many bytes of memory.
    pub(crate) fn with_fitting_mode(mut self, memory: Option<u64>) -> Self {
        let Some(memory) = memory else { return self };
        let bytes: u64 = self.shards().iter().map(|shard| shard.bytes.end - shard.bytes.start).sum();
        if bytes <= memory / 2 {
            let end = self.shards().last().map(|shard| shard.before.saturating_add(shard.bytes.end));
            self.around = Around::new(end.unwrap_or_default());
            for shard in self.shards_mut() {
                if shard.file.is_kept() && !shard.hints_wait {
                    shard.huge = system::huge_page(&shard.piece(0..0));
                }
            }
            return self;
        }
        let fitting = (self.record_bytes() as u64) < LARGE
            && self.shards().iter().all(|shard| shard.file.is_kept() && !shard.hints_wait);
        // What keeps a file from being opened again is no error as long as it is read.
        let most = (memory / 4).max(Room::of(0).memory());
        if fitting && self.open_direct(Ahead::new(false, most)).is_err() {
            self.shards_mut().iter_mut().for_each(|shard| shard.direct = None);
        }
        self
    }

    pub(crate) fn open_direct(&mut self, ahead: Ahead) -> Result<(), Error> {
        // The block is the same for all files of a file system.
        let mut blocks = Vec::new();
        for shard in self.shards_mut() {
            shard.direct = Some(Direct::open(&shard.file, &mut blocks)?);
        }
        self.ahead = Some(ahead);
        Ok(())
    }

    /// Returns how [`read`](Self::read) gets the bytes: never [`ReadMode::Auto`], but what it has chosen.
    #[must_use]
    pub fn read_mode(&self) -> ReadMode {
        if self.ahead.is_some() { ReadMode::Direct } else { ReadMode::Pread }
    }

    /// Records of a run that are read together: those of a piece, unless long runs are read straight to their place.
    pub(crate) fn most_at_once(&self) -> u64 {
        match &self.ahead {
            Some(ahead) if !ahead.straight => (PIECE / self.stride()).max(1),
            _ => u64::MAX,
        }
    }

    /// Returns the most memory that [`will_need`](Self::will_need) and [`read`](Self::read) take in
    /// [`ReadMode::Direct`], for batches of `plan`: 32 MiB; with [`Shuffle::Window`](crate::Shuffle::Window) two windows
    /// and a quarter, and 32 MiB. 0 in [`ReadMode::Pread`].
    ///
    /// A data set that is shorter than a window counts in place of it. Where [`ReadMode::Auto`] has chosen `Direct` and this
    /// would be more than a quarter of the memory that the process may use, batches of the plan come through the page
    /// cache, and it is 0.
    ///
    /// Threads that read at a time share the memory. Open the files for each of several plans that are read in turn: with
    /// windows they push out each other's, and as memory is kept for each size of piece, those of different orders or
    /// batches took up to twice the largest of these.
    #[must_use]
    pub fn ahead_bytes(&self, plan: &Plan) -> u64 {
        let window = match plan.shuffle() {
            Shuffle::Window { records, chunks } => records.saturating_mul(chunks),
            _ => 0,
        };
        self.ahead(window).map_or(0, |(_, room)| room.memory())
    }

    /// What reads ahead, with windows of so many records or without (0), and how much. `None` if the page cache does.
    pub(crate) fn ahead(&self, window: u64) -> Option<(&Ahead, Room)> {
        let room = Room::of(window.min(self.len()).saturating_mul(self.stride()));
        let ahead = self.ahead.as_ref().filter(|ahead| room.memory() <= ahead.most)?;
        Some((ahead, room))
    }

    /// Returns how many system calls that read files this thread has made through this crate, and how many reads it has
    /// begun in [`ReadMode::Direct`]. Compare two of them to count those of a read.
    #[must_use]
    pub fn read_calls() -> u64 {
        READ_CALLS.with(Cell::get)
    }

    /// Reads the records of `batch`, one after the other in batch order, to the front of `out`. Returns the number of
    /// bytes: [`BatchPlan::len`] times [`record_bytes`](Self::record_bytes).
    ///
    /// In [`ReadMode::Pread`] the bytes go straight into `out`. Each run of consecutive records in a file is one call, and
    /// each record where there are gaps between them. Bytes that overlapping windows share are read once and then copied
    /// inside `out`.
    /// A file that is truncated meanwhile is an error here and cannot raise SIGBUS.
    ///
    /// # Errors
    ///
    /// [`Error::BufferTooSmall`], before anything is read. [`Error::NoSuchRecord`] if the plan was made for
    /// a larger data set. [`Error::Truncated`] if a file has become shorter, [`Error::Read`] if the system
    /// fails. After any of these three the contents of `out` are unspecified.
    pub fn read(&self, batch: &BatchPlan, out: &mut [u8]) -> Result<usize, Error> {
        let wanted = batch.len().checked_mul(self.record_bytes() as u64);
        let out = match wanted.and_then(|wanted| usize::try_from(wanted).ok()) {
            Some(wanted) if wanted <= out.len() => &mut out[..wanted],
            _ => {
                let wanted = wanted.unwrap_or(u64::MAX);
                return Err(Error::BufferTooSmall { wanted, found: out.len() as u64 });
            }
        };
        let read = out.len();
        match self.ahead(batch.window_records()) {
            Some((ahead, room)) => self.read_ahead(ahead, room.now(), self.parts(batch, out))?,
            None => self.read_parts(self.parts(batch, out))?,
        }
        Ok(read)
    }

    /// Reads each part by a call of its own, one after the other.
    fn read_parts<'a>(
        &'a self,
        parts: impl Iterator<Item = Result<(Span<'a>, &'a mut [u8]), Error>>,
    ) -> Result<(), Error> {
        // The file of the last span, which most often is that of the next.
        let mut last: Option<(&Shard, Opened<'_>)> = None;
        for part in parts {
            let (span, out) = part?;
            let shared = span.shared(out.len());
            let file = match last.take() {
                Some((shard, file)) if std::ptr::eq(shard, span.shard) => file,
                _ => span.shard.file.file()?,
            };
            let read = |out: &mut [u8], offset| read_at(&file, out, offset);
            span.shard.file.read_exact_by(&mut out[shared..], span.bytes.start, read)?;
            expand(out, self.record_bytes(), shared);
            last = Some((span.shard, file));
        }
        Ok(())
    }

    /// Takes the parts from what was read ahead; reads large ones, and what was not asked for, straight to their place.
    fn read_ahead<'a>(
        &'a self,
        ahead: &Ahead,
        room: Room,
        mut parts: impl Iterator<Item = Result<(Span<'a>, &'a mut [u8]), Error>>,
    ) -> Result<(), Error> {
        let mut next = group(&mut parts)?;
        self.ask_now(ahead, room, &next);
        let (mut copies, mut ends) = (Vec::new(), Vec::new());
        while !next.is_empty() {
            let mut group = std::mem::replace(&mut next, group(&mut parts)?);
            self.ask_now(ahead, room, &next);
            let mut parts = &mut group[..];
            while !parts.is_empty() {
                copies.clear();
                ends.clear();
                if is_ahead(&parts[0].0) {
                    self.take(ahead, parts, &mut copies, &mut ends);
                    if matches!(ends.first(), Some(Taken::Not)) {
                        // There was no room, or it was given up for another thread.
                        self.ask_now(ahead, room, &parts[..parts.len().min(AGAIN)]);
                        copies.clear();
                        ends.clear();
                        self.take(ahead, parts, &mut copies, &mut ends);
                    }
                }
                for (index, copy) in copies.iter().enumerate() {
                    // Records of a window lie anywhere in it: the processor cannot guess the next.
                    if let Some(later) = copies.get(index + 1) {
                        prefetch(later.bytes());
                    }
                    let (span, out) = &mut parts[copy.stretch];
                    let shared = span.shared(out.len());
                    out[shared..][copy.place.clone()].copy_from_slice(copy.bytes());
                }
                // The memory can be used again.
                copies.clear();
                let taken = ends.len().max(1);
                let (now, rest) = parts.split_at_mut(taken);
                for ((span, out), end) in now.iter_mut().zip(ends.drain(..).chain([Taken::Not])) {
                    let shared = span.shared(out.len());
                    match end {
                        Taken::Whole => expand(out, self.record_bytes(), shared),
                        Taken::Not => {
                            span.shard.read(&mut out[shared..], span.bytes.start, ahead.straight)?;
                            expand(out, self.record_bytes(), shared);
                        }
                        Taken::Failed { offset, error } => {
                            let path = span.shard.file.path.clone();
                            return Err(Error::Read { path, offset, source: error });
                        }
                    }
                }
                parts = rest;
            }
        }
        Ok(())
    }

    fn take(
        &self,
        ahead: &Ahead,
        parts: &[(Span<'_>, &mut [u8])],
        copies: &mut Vec<Copy>,
        ends: &mut Vec<Taken>,
    ) {
        let small = parts.iter().take_while(|(span, _)| is_ahead(span));
        ahead.take(small.map(|(span, _)| self.stretch(span)), copies, ends);
    }

    fn ask_now(&self, ahead: &Ahead, room: Room, parts: &[(Span<'_>, &mut [u8])]) {
        let small = parts.iter().filter(|(span, _)| is_ahead(span));
        ahead.ask(small.map(|(span, _)| self.stretch(span)), room);
    }

    /// Where a span lies, for reads ahead.
    pub(crate) fn stretch<'a>(&self, span: &Span<'a>) -> Stretch<'a> {
        let Span { shard, ref bytes, records } = *span;
        let own_end = bytes.start.saturating_add(records.saturating_mul(self.stride())).min(bytes.end);
        Stretch { shard, bytes: bytes.clone(), own_end }
    }

    /// The spans of `batch`, each with the part of `out` that its records fill.
    fn parts<'a, 'b>(
        &'a self,
        batch: &BatchPlan,
        mut out: &'b mut [u8],
    ) -> impl Iterator<Item = Result<(Span<'a>, &'b mut [u8]), Error>> + use<'a, 'b> {
        let record = self.record_bytes() as u64;
        self.spans(batch).map(move |span| {
            let span = span?;
            // The records of the spans are those of the batch, all of which fit `out`; so each fits usize.
            let len = usize::try_from(span.records * record).unwrap_or(usize::MAX);
            let (part, rest) = std::mem::take(&mut out).split_at_mut_checked(len).unwrap_or_default();
            out = rest;
            Ok((span, part))
        })
    }
}

/// Brings the front of `bytes` into the cache of the processor. An epoch of 1 GiB, mixed within windows, took a quarter less
/// processor time with it (0.34 s instead of 0.46 in records of 1 KiB, 0.19 instead of 0.27 of 4 KiB).
fn prefetch(bytes: &[u8]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for line in bytes.chunks(64).take(16) {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the pointer is valid, and a prefetch reads nothing that the program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = bytes;
}

/// Whether a span of a batch is read into memory of our own.
fn is_ahead(span: &Span<'_>) -> bool {
    span.shard.is_read_ahead() && !span.is_large()
}

/// Parts that are asked for once more, if one was not there: as many as keep a disk busy.
const AGAIN: usize = 128;

/// The next parts, as many as are asked for together.
fn group<'a>(
    parts: &mut impl Iterator<Item = Result<(Span<'a>, &'a mut [u8]), Error>>,
) -> Result<Vec<(Span<'a>, &'a mut [u8])>, Error> {
    /// Bytes, or at least one part: what the disk has under way at a time, and as much that waits for its turn.
    const BYTES: u64 = 8 << 20;
    let mut group = Vec::new();
    let mut bytes = 0;
    while bytes < BYTES {
        let Some(part) = parts.next().transpose()? else { break };
        // With the blocks at its ends.
        bytes += part.0.bytes.end - part.0.bytes.start + SPILL;
        group.push(part);
    }
    Ok(group)
}

impl Shard {
    /// Fills `out` with the bytes from `start` on of the file: straight past the page cache, or through it.
    fn read(&self, out: &mut [u8], start: u64, straight: bool) -> Result<(), Error> {
        match self.direct.as_ref().filter(|_| straight) {
            Some(direct) => {
                let (file, mut bounce) = (direct.opened(&self.file)?, BounceBuffer::new());
                let read = |out: &mut [u8], offset| direct.read_at(&file, out, offset, &mut bounce);
                self.file.read_exact_by(out, start, read)
            }
            None => self.file.read_exact(out, start),
        }
    }
}

/// Spreads overlapping records, of `record` bytes each, out of the end of `out`, where they begin at byte
/// `shared`, over all of `out`.
fn expand(out: &mut [u8], record: usize, shared: usize) {
    if shared == 0 {
        return;
    }
    // With n records and the stride s, `shared` is n * record - ((n - 1) * s + record), that is
    // (n - 1) * (record - s). Record i goes to i * record and lies at shared + i * s, which is
    // (n - 1 - i) * (record - s) further behind: never before its place. And all that is written up to then
    // ends at (i + 1) * record, which is the place of record i + 1 and so not behind where that one lies: no
    // record is overwritten before it has been copied.
    let overlap = shared / (out.len() / record - 1);
    for (to, from) in (0..out.len()).step_by(record).zip((shared..).step_by(record - overlap)) {
        out.copy_within(from..from + record, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_records_are_spread_out() {
        for (record, stride, records) in [(3, 2, 4), (5, 1, 7), (4, 3, 1), (4, 4, 3), (2, 1, 2), (1, 1, 5)] {
            let source: Vec<u8> = (0_u8..).take((records - 1) * stride + record).collect();
            let expected: Vec<u8> =
                (0..records).flat_map(|i| &source[i * stride..i * stride + record]).copied().collect();
            let mut out = vec![0xEE; records * record];
            let shared = out.len() - source.len();
            out[shared..].copy_from_slice(&source);
            expand(&mut out, record, shared);
            assert_eq!(out, expected, "{records} records of {record}, stride {stride}");
        }
    }
}
