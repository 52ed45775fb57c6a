//! Decides how much of a data set is read through the page cache, and how much memory the direct reads of the rest get.
//! All readers of a process share the memory.
//!
//! Each reader with [`ReadMode::Direct`], or with [`ReadMode::Auto`] where the memory that is left is known, has a
//! [`Claim`]: the memory that it counts on. A later reader gets what the claims leave. Bytes that two readers of a
//! process have in the page cache count once. So do the bytes that the ranks of one machine have there.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use super::cached::joins;
use super::direct::Direct;
use crate::error::lock;
use crate::ranges::Shard;
use crate::{Error, ReadChoice, ReadMode, limit};

/// The least memory for direct reads of bytes that are needed now. If there is less, everything is read through the
/// page cache.
const LEAST: u64 = 1 << 20;

/// What a new reader would read, and the memory that it would use.
pub(super) struct Wish<'a> {
    pub(super) mode: ReadMode,
    pub(super) shards: &'a [Shard],
    /// The range that contains all bytes to read, counted from the front of all files, one file after the other.
    pub(super) part: Range<u64>,
    /// How many bytes of this range are read.
    pub(super) data: u64,
    /// Bytes in a window of the shuffle, or 0.
    pub(super) window: u64,
    /// Bytes of memory that the caller needs for itself.
    pub(super) own: u64,
    /// Bytes of memory for direct reads: for prefetched data, and for data that is needed now but was not prefetched.
    pub(super) lanes: [u64; 2],
}

/// The decision for a reader.
pub(super) struct Share {
    /// How many bytes are read through the page cache, and the memory that was left, if the decision depends on it.
    pub(super) choice: ReadChoice,
    /// The position where the bytes that are read through the page cache end, counted from the front of all files.
    pub(super) until: u64,
    /// Bytes of memory for direct reads: for prefetched data, and for data that is needed now.
    pub(super) room: [u64; 2],
    /// Whether the memory for prefetched data has room for whole windows of the shuffle.
    pub(super) windows: bool,
    /// The files for direct I/O. Empty if all data is read through the page cache.
    pub(super) files: Vec<Direct>,
    /// The claim of the reader. It counts until the reader is dropped.
    _claim: Arc<Claim>,
}

/// Device and inode. On Unix, two files with the same pair are the same file.
type Id = [u64; 2];

/// The memory that a reader counts on: ranges of files in the page cache, and bytes of its buffers.
#[derive(Debug, Default)]
struct Claim {
    kept: Vec<(Id, Range<u64>)>,
    memory: u64,
}

/// The claims of the readers of a process.
#[derive(Debug, Default)]
pub(super) struct Readers(Mutex<Vec<Weak<Claim>>>);

/// The claims of the readers of this process.
pub(super) static READERS: Readers = Readers(Mutex::new(Vec::new()));

impl Readers {
    /// Decides how a reader reads. `left` is the memory that is left to all readers, in bytes; `None` if unknown. If
    /// some data is read with direct I/O, also opens the files for it.
    pub(super) fn decide(&self, wish: &Wish<'_>, left: Option<u64>) -> Result<Share, Error> {
        let left = match wish.mode {
            ReadMode::Auto if left.is_some() => left,
            ReadMode::Direct => None,
            _ => return Ok(Share::all(wish.data, None)),
        };
        let ranks = limit::ranks_here();
        // No system call is made under this lock. If another thread forks while it is locked, it stays locked in the
        // child.
        let mut readers = lock(&self.0);
        let others = || Others::new(readers.iter().filter_map(Weak::upgrade));
        let share = left.map_or_else(|| wish.past(), |left| wish.fitting(left, &others(), ranks));
        let mut share = wish.claim(share, &mut readers);
        drop(readers);
        if share.choice.cached < wish.data || wish.mode == ReadMode::Direct {
            share.files = Direct::all(wish.shards, wish.mode)?;
            if share.files.is_empty() {
                share = wish.claim(Share::all(wish.data, share.choice.left), &mut lock(&self.0));
            }
        }
        Ok(share)
    }
}

/// The memory that other readers count on. A byte of a file that several of them keep counts once.
#[derive(Debug, Default)]
struct Others {
    kept: HashMap<Id, Vec<Range<u64>>>,
    bytes: u64,
}

impl Others {
    fn new(claims: impl Iterator<Item = Arc<Claim>>) -> Self {
        let mut others = Self::default();
        for claim in claims {
            others.bytes = others.bytes.saturating_add(claim.memory);
            for (id, bytes) in &claim.kept {
                others.kept.entry(*id).or_default().push(bytes.clone());
            }
        }
        for kept in others.kept.values_mut() {
            kept.sort_unstable_by_key(|bytes| bytes.start);
            kept.dedup_by(|next, first| joins(first, next));
            let all = kept.iter().map(|bytes| bytes.end - bytes.start);
            others.bytes = all.fold(others.bytes, u64::saturating_add);
        }
        others
    }

    /// Returns the parts of `bytes` that another reader keeps in the page cache.
    fn shared(&self, id: Id, bytes: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let kept = self.kept.get(&id).into_iter().flatten();
        let parts = kept.map(|kept| kept.start.max(bytes.start)..kept.end.min(bytes.end));
        parts.filter(|part| !part.is_empty())
    }
}

impl Share {
    /// Reads all data through the page cache.
    fn all(data: u64, left: Option<u64>) -> Self {
        let choice = ReadChoice { data, cached: data, left };
        let (files, _claim) = (Vec::new(), Arc::default());
        Self { choice, until: u64::MAX, room: [0; 2], windows: true, files, _claim }
    }
}

impl Wish<'_> {
    /// Adds the claim of a reader with this share to those of the others.
    fn claim(&self, share: Share, readers: &mut Vec<Weak<Claim>>) -> Share {
        let end = share.until.min(self.part.end);
        let claim = Arc::new(Claim { kept: self.files(end).collect(), memory: share.room.iter().sum() });
        readers.retain(|reader| reader.strong_count() > 0);
        readers.push(Arc::downgrade(&claim));
        Share { _claim: claim, ..share }
    }

    /// Reads all data with direct I/O.
    fn past(&self) -> Share {
        let [ahead, now] = self.lanes;
        let room = [room(self.window).saturating_add(ahead), now];
        let choice = ReadChoice { data: self.data, cached: 0, left: None };
        Share { choice, until: 0, room, ..Share::all(0, None) }
    }

    /// Reads as much through the page cache as fits. `left` is the memory in bytes that is left to the ranks of this
    /// machine, together with what the `others` count on.
    fn fitting(&self, left: u64, others: &Others, ranks: u64) -> Share {
        let (left, taken) = (left.saturating_sub(others.bytes), others.bytes);
        // Leave a sixteenth of the memory free, counting what other readers take.
        let most = left.saturating_sub((left + taken) / 16).saturating_sub(self.own.saturating_mul(ranks));
        let lanes = self.lanes.map(|lane| lane.min((most + taken) / 16 / ranks));
        let len = |bytes: Range<u64>| bytes.end - bytes.start;
        let files = self.files(self.part.end);
        let shared = files.map(|(id, bytes)| others.shared(id, &bytes).map(len).sum::<u64>()).sum();
        let new = self.data.saturating_sub(shared);
        if new <= most || lanes[1] < LEAST {
            return Share::all(self.data, Some(left));
        }
        let most = most.saturating_sub(lanes[0].saturating_add(lanes[1]).saturating_mul(ranks));
        let windows = room(self.window).saturating_mul(ranks);
        // Chunks in the page cache need no room in the memory for windows. If c of n bytes are cached, cache and
        // windows together take c + windows * (n - c) / n bytes: choose c so that this is `most`.
        let (kept, windows) = match most.checked_sub(windows) {
            Some(rest) if windows < new => (scale(new, rest, new - windows), windows),
            _ => (most, 0),
        };
        let front = self.front(kept, others);
        let cached = front.min(self.data);
        let ahead = scale(windows / ranks, self.data - cached, self.data).saturating_add(lanes[0]);
        Share {
            choice: ReadChoice { data: self.data, cached, left: Some(left) },
            until: self.part.start.saturating_add(front),
            room: [ahead, lanes[1]],
            windows: windows > 0,
            ..Share::all(0, None)
        }
    }

    /// Returns each file with the range of its bytes that are read and are before position `end`.
    fn files(&self, end: u64) -> impl Iterator<Item = (Id, Range<u64>)> {
        let start = self.part.start;
        self.shards.iter().filter_map(move |shard| {
            let bytes =
                start.saturating_sub(shard.before)..end.saturating_sub(shard.before).min(shard.bytes.end);
            (!bytes.is_empty()).then_some((shard.file.id, bytes))
        })
    }

    /// Returns how many bytes to keep from the first on, so that `kept` of them are not already kept for another
    /// reader.
    fn front(&self, mut kept: u64, others: &Others) -> u64 {
        let mut front = 0;
        for (id, bytes) in self.files(self.part.end) {
            let mut at = bytes.start;
            for shared in others.shared(id, &bytes).chain(std::iter::once(bytes.end..bytes.end)) {
                let new = shared.start - at;
                if new > kept {
                    return front + (at - bytes.start) + kept;
                }
                kept -= new;
                at = shared.end;
            }
            front += at - bytes.start;
        }
        front
    }
}

/// The memory for a window of this many bytes. Chunks are requested an eighth of a window before their use, and their
/// memory is given back, in order, when all of their records were taken. No memory has 2^62 bytes, and the sum with the
/// other lane does not overflow.
fn room(window: u64) -> u64 {
    window.saturating_add(window / 8).min(1 << 62)
}

/// `number * of / whole`.
fn scale(number: u64, of: u64, whole: u64) -> u64 {
    let product = u128::from(number) * u128::from(of) / u128::from(whole.max(1));
    u64::try_from(product).unwrap_or(u64::MAX)
}
