//! Bytes read past the page cache, ahead of use: many requests in flight, into memory that is used again in turn.
//!
//! There are two lanes of memory. One is for reads ahead. The other is for bytes that are needed now and were not
//! requested; it is always free soon. Each is a [`Ring`]: pieces get memory in the order of use, and give it back when
//! all of their bytes have been taken. If a part of a piece is never taken, the piece gives its memory back when the
//! reading is past it.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use super::direct::Direct;
use super::queue::{Done, Queue, Read};
use super::ring::{Ring, UNIT};
use crate::Buffer;
use crate::file::READ_CALLS;
use crate::ranges::Shard;
use crate::ranges::Stretch;

/// The most bytes of one request. Disks are at their full speed with a few of these.
const PIECE: u64 = 2 << 20;

/// Bytes that are copied between two looks at what the disk has finished.
const AT_ONCE: u64 = 256 << 10;

/// A stretch of a file, and where its bytes go in the slot.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) at: Stretch,
    pub(crate) to: usize,
}

impl Wanted {
    pub(super) const fn len(&self) -> u64 {
        self.at.bytes.end - self.at.bytes.start
    }
}

/// What is read past the page cache for one reader.
#[derive(Debug)]
pub(super) struct Stream {
    /// The process that made it. A fork's child has neither its threads nor its requests.
    process: u32,
    files: Vec<Direct>,
    /// Bytes of each lane, and of the longest request.
    room: [u64; 2],
    piece: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    queue: Queue,
    lanes: [Lane; 2],
    /// Where pieces begin. No two of them overlap.
    places: BTreeMap<(usize, u64), Tag>,
    /// How far the reading has come, in bytes of units.
    used: u64,
    /// Bytes of all requests.
    bytes: u64,
}

/// The pieces of a lane, in request order.
#[derive(Debug)]
struct Lane {
    ring: Ring,
    pieces: VecDeque<Piece>,
    /// The number of the first of them.
    first: u64,
}

/// A piece: its lane, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tag(usize, u64);

const AHEAD: usize = 0;
const NOW: usize = 1;

#[derive(Debug)]
struct Piece {
    shard: usize,
    bytes: Range<u64>,
    /// Bytes that were asked for and not taken yet.
    left: u64,
    /// When the reading is past it.
    until: u64,
    content: Content,
    /// What its memory is given back with.
    place: u64,
}

#[derive(Debug)]
enum Content {
    Coming,
    /// The number of bytes: fewer than requested at the end of the file.
    There(Arc<Buffer>, usize),
    Failed(io::Error),
}

/// Bytes of a piece, and where they belong.
#[derive(Debug)]
pub(super) struct Copy {
    from: Arc<Buffer>,
    start: usize,
    /// The stretch, as counted by the caller.
    pub(super) stretch: usize,
    /// Where in it.
    pub(super) place: Range<usize>,
}

impl Copy {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.from[self.start..self.start + self.place.len()]
    }
}

/// What came of taking a stretch.
#[derive(Debug)]
pub(super) enum Taken {
    /// All of it is in the copies.
    Whole,
    /// Something was not asked for, or not found where it was expected: read it by the usual way.
    Not,
    Failed {
        offset: u64,
        error: io::Error,
    },
}

impl Stream {
    /// Reads `files`. The memory sizes are for reads ahead and for bytes needed now.
    pub(super) fn new(files: Vec<Direct>, room: [u64; 2]) -> Self {
        let block = files.iter().map(Direct::block).max().unwrap_or(UNIT);
        // With the blocks at its ends two pieces fit a lane, so one is read while the other is copied.
        let piece = PIECE.min((room[NOW].min(room[AHEAD]) / 2).saturating_sub(2 * block)) / block * block;
        let lane = |room| Lane { ring: Ring::new(room), pieces: VecDeque::new(), first: 0 };
        let state =
            State { queue: Queue::new(), lanes: room.map(lane), places: BTreeMap::new(), used: 0, bytes: 0 };
        Self { process: std::process::id(), files, room, piece, state: Mutex::new(state) }
    }

    pub(super) fn file(&self, shard: usize) -> &Direct {
        &self.files[shard]
    }

    #[cfg(test)]
    pub(super) fn file_mut(&mut self, shard: usize) -> &mut Direct {
        &mut self.files[shard]
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

    /// Whether pieces of this file can be asked for: not where a request could wait for its file system, nor of a file that is
    /// opened for each use, or too many would be open at a time.
    pub(super) fn takes(&self, shards: &[Shard], shard: usize) -> bool {
        !shards[shard].hints_wait && self.files[shard].kept().is_some() && self.piece > 0
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
            if let Some(piece) = piece(&mut state.lanes, Tag::of(tag)) {
                piece.content = Content::Failed(io::ErrorKind::Interrupted.into());
            }
        }
        state.places.clear();
        for piece in state.lanes.iter_mut().flat_map(|lane| &mut lane.pieces) {
            piece.left = 0;
        }
        state.used = 0;
    }

    /// Begins to read as many of these stretches as there is room for, in their order, and removes them. They are no
    /// longer needed when the reading is past `until`; it is now at `used`.
    pub(super) fn ask(&self, stretches: &mut VecDeque<(Stretch, u64)>, used: u64) {
        let Some(mut state) = self.state() else { return stretches.clear() };
        state.settle_ended();
        state.used = used;
        while let Some((stretch, until)) = stretches.front_mut() {
            if !self.read(&mut state, stretch, AHEAD, *until) {
                break;
            }
            stretches.pop_front();
        }
        state.queue.start();
    }

    /// Begins to read the missing parts of these stretches, as far as there is room. They are needed now.
    pub(super) fn ask_now<'a>(&self, stretches: impl Iterator<Item = &'a Stretch>) {
        let Some(mut state) = self.state() else { return };
        state.settle_ended();
        for stretch in stretches {
            if !state.has(stretch) && !self.read(&mut state, &mut stretch.clone(), NOW, u64::MAX) {
                break;
            }
        }
        state.queue.start();
    }

    /// Begins to read the parts of a stretch that no piece has. Whether there was room for all of them; what was begun is cut
    /// off the stretch.
    fn read(&self, state: &mut State, stretch: &mut Stretch, lane: usize, until: u64) -> bool {
        let direct = &self.files[stretch.shard];
        let (Some(file), block) = (direct.kept(), direct.block()) else { return true };
        let shard = stretch.shard;
        let mut at = stretch.bytes.start;
        while at < stretch.bytes.end {
            let wanted = |range: &Range<u64>| {
                range.end.min(stretch.own_end).saturating_sub(range.start.max(stretch.bytes.start))
            };
            if let Some(tag) = state.at(shard, at) {
                let Some(piece) = piece(&mut state.lanes, tag) else { return true };
                let end = piece.bytes.end.min(stretch.bytes.end);
                if lane == AHEAD {
                    piece.left += wanted(&(at..end));
                    piece.until = piece.until.max(until);
                }
                at = end;
                stretch.bytes.start = at;
                continue;
            }
            // Whole blocks, from the piece before to the piece behind.
            let before = state.places.range((shard, 0)..(shard, at)).next_back().map(|(_, tag)| *tag);
            let before =
                before.and_then(|tag| piece(&mut state.lanes, tag)).map_or(0, |piece| piece.bytes.end);
            let start = before.max(at / block * block);
            let next = state.places.range((shard, at)..(shard, u64::MAX)).next();
            let end = stretch.bytes.end.next_multiple_of(block);
            let end = next.map_or(end, |(&(_, next), _)| end.min(next));
            let parts = (end - start).div_ceil(self.piece + 2 * block).max(1);
            let end = end.min(start + (end - start).div_ceil(parts).next_multiple_of(block));
            let left = wanted(&(at..end));
            if !state.begin(lane, file, shard, start..end, left, until) {
                return false;
            }
            at = end.min(stretch.bytes.end);
            stretch.bytes.start = at;
        }
        true
    }

    /// Takes as many of `stretches` as have been asked for, up to a moderate number of bytes, and waits for them.
    ///
    /// Each gets its copies, and how it ended. The bytes are copied by the caller, while others may take theirs.
    pub(super) fn take<'a>(
        &self,
        stretches: impl Iterator<Item = &'a Stretch>,
        copies: &mut Vec<Copy>,
        ends: &mut Vec<Taken>,
    ) {
        let Some(mut state) = self.state() else { return };
        state.settle_ended();
        let mut bytes_taken = 0;
        for stretch in stretches {
            bytes_taken += stretch.bytes.end - stretch.bytes.start;
            let before = copies.len();
            let end = state.take(stretch, &self.files[stretch.shard], ends.len(), copies);
            if !matches!(end, Taken::Whole) {
                copies.truncate(before);
            }
            // The caller requests missing stretches again.
            let missing = matches!(end, Taken::Not);
            if !missing || ends.is_empty() {
                ends.push(end);
            }
            if missing || bytes_taken >= AT_ONCE {
                break;
            }
        }
        state.queue.start();
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

/// Finds a piece.
fn piece(lanes: &mut [Lane; 2], Tag(lane, number): Tag) -> Option<&mut Piece> {
    let lane = &mut lanes[lane];
    let index = number.checked_sub(lane.first)?;
    lane.pieces.get_mut(usize::try_from(index).ok()?)
}

impl State {
    /// Begins one request, if there is memory for it.
    fn begin(
        &mut self,
        lane: usize,
        file: &Arc<File>,
        shard: usize,
        bytes: Range<u64>,
        left: u64,
        until: u64,
    ) -> bool {
        let wanted = bytes.end - bytes.start;
        let Some((into, place)) = self.memory(lane, wanted) else { return false };
        let len = usize::try_from(wanted).unwrap_or(usize::MAX);
        let tag = Tag(lane, self.lanes[lane].first + self.lanes[lane].pieces.len() as u64);
        self.places.insert((shard, bytes.start), tag);
        self.bytes += wanted;
        READ_CALLS.with(|calls| calls.set(calls.get() + 1));
        self.queue.push(Read { file: file.clone(), offset: bytes.start, into, len, tag: tag.number() });
        self.lanes[lane].pieces.push_back(Piece {
            shard,
            bytes,
            left,
            until,
            content: Content::Coming,
            place,
        });
        true
    }

    /// Memory from the oldest pieces that are not needed any more.
    fn memory(&mut self, lane: usize, len: u64) -> Option<(Buffer, u64)> {
        loop {
            if let Some(memory) = self.lanes[lane].ring.take(len) {
                return Some(memory);
            }
            let Lane { ring, pieces, first } = &mut self.lanes[lane];
            let piece = pieces.front()?;
            let done = piece.left == 0 || piece.until < self.used;
            let idle = match &piece.content {
                Content::Coming => false,
                // Nobody copies from it.
                Content::There(memory, _) => Arc::strong_count(memory) == 1,
                Content::Failed(_) => true,
            };
            if !(done && idle) {
                return None;
            }
            let (at, place) = ((piece.shard, piece.bytes.start), piece.place);
            if self.places.get(&at) == Some(&Tag(lane, *first)) {
                self.places.remove(&at);
            }
            pieces.pop_front();
            *first += 1;
            // SAFETY: all pieces up to this one are gone: they are in the order of their memory.
            unsafe { ring.give_back(place) };
        }
    }

    /// The piece that has this byte.
    fn at(&mut self, shard: usize, offset: u64) -> Option<Tag> {
        let (&(found, _), &tag) = self.places.range(..=(shard, offset)).next_back()?;
        (found == shard && offset < piece(&mut self.lanes, tag)?.bytes.end).then_some(tag)
    }

    /// Whether one piece or two that follow each other have all of it.
    fn has(&mut self, stretch: &Stretch) -> bool {
        let Stretch { shard, ref bytes, .. } = *stretch;
        let mut end = |at| {
            self.at(shard, at).and_then(|tag| Some(piece(&mut self.lanes, tag)?.bytes.end)).unwrap_or(at)
        };
        let first = end(bytes.start);
        first >= bytes.end || (first > bytes.start && end(first) >= bytes.end)
    }

    /// Takes one stretch. The copies of one that cannot be taken whole are the caller's to remove.
    fn take(&mut self, stretch: &Stretch, direct: &Direct, number: usize, copies: &mut Vec<Copy>) -> Taken {
        let Stretch { shard, ref bytes, own_end } = *stretch;
        let mut at = bytes.start;
        let mut end = Taken::Whole;
        while at < bytes.end {
            let Some(tag) = self.at(shard, at) else { return Taken::Not };
            let Some(piece) = piece(&mut self.lanes, tag) else { return Taken::Not };
            if matches!(piece.content, Content::Coming) {
                match self.queue.wait() {
                    Some(done) => self.settle(done),
                    None => return Taken::Not,
                }
                continue;
            }
            let until = piece.bytes.end.min(bytes.end);
            let place = |offset: u64| usize::try_from(offset - bytes.start).unwrap_or(usize::MAX);
            match &piece.content {
                // Waited for above.
                Content::Coming => return Taken::Not,
                Content::There(memory, found) => {
                    let start = usize::try_from(at - piece.bytes.start).unwrap_or(usize::MAX);
                    let place = place(at)..place(until);
                    if start.saturating_add(place.len()) <= *found {
                        copies.push(Copy { from: memory.clone(), start, stretch: number, place });
                    } else {
                        end = Taken::Not;
                    }
                }
                Content::Failed(error) => {
                    let too_small = direct.has_grown(error);
                    let error = io::Error::new(error.kind(), error.to_string());
                    let offset = piece.bytes.start;
                    piece.left = 0;
                    self.places.remove(&(shard, offset));
                    if too_small {
                        return Taken::Not;
                    }
                    return Taken::Failed { offset: offset.max(bytes.start), error };
                }
            }
            piece.left = piece.left.saturating_sub(own_end.clamp(at, until) - at);
            if piece.left == 0 {
                // Whoever asks again gets the file as it is then.
                let start = piece.bytes.start;
                self.places.remove(&(shard, start));
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
        let Some(piece) = piece(&mut self.lanes, Tag::of(tag)) else { return };
        piece.content = match read {
            Ok(found) => Content::There(Arc::new(into), found),
            Err(error) => Content::Failed(error),
        };
    }
}
