//! Fills a slot with the extents of a unit, through the page cache or with direct I/O.

use std::sync::Mutex;

use super::cached::Copied;
use super::stream::{Copy, NOW, Stream};
use crate::buffer::prefetch;
use crate::error::lock;
use crate::ranges::{Extent, Shard};
use crate::system::PIECES;
use crate::{Error, ReadStats};

/// An extent of at least this many bytes is read directly into the slot, if the reader allows that. One such read keeps
/// the disk busy for long enough.
pub(super) const STRAIGHT: u64 = 4 << 20;

/// If the stream does not have an extent, this many extents are requested again. That is enough to keep a disk busy.
const AGAIN: usize = 128;

/// How the bytes of a data set are read. The default reads all bytes through the page cache.
#[derive(Default)]
pub(super) struct Source {
    /// The position up to which bytes are read through the page cache, counted from the front of
    /// all files, one file after the other.
    pub(super) cached: u64,
    /// Reads the other bytes with direct I/O. `None`: there are no other bytes.
    pub(super) stream: Option<Stream>,
    /// The fewest bytes of an extent that is read directly into the slot. `None`: direct I/O may not write to the caller's
    /// memory.
    pub(super) straight: Option<u64>,
    /// What copies from the page cache have found out.
    pub(super) copied: Copied,
    /// Statistics of the reads so far, without the disk reads of the stream.
    pub(super) stats: Mutex<ReadStats>,
    /// Lists of earlier reads, to reuse their memory. There are as many as threads that have read at the same time.
    pub(super) scratch: Mutex<Vec<Scratch>>,
}

/// The lists that one read uses.
#[derive(Default)]
pub(super) struct Scratch {
    groups: [Group; 2],
    copies: Vec<Copy>,
    changed: Vec<usize>,
}

/// Extents that are read together.
#[derive(Debug, Default)]
struct Group {
    cached: Vec<Extent>,
    streamed: Vec<Extent>,
}

impl Source {
    /// Returns the offset in a file up to which its bytes are read through the page cache.
    pub(super) fn cached_until(&self, shard: &Shard) -> u64 {
        if self.stream.is_none() { u64::MAX } else { self.cached.saturating_sub(shard.before) }
    }

    /// Fills the front of the slot `out`, of `wanted` bytes, with `extents`. Returns this front.
    pub(super) fn fill<'o>(
        &self,
        shards: &[Shard],
        mut extents: impl Iterator<Item = Result<Extent, Error>>,
        wanted: u64,
        out: &'o mut [u8],
        stats: &mut ReadStats,
    ) -> Result<&'o mut [u8], Error> {
        let found = out.len() as u64;
        let cut = usize::try_from(wanted).ok().and_then(|wanted| out.split_at_mut_checked(wanted));
        let (out, later) = cut.ok_or(Error::BufferTooSmall { wanted, found })?;
        let mut scratch = lock(&self.scratch).pop().unwrap_or_default();
        let Scratch { groups: [group, next], copies, changed } = &mut scratch;
        let mut rest = None;
        let filled = (|| {
            self.group(shards, &mut extents, &mut rest, next)?;
            while !(next.cached.is_empty() && next.streamed.is_empty()) {
                std::mem::swap(group, next);
                // Request the next group now, so that the disk reads it while this group is copied.
                self.group(shards, &mut extents, &mut rest, next)?;
                if !group.cached.is_empty() {
                    self.copied.fill(shards, &group.cached, (&mut *out, later.len()), changed, stats)?;
                }
                if let Some(stream) = &self.stream {
                    self.take(stream, shards, &group.streamed, out, copies, stats)?;
                }
            }
            Ok(())
        })();
        // Release the memory of the stream from which bytes were copied.
        copies.clear();
        lock(&self.scratch).push(scratch);
        filled.map(|()| out)
    }

    /// Fills `group` with the next extents, as many as are read together, and requests those that are streamed. `rest`
    /// is the rest of an extent of which an earlier call or step took only the front.
    fn group(
        &self,
        shards: &[Shard],
        extents: &mut impl Iterator<Item = Result<Extent, Error>>,
        rest: &mut Option<Extent>,
        group: &mut Group,
    ) -> Result<(), Error> {
        let Group { cached, streamed } = group;
        cached.clear();
        streamed.clear();
        // About half of what the stream may hold now: the disk reads the next group while this one is copied.
        let most = self.stream.as_ref().map_or(u64::MAX, |stream| stream.room[NOW] / 2);
        let mut bytes = 0;
        while cached.len() + streamed.len() < PIECES && bytes < most {
            let Some(mut next) = rest.take().map(Ok).or_else(|| extents.next()).transpose()? else { break };
            if next.bytes.end <= self.cached_until(&shards[next.file]) {
                cached.push(next);
                continue;
            }
            let streamed_by = |stream: &Stream| self.is_streamed(stream, shards, &next);
            if next.len() > most / 2 && self.stream.as_ref().is_some_and(streamed_by) {
                // This extent is longer than half of what the stream reads at a time: cut it. Its rest is the next
                // extent.
                let end = std::mem::replace(&mut next.bytes.end, next.bytes.start + most / 2);
                let to = next.to + usize::try_from(most / 2).unwrap_or(usize::MAX);
                *rest = Some(Extent { bytes: next.bytes.end..end, to, ..next });
            }
            bytes += next.len();
            streamed.push(next);
        }
        if let Some(stream) = self.stream.as_ref().filter(|_| !streamed.is_empty()) {
            stream.ask_now(streamed.iter().filter(|extent| self.is_streamed(stream, shards, extent)));
        }
        Ok(())
    }

    /// Whether an extent is read into memory of the stream, and not directly into the slot.
    pub(super) fn is_streamed(&self, stream: &Stream, shards: &[Shard], extent: &Extent) -> bool {
        stream.takes(shards, extent.file) && self.straight.is_none_or(|least| extent.len() < least)
    }

    /// Copies extents from the stream to `out`. An extent that the stream does not have is read directly to its place.
    fn take(
        &self,
        stream: &Stream,
        shards: &[Shard],
        mut extents: &[Extent],
        out: &mut [u8],
        copies: &mut Vec<Copy>,
        stats: &mut ReadStats,
    ) -> Result<(), Error> {
        while let Some(first) = extents.first() {
            copies.clear();
            let (mut whole, mut failed) = (0, false);
            if self.is_streamed(stream, shards, first) {
                let streamed =
                    || extents.iter().take_while(|extent| self.is_streamed(stream, shards, extent));
                (whole, failed) = stream.take(streamed(), copies);
                if whole == 0 && !failed {
                    // The stream has no request for this extent: there was no room, or the request's memory went to
                    // bytes that another thread needed at once. Ask again.
                    stream.ask_now(streamed().take(AGAIN));
                    (whole, failed) = stream.take(streamed(), copies);
                }
            }
            for (index, copy) in copies.iter().enumerate() {
                // The records of a window are at random places in memory, so the processor cannot predict the next one:
                // prefetch it. An epoch of 1 GiB in records of 1 KiB then took 0.34 s of processor time instead of
                // 0.46.
                if let Some(later) = copies.get(index + 1).map(Copy::bytes) {
                    prefetch(later.as_ptr(), later.len().min(1024));
                }
                let bytes = copy.bytes();
                out[copy.to..][..bytes.len()].copy_from_slice(bytes);
            }
            if whole == 0 || failed {
                // Read the next extent alone: an error then concerns its bytes, not others that were in the same request.
                let extent = &extents[whole];
                let len = usize::try_from(extent.len()).unwrap_or(usize::MAX);
                let (out, start) = (&mut out[extent.to..][..len], extent.bytes.start);
                let data = &shards[extent.file].file;
                if self.straight.is_some() {
                    stream.files[extent.file].read_exact(data, out, start)?;
                } else {
                    data.read_exact(out, start)?;
                }
                stats.disk += extent.len();
                whole += 1;
            }
            extents = &extents[whole..];
        }
        Ok(())
    }
}
