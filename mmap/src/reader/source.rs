//! Byte ranges of files into a slot, in the order of use: from the page cache, or past it.

use std::sync::{Mutex, PoisonError};

use super::cached::{self, Copied};
use super::direct::BounceBuffer;
use super::stats::ReadStats;
use super::stream::{Copy, Stream, Taken, Wanted};
use crate::Error;
use crate::buffer::prefetch;
use crate::ranges::Shard;
use crate::ranges::Stretch;
use crate::system::PIECES;

/// A stretch of at least this many bytes is read straight to its place, where that is allowed: the disk is busy with one for
/// long enough.
const STRAIGHT: u64 = 4 << 20;

/// If a stretch was missing, this many are requested again: enough to keep a disk busy.
const AGAIN: usize = 128;

/// Where the bytes of some files come from.
#[derive(Debug)]
pub(super) struct Source {
    /// Bytes at the front of all files, one behind the other, that come through the page cache.
    pub(super) cached: u64,
    /// What the others come through. `None`: there are none.
    pub(super) stream: Option<Stream>,
    /// Whether the disk may write to the caller's memory.
    pub(super) straight: bool,
    pub(super) copied: Copied,
    /// What was read so far, except the requests of the stream.
    pub(super) stats: Mutex<ReadStats>,
}

impl Source {
    /// All of it through the page cache.
    pub(super) fn cached() -> Self {
        Self {
            cached: u64::MAX,
            stream: None,
            straight: false,
            copied: Copied::default(),
            stats: Mutex::default(),
        }
    }

    /// Adds what one read took.
    pub(super) fn count(&self, read: ReadStats) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) += read;
    }

    /// Returns what was read so far.
    pub(super) fn stats(&self) -> ReadStats {
        let mut stats = *self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        stats.disk += self.stream.as_ref().map_or(0, Stream::bytes);
        stats
    }

    /// How many of a file's bytes come through the page cache: those before the returned offset.
    pub(super) fn cached_until(&self, shard: &Shard) -> u64 {
        if self.stream.is_none() { u64::MAX } else { self.cached.saturating_sub(shard.before) }
    }

    fn is_cached(&self, shards: &[Shard], stretch: &Stretch) -> bool {
        stretch.bytes.end <= self.cached_until(&shards[stretch.shard])
    }

    /// Fills `out` with `wanted`. The slot has `behind` bytes more.
    pub(super) fn fill(
        &self,
        shards: &[Shard],
        mut wanted: impl Iterator<Item = Result<Wanted, Error>>,
        (out, behind): (&mut [u8], usize),
        stats: &mut ReadStats,
    ) -> Result<(), Error> {
        let mut rest = None;
        let mut next = self.group(shards, &mut wanted, &mut rest)?;
        self.ask_now(shards, &next);
        while !next.is_empty() {
            let group = std::mem::replace(&mut next, self.group(shards, &mut wanted, &mut rest)?);
            self.ask_now(shards, &next);
            let Group { cached, streamed } = group;
            if !cached.is_empty() {
                cached::fill(shards, &cached, (&mut *out, behind), &self.copied, stats)?;
            }
            if let Some(stream) = &self.stream {
                self.take(stream, shards, &streamed, out, stats)?;
            }
        }
        Ok(())
    }

    /// The next stretches, as many as are read together.
    fn group(
        &self,
        shards: &[Shard],
        wanted: &mut impl Iterator<Item = Result<Wanted, Error>>,
        rest: &mut Option<Wanted>,
    ) -> Result<Group, Error> {
        let most = self.stream.as_ref().map_or(u64::MAX, Stream::at_a_time);
        let (mut group, mut bytes) = (Group::default(), 0);
        while group.len() < PIECES && bytes < most {
            let Some(mut next) = rest.take().map(Ok).or_else(|| wanted.next()).transpose()? else { break };
            if self.is_cached(shards, &next.at) {
                group.cached.push(next);
                continue;
            }
            let straight = self.straight && next.len() >= STRAIGHT;
            if next.len() > most / 2 && !straight {
                // What is longer than the memory is read in parts.
                let Stretch { shard, bytes, own_end } = &mut next.at;
                let cut = bytes.start + most / 2;
                let (at, to) = (Stretch { shard: *shard, bytes: cut..bytes.end, own_end: *own_end }, next.to);
                bytes.end = cut;
                *rest = Some(Wanted { at, to: to + usize::try_from(most / 2).unwrap_or(usize::MAX) });
            }
            bytes += next.len();
            group.streamed.push(next);
        }
        Ok(group)
    }

    /// Whether a stretch is read into memory of the stream.
    pub(super) fn is_streamed(&self, stream: &Stream, shards: &[Shard], wanted: &Wanted) -> bool {
        stream.takes(shards, wanted.at.shard) && !(self.straight && wanted.len() >= STRAIGHT)
    }

    fn ask_now(&self, shards: &[Shard], group: &Group) {
        if let Some(stream) = self.stream.as_ref().filter(|_| !group.streamed.is_empty()) {
            let wanted = group.streamed.iter().filter(|wanted| self.is_streamed(stream, shards, wanted));
            stream.ask_now(wanted.map(|wanted| &wanted.at));
        }
    }

    /// Takes stretches from the stream; reads straight to its place what it does not have.
    fn take(
        &self,
        stream: &Stream,
        shards: &[Shard],
        mut wanted: &[Wanted],
        out: &mut [u8],
        stats: &mut ReadStats,
    ) -> Result<(), Error> {
        let (mut copies, mut ends): (Vec<Copy>, Vec<Taken>) = (Vec::new(), Vec::new());
        while let Some(first) = wanted.first() {
            copies.clear();
            ends.clear();
            if self.is_streamed(stream, shards, first) {
                let streamed = || {
                    let all = wanted.iter().take_while(|wanted| self.is_streamed(stream, shards, wanted));
                    all.map(|wanted| &wanted.at)
                };
                stream.take(streamed(), &mut copies, &mut ends);
                if matches!(ends.first(), Some(Taken::Not)) {
                    // There was no room, or it was given up for another thread.
                    stream.ask_now(streamed().take(AGAIN));
                    copies.clear();
                    ends.clear();
                    stream.take(streamed(), &mut copies, &mut ends);
                }
            }
            for (index, copy) in copies.iter().enumerate() {
                // Records of a window are anywhere in it: the processor cannot predict the next. An epoch of 1 GiB took
                // a quarter less processor time (0.34 s instead of 0.46 in records of 1 KiB).
                if let Some(later) = copies.get(index + 1).map(Copy::bytes) {
                    prefetch(later.as_ptr(), later.len().min(1024));
                }
                out[wanted[copy.stretch].to..][copy.place.clone()].copy_from_slice(copy.bytes());
            }
            let (now, rest) = wanted.split_at(ends.len().max(1));
            for (Wanted { at, to }, end) in now.iter().zip(ends.drain(..).chain([Taken::Not])) {
                match end {
                    Taken::Whole => {}
                    Taken::Not => {
                        let len = usize::try_from(at.bytes.end - at.bytes.start).unwrap_or(usize::MAX);
                        self.read_straight(stream, shards, at, &mut out[*to..*to + len])?;
                        stats.disk += len as u64;
                    }
                    Taken::Failed { offset, error } => {
                        let path = shards[at.shard].file.path.clone();
                        return Err(Error::Read { path, offset, source: error });
                    }
                }
            }
            wanted = rest;
        }
        Ok(())
    }

    /// Fills `out` with bytes of a file: straight past the page cache, or through it.
    fn read_straight(
        &self,
        stream: &Stream,
        shards: &[Shard],
        at: &Stretch,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let (data, start) = (&shards[at.shard].file, at.bytes.start);
        if !self.straight {
            return data.read_exact(out, start);
        }
        let (direct, mut bounce) = (stream.file(at.shard), BounceBuffer::new());
        let file = direct.opened(data)?;
        data.read_exact_by(out, start, |out, offset| direct.read_at(&file, out, offset, &mut bounce))
    }
}

/// Stretches that are read together.
#[derive(Debug, Default)]
struct Group {
    cached: Vec<Wanted>,
    streamed: Vec<Wanted>,
}

impl Group {
    fn len(&self) -> usize {
        self.cached.len() + self.streamed.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
