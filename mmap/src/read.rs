//! Reads batches into the caller's buffer.

use std::cell::Cell;
use std::fs::File;

use crate::direct::{BounceBuffer, Direct};
use crate::file::{Opened, READ_CALLS, read_at};
use crate::records::Records;
use crate::shard::Shard;
use crate::spans::Span;
use crate::{BatchPlan, Error};

/// How [`Records::read`] gets bytes out of a file; set by [`Records::with_read_mode`].
///
/// Both modes deliver the same bytes, and neither can raise a signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReadMode {
    /// The kernel copies from its page cache, one call for each run of records: `pread` on Unix, `ReadFile` with an
    /// offset on Windows.
    #[default]
    Pread,
    /// Past the page cache, straight from the disk into the caller's buffer, one call for each run of records:
    /// `O_DIRECT` on Linux and FreeBSD, `F_NOCACHE` on macOS, `FILE_FLAG_NO_BUFFERING` on Windows.
    ///
    /// Use it for data that is larger than memory and read in runs of 1 MiB and more. An epoch of such data finds
    /// nothing in the cache anyway; the CPU copies nothing, no page of another program is pushed out, and read times
    /// vary less. Every read waits for the disk, also the second of the same record, and the kernel reads nothing
    /// ahead: hints and [`CachePolicy`](crate::CachePolicy) have no effect. Leave small records that are shuffled to
    /// `Pread` and hints.
    ///
    /// Reads are fastest into a [`Buffer`](crate::Buffer) of 2 MiB or more; any other memory works too. Where a
    /// run does not begin at a multiple of the disk's block (512 or 4096 bytes), as after a header of 128
    /// bytes, it is moved by less than a block inside `out` afterwards.
    ///
    /// Each file is opened a second time: through `/proc/self/fd` on Linux, through its handle on Windows, elsewhere by
    /// its path, where it must be the same file. Do not `fork` during such a read (NOTES in `open(2)`).
    Direct,
}

impl Records {
    /// Sets how [`read`](Self::read) gets the bytes. Default: [`ReadMode::Pread`].
    ///
    /// # Errors
    ///
    /// For [`ReadMode::Direct`]: [`Error::Unsupported`] where the system has no such reads; [`Error::Replaced`];
    /// [`Error::System`] if the kernel refuses, as it does on some file systems.
    pub fn with_read_mode(mut self, mode: ReadMode) -> Result<Self, Error> {
        // The block is the same for all files of a file system.
        let mut blocks = Vec::new();
        for shard in self.shards_mut() {
            shard.direct = match mode {
                ReadMode::Pread => None,
                ReadMode::Direct => Some(Direct::open(&shard.file, &mut blocks)?),
            };
        }
        Ok(self)
    }

    /// Returns how [`read`](Self::read) gets the bytes.
    #[must_use]
    pub fn read_mode(&self) -> ReadMode {
        // All files are read in one mode, and there is at least one.
        if self.shards()[0].direct.is_some() { ReadMode::Direct } else { ReadMode::Pread }
    }

    /// Returns how many system calls that read files this thread has made through this crate. Compare two of them to
    /// count the calls of a read.
    #[must_use]
    pub fn read_calls() -> u64 {
        READ_CALLS.with(Cell::get)
    }

    /// Reads the records of `batch`, one after the other in batch order, to the front of `out`. Returns the number of
    /// bytes: [`BatchPlan::len`] times [`record_bytes`](Self::record_bytes).
    ///
    /// The bytes go straight into `out`. Each run of consecutive records in a file is one call, and each record where
    /// there are gaps between them. Bytes that overlapping windows share are read once and then copied inside `out`.
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
        let mut bounce = BounceBuffer::new();
        // The file of the last span, which most often is that of the next.
        let mut last: Option<(&Shard, Opened<'_>)> = None;
        for part in self.parts(batch, out) {
            let (span, out) = part?;
            let shared = span.shared(out.len());
            let file = match last.take() {
                Some((shard, file)) if std::ptr::eq(shard, span.shard) => file,
                _ => span.shard.opened()?,
            };
            span.shard.read_exact(&file, &mut out[shared..], span.bytes.start, &mut bounce)?;
            expand(out, self.record_bytes(), shared);
            last = Some((span.shard, file));
        }
        Ok(read)
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

impl Shard {
    /// The file as it is to be read.
    fn opened(&self) -> Result<Opened<'_>, Error> {
        match &self.direct {
            Some(direct) => direct.opened(&self.file),
            None => self.file.file(),
        }
    }

    /// Fills `out` with the bytes from `start` on of the file, which [`opened`](Self::opened) gave.
    fn read_exact(
        &self,
        file: &File,
        out: &mut [u8],
        start: u64,
        bounce: &mut BounceBuffer,
    ) -> Result<(), Error> {
        self.file.read_exact_by(out, start, |out, offset| match &self.direct {
            Some(direct) => direct.read_at(file, out, offset, bounce),
            None => read_at(file, out, offset),
        })
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
