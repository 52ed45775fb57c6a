//! Reads bytes with direct I/O, most of them ahead of their use: many requests in flight, into memory that is used
//! again and again.
//!
//! The memory has two lanes. One is for prefetched bytes. The other is for bytes that are needed now but were not
//! prefetched; its memory is soon free again. Each lane is a [`Ring`]: requests get memory in the order of use, and
//! give it back, if a later one needs it, when all of their bytes have been taken. If some bytes are never taken, their
//! request gives its memory back when the lane's position has passed it.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use super::direct::Direct;
use super::queue::{Done, Queue, Read};
use super::ring::{Ring, SECTOR};
use crate::Buffer;
use crate::file::READ_CALLS;
use crate::ranges::{Extent, Shard};

/// The most bytes of one request. A few requests of this size in flight suffice for the full speed of a disk.
const REQUEST: u64 = 2 << 20;

/// The reader gives up a request of the lane [`NOW`] after this many later calls of [`Stream::ask_now`]: the read that
/// made it may have failed. A read that is only slow makes it again.
const ASKS: u64 = 100;

/// Bytes that are copied between two checks for finished requests.
const AT_ONCE: u64 = 256 << 10;

/// The direct reads of one reader.
pub(super) struct Stream {
    /// The process that created the stream. A forked child has neither its threads nor its requests.
    process: u32,
    pub(super) files: Vec<Direct>,
    /// Bytes of memory in each lane.
    pub(super) room: [u64; 2],
    /// Bytes of the longest request, without a block more at each end.
    request: u64,
    /// Bytes that were requested since the stream was created. Outside of `state`, which is locked while a read waits for
    /// the disk. Relaxed: it orders nothing.
    pub(super) bytes: AtomicU64,
    /// What changes during reads.
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    pub(super) queue: Queue,
    lanes: [Lane; 2],
    places: Index,
    /// The `Arc`s of requests that were removed. Later requests put their memory into them, to allocate less.
    spare: Vec<Arc<Buffer>>,
}

/// A lane of memory, and its requests, the oldest first.
struct Lane {
    ring: Ring,
    requests: VecDeque<Request>,
    /// The number of the oldest request.
    first: u64,
    /// The position. AHEAD: the bytes of the batches or groups that the reader has read since `Reader::begin`, up to the
    /// first that it is still reading. NOW: the number of calls of [`Stream::ask_now`].
    used: u64,
}

/// Identifies a request: its number in its lane, times two, plus the lane.
type Tag = u64;

/// The lane of prefetched bytes.
pub(super) const AHEAD: usize = 0;
/// The lane of bytes that are needed now.
pub(super) const NOW: usize = 1;

/// A read of some bytes of a file, from its start until its memory is given back.
struct Request {
    file: usize,
    /// From the first byte that it was made for up to the end of a block.
    bytes: Range<u64>,
    /// The offset of its memory in the file: the start of a block.
    from: u64,
    /// Wanted bytes that were not taken yet.
    left: u64,
    /// The end of the bytes that count in `left`. A later request may have those behind it, and then they count there.
    own_end: u64,
    /// The position in its lane after which the request is not needed any more.
    until: u64,
    /// Once the read has ended: the memory, and the number of bytes that were read. They are fewer than requested at
    /// the end of the file, for example.
    result: Option<io::Result<(Arc<Buffer>, usize)>>,
    /// The place in the ring up to which its memory reaches.
    place: u64,
}

/// Finds requests by file and offset. A request may have bytes of the next one too. Lists are used again.
#[derive(Debug, Default)]
struct Index {
    /// For each [`BUCKET`] of a file, the requests that start in it, sorted by offset.
    buckets: HashMap<(usize, u64), Vec<Place>>,
    spare: Vec<Vec<Place>>,
}

/// The offset of a request, and its tag.
type Place = (u64, Tag);

/// Bytes in a bucket. The longest request is shorter, so the request that has a byte starts in the byte's bucket or in
/// the one before.
const BUCKET: u64 = 2 * REQUEST;

impl Index {
    fn insert(&mut self, file: usize, start: u64, tag: Tag) {
        let list = self.buckets.entry((file, start / BUCKET));
        let list = list.or_insert_with(|| self.spare.pop().unwrap_or_default());
        list.insert(list.partition_point(|(other, _)| *other <= start), (start, tag));
    }

    fn remove(&mut self, file: usize, start: u64, tag: Tag) {
        let bucket = (file, start / BUCKET);
        let Some(list) = self.buckets.get_mut(&bucket) else { return };
        list.retain(|place| *place != (start, tag));
        if list.is_empty() {
            self.spare.extend(self.buckets.remove(&bucket));
        }
    }

    /// Returns the last request that starts at `at` or before it, and its tag, if it has the byte at `at`.
    fn find<'l>(&self, lanes: &'l mut [Lane; 2], file: usize, at: u64) -> Option<(Tag, &'l mut Request)> {
        let bucket = at / BUCKET;
        let mut buckets = (bucket.saturating_sub(1)..=bucket).rev();
        let tag = buckets.find_map(|bucket| self.around(file, bucket, at).0.last().map(|(_, tag)| *tag))?;
        let request = request(lanes, tag)?;
        (at < request.bytes.end).then_some((tag, request))
    }

    /// Returns the offset of the first request that starts after `at`, if one starts soon after it.
    fn next(&self, file: usize, at: u64) -> Option<u64> {
        let bucket = at / BUCKET;
        let mut buckets = bucket..=bucket + 1;
        buckets.find_map(|bucket| self.around(file, bucket, at).1.first().map(|(start, _)| *start))
    }

    /// Returns the requests of a bucket that start at `at` or before it, and those that start after it.
    fn around(&self, file: usize, bucket: u64, at: u64) -> (&[Place], &[Place]) {
        let list = self.buckets.get(&(file, bucket)).map_or(&[][..], Vec::as_slice);
        list.split_at(list.partition_point(|(start, _)| *start <= at))
    }
}

/// Bytes of a request, and their offset in the slot.
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

/// The result of taking an extent.
enum Taken {
    /// All bytes of the extent are in the copies.
    Whole,
    /// Some bytes were not requested, the file ended before them, or their request must be repeated with a larger
    /// block.
    Not,
    /// A request with bytes of the extent failed. It may also have bytes of other extents.
    Failed,
}

impl Stream {
    /// Creates a stream that reads `files`. `room` is the size of each lane in bytes.
    pub(super) fn new(files: Vec<Direct>, room: [u64; 2]) -> Self {
        let block = files.iter().map(Direct::block).max().unwrap_or(SECTOR);
        // Two requests, each with one block more at both ends, fit a lane: one is read while the other is copied.
        let request = REQUEST.min((room[NOW].min(room[AHEAD]) / 2).saturating_sub(2 * block)) / block * block;
        let lane = |room| Lane { ring: Ring::new(room), requests: VecDeque::new(), first: 0, used: 0 };
        let state = State {
            queue: Queue::default(),
            lanes: room.map(lane),
            places: Index::default(),
            spare: Vec::new(),
        };
        let (process, bytes) = (std::process::id(), AtomicU64::default());
        Self { process, files, room, request, bytes, state: Mutex::new(state) }
    }

    /// Whether this file can be read through the stream. It cannot if a request could block in its file system, if each
    /// use opens the file again, because the requests could keep too many files open, or if the lanes are too small.
    pub(super) fn takes(&self, shards: &[Shard], file: usize) -> bool {
        !shards[file].file.hints_wait && self.files[file].file.is_some() && self.request > 0
    }

    /// Locks the state. Returns `None` in a forked child and after a panic: bytes are then read without the stream.
    fn state(&self) -> Option<MutexGuard<'_, State>> {
        if self.process != std::process::id() {
            return None;
        }
        self.state.lock().ok()
    }

    /// Forgets all requests, because the order of the reads has changed.
    pub(super) fn forget(&self) {
        let Some(mut state) = self.state() else { return };
        for (tag, into) in state.queue.forget_queued() {
            state.settle(Done { tag, into, read: Err(io::ErrorKind::Interrupted.into()) });
        }
        state.places.buckets.clear();
        for request in state.lanes.iter_mut().flat_map(|lane| &mut lane.requests) {
            request.left = 0;
        }
        state.lanes[AHEAD].used = 0;
    }

    /// Starts to read `extents` in their order, as many as there is room for, and removes these from the list. Each
    /// extent has the position after which it is not needed any more, and how many bytes later its requests are given
    /// up. What ends before position `used` was read, or is being read: the read itself requests what is missing. All
    /// units before position `done` were read.
    pub(super) fn ask(&self, extents: &mut VecDeque<(Extent, [u64; 2])>, used: u64, done: u64) {
        let Some(mut state) = self.state() else { return extents.clear() };
        state.settle_ended();
        state.lanes[AHEAD].used = done;
        while let Some((extent, [needed, late])) = extents.front_mut() {
            // Leave out what is left of a unit that is longer than the lane, if it was read.
            if *needed >= used && !self.read(&mut state, extent, AHEAD, needed.saturating_add(*late)) {
                break;
            }
            extents.pop_front();
        }
        state.queue.start();
    }

    /// Starts to read the parts of `extents` that were not requested yet, as far as there is room. They are needed now.
    pub(super) fn ask_now<'a>(&self, extents: impl Iterator<Item = &'a Extent>) {
        let Some(mut state) = self.state() else { return };
        state.settle_ended();
        state.lanes[NOW].used += 1;
        let until = state.lanes[NOW].used + ASKS;
        for extent in extents {
            if !state.has(extent) && !self.read(&mut state, &mut extent.clone(), NOW, until) {
                break;
            }
        }
        state.queue.start();
    }

    /// Starts to read the parts of an extent that no request has, and cuts them off `extent`. Returns `false` if there
    /// was no room for all of them.
    fn read(&self, state: &mut State, extent: &mut Extent, lane: usize, until: u64) -> bool {
        let direct = &self.files[extent.file];
        let (Some(kept), block) = (&direct.file, direct.block()) else { return true };
        let file = extent.file;
        while !extent.bytes.is_empty() {
            let at = extent.bytes.start;
            let wanted = |end: u64| end.min(extent.own_end).saturating_sub(at);
            // Bytes from the start of a later request on are its own.
            let next = state.places.next(file, at).filter(|&next| next < extent.own_end);
            let end = next.unwrap_or(u64::MAX).min(extent.bytes.end);
            let newest = state.lanes[AHEAD].requests.back().map(|newest| (newest.file, newest.bytes.start));
            let before = state.places.find(&mut state.lanes, file, at);
            // Prefetched bytes are left to an earlier request only if it has all of them, or was made for them or just
            // before. Any other would keep its memory, and that of all later ones, until these bytes are taken: for a
            // block that two chunks share, up to a window longer. So such a block is read twice.
            let has = |(_, request): &(Tag, &mut Request)| {
                let Range { start, end } = request.bytes;
                let near = newest == Some((file, start)) || start == at && request.left > 0;
                lane == NOW || near || end >= extent.bytes.end
            };
            if let Some((tag, request)) = before.filter(has) {
                let end = end.min(request.bytes.end);
                // Not for a request of the lane NOW: the read that made it takes its bytes, and perhaps no other read
                // does.
                if lane == AHEAD && tag % 2 == AHEAD as u64 {
                    request.left += wanted(end);
                    request.own_end = request.own_end.max(at + wanted(end));
                    request.until = request.until.max(until);
                }
                extent.bytes.start = end;
                continue;
            }
            // Request whole blocks.
            let from = at / block * block;
            let blocks = end.next_multiple_of(block);
            let parts = (blocks - from).div_ceil(self.request + 2 * block).max(1);
            let blocks = blocks.min(from + (blocks - from).div_ceil(parts).next_multiple_of(block));
            let end = end.min(blocks);
            let (left, own_end, result) = (wanted(end), at + wanted(end), None);
            let Some((into, place)) = state.memory(lane, blocks - from, block) else { return false };
            self.bytes.fetch_add(blocks - from, Relaxed);
            let request = Request { file, bytes: at..blocks, from, left, own_end, until, result, place };
            state.begin(lane, kept.clone(), request, into);
            extent.bytes.start = end;
        }
        true
    }

    /// Takes the first of `extents`, as far as they were requested, and waits for their bytes. It stops after
    /// [`AT_ONCE`] bytes. Returns how many extents it has taken, and whether a request for the next one has failed.
    ///
    /// The caller copies the bytes after this call, when the state is not locked any more: other threads can take
    /// extents at the same time.
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

const fn tag(lane: usize, number: u64) -> Tag {
    2 * number + lane as u64
}

/// Finds a request.
fn request(lanes: &mut [Lane; 2], tag: Tag) -> Option<&mut Request> {
    let lane = &mut lanes[if tag % 2 == 0 { AHEAD } else { NOW }];
    let index = (tag / 2).checked_sub(lane.first)?;
    lane.requests.get_mut(usize::try_from(index).ok()?)
}

impl State {
    /// Starts one request, which reads `file` into this memory.
    fn begin(&mut self, lane: usize, file: Arc<File>, request: Request, into: Buffer) {
        let len = usize::try_from(request.bytes.end - request.from).unwrap_or(usize::MAX);
        let tag = tag(lane, self.lanes[lane].first + self.lanes[lane].requests.len() as u64);
        self.places.insert(request.file, request.bytes.start, tag);
        READ_CALLS.with(|calls| calls.set(calls.get() + 1));
        self.queue.push(Read { file, offset: request.from, into, len, tag });
        self.lanes[lane].requests.push_back(request);
    }

    /// Returns memory of a lane for a request, and its place in the ring. If the ring is full, first removes the oldest
    /// requests, as long as they are not needed any more.
    fn memory(&mut self, lane: usize, len: u64, block: u64) -> Option<(Buffer, u64)> {
        loop {
            if let Some(memory) = self.lanes[lane].ring.take(len, block) {
                return Some(memory);
            }
            let Lane { ring, requests, first, used } = &mut self.lanes[lane];
            let request = requests.front_mut()?;
            let done = request.left == 0 || request.until < *used;
            // If only the request has the memory, nobody copies from it.
            let alone = |(memory, _): &(Arc<Buffer>, usize)| Arc::strong_count(memory) == 1;
            let idle = request.result.as_ref().is_some_and(|read| read.as_ref().ok().is_none_or(alone));
            if !(done && idle) {
                return None;
            }
            self.places.remove(request.file, request.bytes.start, tag(lane, *first));
            let place = request.place;
            if let Some(Request { result: Some(Ok((memory, _))), .. }) = requests.pop_front() {
                self.spare.push(memory);
            }
            *first += 1;
            // SAFETY: nobody uses the memory of this request or of those before it: requests are in the order of their
            // memory, and a buffer in `spare` is replaced before it is used again.
            unsafe { ring.give_back(place) };
        }
    }

    /// Whether requests have all bytes of `extent`.
    fn has(&mut self, extent: &Extent) -> bool {
        let mut at = extent.bytes.start;
        while at < extent.bytes.end {
            let Some((_, request)) = self.places.find(&mut self.lanes, extent.file, at) else { return false };
            at = request.bytes.end;
        }
        true
    }

    /// Adds the bytes of one extent to `copies`, and waits for them. If the result is not [`Taken::Whole`], the caller
    /// must remove the copies that were added.
    fn take(&mut self, extent: &Extent, direct: &Direct, copies: &mut Vec<Copy>) -> Taken {
        let Extent { file, ref bytes, own_end, to } = *extent;
        let mut at = bytes.start;
        let mut end = Taken::Whole;
        while at < bytes.end {
            let Some((tag, request)) = self.places.find(&mut self.lanes, file, at) else { return Taken::Not };
            let (start, from) = (request.bytes.start, request.from);
            let until = request.bytes.end.min(bytes.end);
            let later = (until > request.own_end).then(|| self.places.next(file, at)).flatten();
            let until = later.unwrap_or(until).min(until);
            let place = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
            match &request.result {
                None => {
                    let Some(done) = self.queue.wait() else { return Taken::Not };
                    self.settle(done);
                    continue;
                }
                Some(Ok((memory, found))) => {
                    let part = place(at - from)..place(until - from);
                    if part.end <= *found {
                        let to = to + place(at - bytes.start);
                        copies.push(Copy { from: memory.clone(), bytes: part, to });
                    } else {
                        end = Taken::Not;
                    }
                }
                Some(Err(error)) => {
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

    /// Stores the results of the requests that have ended, without waiting.
    fn settle_ended(&mut self) {
        while let Some(done) = self.queue.poll() {
            self.settle(done);
        }
    }

    fn settle(&mut self, done: Done) {
        let Done { tag, into, read } = done;
        let Some(request) = request(&mut self.lanes, tag) else { return };
        request.result = match read {
            Ok(found) => {
                let mut memory = self.spare.pop();
                match memory.as_mut().and_then(Arc::get_mut) {
                    Some(spare) => *spare = into,
                    None => memory = Some(Arc::new(into)),
                }
                memory.map(|memory| Ok((memory, found)))
            }
            Err(error) => Some(Err(error)),
        };
    }
}
