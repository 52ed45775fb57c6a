//! Bytes read past the page cache, ahead of use: many requests in flight, into memory that is used again in turn.
//!
//! There are two lanes of memory. One is for reads ahead. The other is for bytes that are needed now and were not
//! requested; it is always free soon. Each is a [`Ring`]: requests get memory in the order of use, and give it back when
//! all of their bytes have been taken. If a part of a request is never taken, its memory is given back when the reading
//! is past it.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use super::direct::Direct;
use super::queue::{Done, Queue, Read};
use super::ring::{Ring, UNIT};
use crate::Buffer;
use crate::file::READ_CALLS;
use crate::ranges::{Extent, Shard};

/// The most bytes of one request. Disks are at their full speed with a few of these.
const REQUEST: u64 = 2 << 20;

/// Bytes that are copied between two looks at what the disk has finished.
const AT_ONCE: u64 = 256 << 10;

/// What is read past the page cache for one reader.
pub(super) struct Stream {
    /// The process that made it. A fork's child has neither its threads nor its requests.
    process: u32,
    pub(super) files: Vec<Direct>,
    /// Bytes of each lane, and of the longest request.
    room: [u64; 2],
    request: u64,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    pub(super) queue: Queue,
    lanes: [Lane; 2],
    places: Places,
    /// What requests get their memory in: those that have ended.
    spare: Vec<Arc<Buffer>>,
    /// How far the reading has come, in bytes of units.
    used: u64,
    /// Bytes of all requests.
    bytes: u64,
}

/// The requests of a lane, the oldest first.
struct Lane {
    ring: Ring,
    requests: VecDeque<Request>,
    /// The number of the first of them.
    first: u64,
}

/// A request: its lane, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tag(usize, u64);

const AHEAD: usize = 0;
const NOW: usize = 1;

struct Request {
    file: usize,
    bytes: Range<u64>,
    /// Bytes that were asked for and not taken yet.
    left: u64,
    /// When the reading is past it.
    until: u64,
    content: Content,
    /// What its memory is given back with.
    place: u64,
}

enum Content {
    Coming,
    /// The number of bytes: fewer than requested at the end of the file.
    There(Arc<Buffer>, usize),
    Failed(io::Error),
}

/// Where requests begin, by file and offset. No two of them overlap. Lists are used again, so that a batch allocates
/// nothing.
#[derive(Debug, Default)]
struct Places {
    /// The requests that begin in each [`BUCKET`] of a file, sorted.
    buckets: HashMap<(usize, u64), Vec<(u64, Tag)>>,
    spare: Vec<Vec<(u64, Tag)>>,
}

/// More than the longest request: what has a byte begins in the byte's bucket or in the one before.
const BUCKET: u64 = 2 * REQUEST;

impl Places {
    fn insert(&mut self, file: usize, start: u64, tag: Tag) {
        let list = self.buckets.entry((file, start / BUCKET));
        let list = list.or_insert_with(|| self.spare.pop().unwrap_or_default());
        list.insert(list.partition_point(|(other, _)| *other < start), (start, tag));
    }

    fn remove(&mut self, file: usize, start: u64, tag: Tag) {
        let bucket = (file, start / BUCKET);
        let Some(list) = self.buckets.get_mut(&bucket) else { return };
        list.retain(|place| *place != (start, tag));
        if list.is_empty() {
            self.spare.extend(self.buckets.remove(&bucket));
        }
    }

    /// The last request that begins at `at` or before it.
    fn last(&self, file: usize, at: u64) -> Option<Tag> {
        let bucket = at / BUCKET;
        (bucket.saturating_sub(1)..=bucket).rev().find_map(|bucket| {
            let list = self.buckets.get(&(file, bucket))?;
            let count = list.partition_point(|(start, _)| *start <= at);
            Some(list.get(count.checked_sub(1)?)?.1)
        })
    }

    /// Where the first request behind `at` begins.
    fn next(&self, file: usize, at: u64) -> Option<u64> {
        let bucket = at / BUCKET;
        (bucket..=bucket + 1).find_map(|bucket| {
            let list = self.buckets.get(&(file, bucket))?;
            Some(list.get(list.partition_point(|(start, _)| *start <= at))?.0)
        })
    }
}

/// Bytes of a request, and where they belong in the slot.
pub(super) struct Copy {
    from: Arc<Buffer>,
    bytes: Range<usize>,
    pub(super) to: usize,
}

impl Copy {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.from[self.bytes.clone()]
    }
}

/// What came of taking an extent.
enum Taken {
    /// All of it is in the copies.
    Whole,
    /// Something was not asked for, or not found where it was expected.
    Not,
    /// A request failed that had some of it, and perhaps bytes of other extents.
    Failed,
}

impl Stream {
    /// Reads `files`. The memory sizes are for reads ahead and for bytes needed now.
    pub(super) fn new(files: Vec<Direct>, room: [u64; 2]) -> Self {
        let block = files.iter().map(Direct::block).max().unwrap_or(UNIT);
        // Two requests, with one block more at each end, fit a lane: one is read while the other is copied.
        let request = REQUEST.min((room[NOW].min(room[AHEAD]) / 2).saturating_sub(2 * block)) / block * block;
        let lane = |room| Lane { ring: Ring::new(room), requests: VecDeque::new(), first: 0 };
        let state = State {
            queue: Queue::new(),
            lanes: room.map(lane),
            places: Places::default(),
            spare: Vec::new(),
            used: 0,
            bytes: 0,
        };
        Self { process: std::process::id(), files, room, request, state: Mutex::new(state) }
    }

    /// Bytes of memory.
    pub(super) const fn memory(&self) -> u64 {
        self.room[AHEAD] + self.room[NOW]
    }

    /// Bytes that may be prefetched.
    pub(super) const fn room(&self) -> u64 {
        self.room[AHEAD]
    }

    /// Bytes that are needed now and asked for together: what the disk has in flight, and as much that waits for its turn.
    pub(super) const fn at_a_time(&self) -> u64 {
        self.room[NOW] / 2
    }

    /// Bytes of all requests so far.
    pub(super) fn bytes(&self) -> u64 {
        self.state().map_or(0, |state| state.bytes)
    }

    /// Whether bytes of this file can be asked for: not where a request could wait for its file system, nor of a file that is
    /// opened for each use, or too many would be open at a time.
    pub(super) fn takes(&self, shards: &[Shard], file: usize) -> bool {
        !shards[file].file.hints_wait && self.files[file].file.is_some() && self.request > 0
    }

    /// `None` in a fork's child and after a panic: then everything is read by the usual way.
    fn state(&self) -> Option<MutexGuard<'_, State>> {
        if self.process != std::process::id() {
            return None;
        }
        self.state.lock().ok()
    }

    /// Forgets all that was asked for: the order of reading has changed.
    pub(super) fn forget(&self) {
        let Some(mut state) = self.state() else { return };
        let state = &mut *state;
        for (tag, memory) in state.queue.forget_queued() {
            drop(memory);
            if let Some(request) = request(&mut state.lanes, Tag::of(tag)) {
                request.content = Content::Failed(io::ErrorKind::Interrupted.into());
            }
        }
        state.places.buckets.clear();
        for request in state.lanes.iter_mut().flat_map(|lane| &mut lane.requests) {
            request.left = 0;
        }
        state.used = 0;
    }

    /// Begins to read as many of these extents as there is room for, in their order, and removes them. They are no
    /// longer needed when the reading is past `until`; it is now at `used`.
    pub(super) fn ask(&self, extents: &mut VecDeque<(Extent, u64)>, used: u64) {
        let Some(mut state) = self.state() else { return extents.clear() };
        state.settle_ended();
        state.used = used;
        while let Some((extent, until)) = extents.front_mut() {
            if !self.read(&mut state, extent, AHEAD, *until) {
                break;
            }
            extents.pop_front();
        }
        state.queue.start();
    }

    /// Begins to read the missing parts of these extents, as far as there is room. They are needed now.
    pub(super) fn ask_now<'a>(&self, extents: impl Iterator<Item = &'a Extent>) {
        let Some(mut state) = self.state() else { return };
        state.settle_ended();
        for extent in extents {
            if !state.has(extent) && !self.read(&mut state, &mut extent.clone(), NOW, u64::MAX) {
                break;
            }
        }
        state.queue.start();
    }

    /// Begins to read the parts of an extent that no request has. Whether there was room for all of them; what was begun is
    /// cut off the extent.
    fn read(&self, state: &mut State, extent: &mut Extent, lane: usize, until: u64) -> bool {
        let direct = &self.files[extent.file];
        let (Some(kept), block) = (&direct.file, direct.block()) else { return true };
        let file = extent.file;
        let mut at = extent.bytes.start;
        while at < extent.bytes.end {
            let wanted = |range: &Range<u64>| {
                range.end.min(extent.own_end).saturating_sub(range.start.max(extent.bytes.start))
            };
            let before = state.places.last(file, at).and_then(|tag| request(&mut state.lanes, tag));
            let ended = before.as_ref().map_or(0, |request| request.bytes.end);
            if let Some(request) = before.filter(|_| ended > at) {
                let end = request.bytes.end.min(extent.bytes.end);
                if lane == AHEAD {
                    request.left += wanted(&(at..end));
                    request.until = request.until.max(until);
                }
                at = end;
                extent.bytes.start = at;
                continue;
            }
            // Request whole blocks, from the end of the request before to the start of the request behind.
            let start = ended.max(at / block * block);
            let end = extent.bytes.end.next_multiple_of(block);
            let end = state.places.next(file, at).map_or(end, |next| end.min(next));
            let parts = (end - start).div_ceil(self.request + 2 * block).max(1);
            let end = end.min(start + (end - start).div_ceil(parts).next_multiple_of(block));
            let left = wanted(&(at..end));
            if !state.begin(lane, (kept, block), file, start..end, left, until) {
                return false;
            }
            at = end.min(extent.bytes.end);
            extent.bytes.start = at;
        }
        true
    }

    /// Takes as many of `extents` as have been asked for, up to a moderate number of bytes, and waits for them. Returns how
    /// many it has taken, and whether a request for the next one has failed.
    ///
    /// The bytes are copied by the caller, while others may take theirs.
    pub(super) fn take<'a>(
        &self,
        extents: impl Iterator<Item = &'a Extent>,
        copies: &mut Vec<Copy>,
    ) -> (usize, bool) {
        copies.clear();
        let Some(mut state) = self.state() else { return (0, false) };
        state.settle_ended();
        let (mut taken, mut bytes, mut failed) = (0, 0, false);
        for extent in extents {
            let before = copies.len();
            match state.take(extent, &self.files[extent.file], copies) {
                Taken::Whole => taken += 1,
                end => {
                    copies.truncate(before);
                    failed = matches!(end, Taken::Failed);
                    break;
                }
            }
            bytes += extent.len();
            if bytes >= AT_ONCE {
                break;
            }
        }
        state.queue.start();
        (taken, failed)
    }
}

impl Tag {
    /// As the queue carries it.
    const fn number(self) -> u64 {
        self.1 * 2 + self.0 as u64
    }

    const fn of(number: u64) -> Self {
        Self(if number % 2 == 0 { AHEAD } else { NOW }, number / 2)
    }
}

/// Finds a request.
fn request(lanes: &mut [Lane; 2], Tag(lane, number): Tag) -> Option<&mut Request> {
    let lane = &mut lanes[lane];
    let index = number.checked_sub(lane.first)?;
    lane.requests.get_mut(usize::try_from(index).ok()?)
}

impl State {
    /// Begins one request, if there is memory for it.
    fn begin(
        &mut self,
        lane: usize,
        (kept, block): (&Arc<File>, u64),
        file: usize,
        bytes: Range<u64>,
        left: u64,
        until: u64,
    ) -> bool {
        let wanted = bytes.end - bytes.start;
        let Some((into, place)) = self.memory(lane, wanted, block) else { return false };
        let len = usize::try_from(wanted).unwrap_or(usize::MAX);
        let tag = Tag(lane, self.lanes[lane].first + self.lanes[lane].requests.len() as u64);
        self.places.insert(file, bytes.start, tag);
        self.bytes += wanted;
        READ_CALLS.with(|calls| calls.set(calls.get() + 1));
        self.queue.push(Read { file: kept.clone(), offset: bytes.start, into, len, tag: tag.number() });
        let content = Content::Coming;
        self.lanes[lane].requests.push_back(Request { file, bytes, left, until, content, place });
        true
    }

    /// Memory from the oldest requests that are not needed any more.
    fn memory(&mut self, lane: usize, len: u64, block: u64) -> Option<(Buffer, u64)> {
        loop {
            if let Some(memory) = self.lanes[lane].ring.take(len, block) {
                return Some(memory);
            }
            let Lane { ring, requests, first } = &mut self.lanes[lane];
            let request = requests.front_mut()?;
            let done = request.left == 0 || request.until < self.used;
            let idle = match &request.content {
                Content::Coming => false,
                // If only the request has the memory, nobody copies from it.
                Content::There(memory, _) => Arc::strong_count(memory) == 1,
                Content::Failed(_) => true,
            };
            if !(done && idle) {
                return None;
            }
            self.places.remove(request.file, request.bytes.start, Tag(lane, *first));
            let place = request.place;
            if let Some(Request { content: Content::There(memory, _), .. }) = requests.pop_front() {
                self.spare.push(memory);
            }
            *first += 1;
            // SAFETY: nobody uses the memory of this request or of those before it: requests are in the order of their
            // memory, and a buffer in `spare` is replaced before it is used again.
            unsafe { ring.give_back(place) };
        }
    }

    /// The end of the request that has this byte.
    fn end(&mut self, file: usize, at: u64) -> Option<u64> {
        let request = request(&mut self.lanes, self.places.last(file, at)?)?;
        (at < request.bytes.end).then_some(request.bytes.end)
    }

    /// Whether one request or two that follow each other have all of it.
    fn has(&mut self, extent: &Extent) -> bool {
        let Extent { file, ref bytes, .. } = *extent;
        let first = self.end(file, bytes.start);
        first.is_some_and(|first| {
            first >= bytes.end || self.end(file, first).is_some_and(|second| second >= bytes.end)
        })
    }

    /// Takes one extent. The copies of one that cannot be taken whole are the caller's to remove.
    fn take(&mut self, extent: &Extent, direct: &Direct, copies: &mut Vec<Copy>) -> Taken {
        let Extent { file, ref bytes, own_end, to } = *extent;
        let mut at = bytes.start;
        let mut end = Taken::Whole;
        while at < bytes.end {
            let Some(tag) = self.places.last(file, at) else { return Taken::Not };
            let Some(request) = request(&mut self.lanes, tag).filter(|request| at < request.bytes.end) else {
                return Taken::Not;
            };
            let start = request.bytes.start;
            let until = request.bytes.end.min(bytes.end);
            let place = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
            match &request.content {
                Content::Coming => {
                    let Some(done) = self.queue.wait() else { return Taken::Not };
                    self.settle(done);
                    continue;
                }
                Content::There(memory, found) => {
                    let part = place(at - start)..place(until - start);
                    if part.end <= *found {
                        copies.push(Copy {
                            from: memory.clone(),
                            bytes: part,
                            to: to + place(at - bytes.start),
                        });
                    } else {
                        end = Taken::Not;
                    }
                }
                Content::Failed(error) => {
                    // Remove the failed request: a later call for these bytes makes a new one.
                    let too_small = direct.has_grown(error);
                    request.left = 0;
                    self.places.remove(file, start, tag);
                    return if too_small { Taken::Not } else { Taken::Failed };
                }
            }
            request.left = request.left.saturating_sub(own_end.clamp(at, until) - at);
            if request.left == 0 {
                // All wanted bytes are taken. Remove the request: a later call reads the file anew.
                self.places.remove(file, start, tag);
            }
            at = until;
        }
        end
    }

    /// Notes what has ended, without waiting.
    fn settle_ended(&mut self) {
        while let Some(done) = self.queue.poll() {
            self.settle(done);
        }
    }

    fn settle(&mut self, done: Done) {
        let Done { tag, into, read } = done;
        let Some(request) = request(&mut self.lanes, Tag::of(tag)) else { return };
        request.content = match read {
            Ok(found) => {
                let mut memory = self.spare.pop();
                match memory.as_mut().and_then(Arc::get_mut) {
                    Some(spare) => *spare = into,
                    None => memory = Some(Arc::new(into)),
                }
                memory.map_or(Content::Coming, |memory| Content::There(memory, found))
            }
            Err(error) => Content::Failed(error),
        };
    }
}
