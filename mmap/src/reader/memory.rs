//! How much of a data set stays in the page cache, and how much memory the rest goes through: decided once for all
//! readers of a process.
//!
//! Each reader that decides leaves a [`Claim`]: the bytes that it counts on. The next one gets what is left. Bytes that
//! two readers share count once, as they do for the ranks of one machine.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::direct::Direct;
use crate::ranges::Shard;
use crate::{Error, ReadMode, limit};

/// The least memory for reads past the page cache. A process that has less left reads through it.
const LEAST: u64 = 1 << 20;

/// What a reader is for.
pub(super) struct Wish<'a> {
    pub(super) mode: ReadMode,
    pub(super) shards: &'a [Shard],
    /// The bytes of the files that may be read, counted from the front of all files, and how many of them are.
    pub(super) extent: Range<u64>,
    pub(super) data: u64,
    /// Bytes of a window of a shuffle.
    pub(super) window: u64,
    /// Bytes of memory that the caller needs.
    pub(super) own: u64,
    /// Memory for reads ahead past the page cache, and for what is needed now and was not asked for.
    pub(super) lanes: [u64; 2],
}

/// How a data set and the memory are divided.
#[derive(Clone, Debug)]
pub(super) struct Share {
    /// The part of the data that is read through the page cache, in bytes, and where it ends, counted from the front of all
    /// files.
    pub(super) cached: u64,
    pub(super) until: u64,
    /// Bytes of memory for reads ahead past it, and for those that are needed now.
    pub(super) room: [u64; 2],
    /// Whether whole windows fit.
    pub(super) windows: bool,
    /// The memory that was left, if that decided.
    pub(super) left: Option<u64>,
    /// What this reader counts on, as long as it exists.
    claim: Arc<Claim>,
}

/// Files are the same if both numbers are: device and inode.
type Id = [u64; 2];

/// What a reader counts on: bytes of files in the page cache, and other memory.
#[derive(Debug, Default)]
struct Claim {
    kept: Vec<(Id, Range<u64>)>,
    memory: u64,
}

/// The readers of a process.
#[derive(Debug, Default)]
pub(super) struct Readers(Mutex<Vec<Weak<Claim>>>);

/// Those of this process.
pub(super) static READERS: Readers = Readers(Mutex::new(Vec::new()));

impl Readers {
    /// Decides how `wish` is read with `left` bytes of memory for all readers, and opens the files for it where some are
    /// read past the page cache.
    pub(super) fn decide(&self, wish: &Wish<'_>, left: Option<u64>) -> Result<(Share, Vec<Direct>), Error> {
        let mut readers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        readers.retain(|reader| reader.strong_count() > 0);
        let all = Share::all(wish.data);
        let (mut share, files) = match (wish.mode, left) {
            (ReadMode::Pread, _) | (ReadMode::Auto, None) => return Ok((all, Vec::new())),
            (ReadMode::Direct, _) => {
                let files = Direct::all(wish.shards, wish.mode)?;
                return Ok(if files.is_empty() { (all, files) } else { (wish.past(), files) });
            }
            (ReadMode::Auto, Some(left)) => {
                let others = Others::new(readers.iter().filter_map(Weak::upgrade));
                let left = left.saturating_sub(others.bytes);
                let share = wish.fitting(left, others.bytes, &others, limit::ranks_here());
                let some = share.cached < wish.data;
                let files = if some { Direct::all(wish.shards, wish.mode)? } else { Vec::new() };
                let share = if files.is_empty() { all } else { share };
                (Share { left: Some(left), ..share }, files)
            }
        };
        let end = share.until.min(wish.extent.end);
        let claim = Claim { kept: wish.files(end).collect(), memory: share.room.iter().sum() };
        share.claim = Arc::new(claim);
        readers.push(Arc::downgrade(&share.claim));
        Ok((share, files))
    }
}

/// What other readers count on, each byte of a file once.
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
            kept.dedup_by(|next, first| {
                let touch = next.start <= first.end;
                first.end = if touch { first.end.max(next.end) } else { first.end };
                touch
            });
            others.bytes += kept.iter().map(|bytes| bytes.end - bytes.start).sum::<u64>();
        }
        others
    }

    /// The parts of these bytes that are kept for another reader.
    fn shared(&self, id: Id, bytes: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let kept = self.kept.get(&id).into_iter().flatten();
        let parts = kept.map(|kept| kept.start.max(bytes.start)..kept.end.min(bytes.end));
        parts.filter(|part| !part.is_empty())
    }
}

impl Share {
    /// All of it through the page cache.
    fn all(data: u64) -> Self {
        let claim = Arc::default();
        Self { cached: data, until: u64::MAX, room: [0; 2], windows: true, left: None, claim }
    }
}

impl Wish<'_> {
    /// All of it past the page cache.
    fn past(&self) -> Share {
        let [ahead, now] = self.lanes;
        let room = [room(self.window).saturating_add(ahead), now];
        Share { cached: 0, until: 0, room, ..Share::all(0) }
    }

    /// As much as fits through the page cache, if `left` bytes of memory are left to this many ranks, beside those that the
    /// `others` count on.
    fn fitting(&self, left: u64, taken: u64, others: &Others, ranks: u64) -> Share {
        // Leave a sixteenth of the memory free, whoever takes the rest.
        let most = left.saturating_sub((left + taken) / 16).saturating_sub(self.own.saturating_mul(ranks));
        let lanes = self.lanes.map(|lane| lane.min((most + taken) / 16 / ranks));
        let len = |bytes: Range<u64>| bytes.end - bytes.start;
        let files = self.files(self.extent.end);
        let shared = files.map(|(id, bytes)| others.shared(id, &bytes).map(len).sum::<u64>()).sum();
        let new = self.data.saturating_sub(shared);
        if new <= most || lanes[1] < LEAST {
            return Share::all(self.data);
        }
        let most = most.saturating_sub(lanes[0].saturating_add(lanes[1]).saturating_mul(ranks));
        let windows = room(self.window).saturating_mul(ranks);
        // Chunks in the page cache need no room in the memory for windows. With c of n bytes cached, both together take
        // c + windows * (n - c) / n bytes: choose c so that this is `most`.
        let (kept, windows) = match most.checked_sub(windows) {
            Some(rest) if windows < new => (scale(new, rest, new - windows), windows),
            _ => (most, 0),
        };
        let front = self.front(kept, others);
        let cached = front.min(self.data);
        let ahead = scale(windows / ranks, self.data - cached, self.data).saturating_add(lanes[0]);
        Share {
            cached,
            until: self.extent.start.saturating_add(front),
            room: [ahead, lanes[1]],
            windows: windows > 0,
            ..Share::all(0)
        }
    }

    /// The files, as far as they are read before position `end`.
    fn files(&self, end: u64) -> impl Iterator<Item = (Id, Range<u64>)> {
        let start = self.extent.start;
        self.shards.iter().filter_map(move |shard| {
            let bytes =
                start.saturating_sub(shard.before)..end.saturating_sub(shard.before).min(shard.bytes.end);
            (!bytes.is_empty()).then(|| (shard.file.id(), bytes))
        })
    }

    /// How many bytes from the first on contain `kept` that are not kept for another reader.
    fn front(&self, mut kept: u64, others: &Others) -> u64 {
        let mut front = 0;
        for (id, bytes) in self.files(self.extent.end) {
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

/// Memory for windows of this many bytes: chunks are requested an eighth of a window before they are needed, and given
/// back in order when all of their records are taken.
const fn room(window: u64) -> u64 {
    window.saturating_add(window / 8)
}

/// `number * of / whole`.
fn scale(number: u64, of: u64, whole: u64) -> u64 {
    let product = u128::from(number) * u128::from(of) / u128::from(whole.max(1));
    u64::try_from(product).unwrap_or(u64::MAX)
}
