//! Direct reads ahead of use: pieces of files, in memory of our own, before a batch asks for them.
//!
//! [`Records::will_need`] asks for the bytes of later batches and returns at once; [`Records::read`] asks for those of its
//! own that are missing, waits for each piece, and copies records out of it. A [`Queue`] keeps many reads under way. A
//! piece is given up when as many bytes were taken from it as were asked for.
//!
//! [`Records::will_need`]: crate::Records::will_need
//! [`Records::read`]: crate::Records::read

mod pool;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use self::pool::Pool;
use crate::Buffer;
use crate::file::READ_CALLS;
use crate::queue::{Done, Queue, Read};
use crate::shard::Shard;

/// The most bytes of a piece, but for the blocks at its ends. Disks are at their full speed with a few of these.
pub(crate) const PIECE: u64 = 1 << 20;

/// Room for the blocks at the ends of a piece.
pub(crate) const SPILL: u64 = pool::SPILL as u64;

/// Stretches of so many bytes are read straight into the caller's memory: the disk is busy with one for long enough.
pub(crate) const LARGE: u64 = 4 << 20;

/// Bytes that may be ahead of the reading, unless an order needs more: what the disk has under way, twice.
const AHEAD: u64 = 16 << 20;

/// What has been asked for and not been taken.
#[derive(Debug)]
pub(crate) struct Ahead {
    /// The process that made it. A fork's child has neither its threads nor its requests.
    process: u32,
    /// Whether large stretches may be read straight to their place.
    pub(crate) straight: bool,
    /// Bytes of memory beyond which an order comes through the page cache.
    pub(crate) most: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    queue: Queue,
    pool: Pool,
    pieces: BTreeMap<Key, Piece>,
    /// Where each read that has not ended belongs.
    tags: HashMap<u64, Key>,
    /// Pieces in the order in which they were asked for; some of them are gone.
    order: VecDeque<(u64, Key)>,
    /// Bytes asked for so far.
    asked: u64,
    /// Bytes asked for ahead of their use so far, with those that there was no room for.
    hinted: u64,
    /// How far of those the reading has come: it takes what is ahead, and asks for what there was no room for.
    reached: u64,
    /// Bytes of memory of all pieces.
    held: u64,
    /// Read, given up, and perhaps still being copied from.
    spent: Vec<Arc<Buffer>>,
    next_tag: u64,
    /// The windows that are being read, and [`State::asked`] up to which other batches leave them their room.
    window: (u64, u64),
}

/// The first record of a file, which no other file has, and the offset of the piece.
type Key = (u64, u64);

#[derive(Debug)]
struct Piece {
    /// Where it ends in the file.
    end: u64,
    /// [`State::asked`] when it was asked for, which no other piece has.
    at: u64,
    /// [`State::reached`] when it is needed.
    due: u64,
    /// Bytes that were asked for and not taken yet.
    wanted: u64,
    /// Of its memory.
    held: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Coming,
    /// So many bytes: fewer than wanted at the end of the file.
    There(Arc<Buffer>, usize),
    Failed(io::Error),
}

/// How many bytes may be held, for windows of so many bytes; 0 for batches that are read in the order in which they are
/// asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    window: u64,
    /// What is asked for is needed now.
    now: bool,
}

impl Room {
    /// For batches that take their records from all of a window, while the next one is read.
    pub(crate) const fn of(window: u64) -> Self {
        Self { window, now: false }
    }

    /// For what is needed now.
    pub(crate) const fn now(self) -> Self {
        Self { now: true, ..self }
    }

    /// Bytes of all pieces.
    const fn most(self) -> u64 {
        let ahead = self.window.saturating_mul(2).saturating_add(self.window / 4).saturating_add(AHEAD);
        if self.now { ahead.saturating_add(AHEAD) } else { ahead }
    }

    /// Bytes of all memory.
    pub(crate) const fn memory(self) -> u64 {
        self.now().most()
    }

    /// What was due so many bytes before what is being read is not needed any more. `None`: it is given up for what is
    /// needed now, the oldest first.
    const fn age(self) -> Option<u64> {
        match self {
            Self { now: true, .. } => None,
            Self { window: 0, .. } => Some(AHEAD),
            Self { window, .. } => Some(window.saturating_add(window / 8)),
        }
    }
}

/// Bytes of one file that hold records.
#[derive(Debug)]
pub(crate) struct Stretch<'a> {
    pub(crate) shard: &'a Shard,
    pub(crate) bytes: Range<u64>,
    /// Where the bytes end that other records do not have too: windows may overlap.
    pub(crate) own_end: u64,
}

/// Bytes of a piece, and where they belong.
#[derive(Debug)]
pub(crate) struct Copy {
    from: Arc<Buffer>,
    start: usize,
    /// The stretch, as counted by the caller.
    pub(crate) stretch: usize,
    /// Where in it.
    pub(crate) place: Range<usize>,
}

impl Copy {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.from[self.start..self.start + self.place.len()]
    }
}

/// What came of taking a stretch.
#[derive(Debug)]
pub(crate) enum Taken {
    /// All of it is among the copies.
    Whole,
    /// Something was not asked for, or not found where it was expected: read it by the usual way.
    Not,
    Failed {
        offset: u64,
        error: io::Error,
    },
}

impl Ahead {
    pub(crate) fn new(straight: bool, most: u64) -> Self {
        let state = State {
            queue: Queue::new(),
            pool: Pool::default(),
            pieces: BTreeMap::new(),
            tags: HashMap::new(),
            order: VecDeque::new(),
            asked: 0,
            hinted: 0,
            reached: 0,
            held: 0,
            spent: Vec::new(),
            next_tag: 0,
            window: (0, 0),
        };
        Self { process: std::process::id(), straight, most, state: Mutex::new(state) }
    }

    /// `None` in a fork's child and after a panic: then everything is read by the usual way.
    fn state(&self) -> Option<MutexGuard<'_, State>> {
        if self.process != std::process::id() {
            return None;
        }
        self.state.lock().ok()
    }

    /// Begins to read these stretches, as far as there is room for them. Returns the bytes and the number of reads.
    pub(crate) fn ask<'a>(&self, stretches: impl Iterator<Item = Stretch<'a>>, room: Room) -> (u64, u64) {
        let mut stretches: Vec<Stretch<'a>> = stretches.collect();
        let Some(mut state) = self.state() else { return (0, 0) };
        state.settle_ended();
        let room = state.shared(room);
        if room.now {
            // Most often all of it was asked for long ago.
            stretches.retain(|stretch| !state.has(stretch));
        }
        stretches.sort_unstable_by_key(|stretch| (stretch.shard.first, stretch.bytes.start));
        let before = (state.asked, state.next_tag);
        let mut fits = true;
        for of_one_file in stretches.chunk_by(|one, other| one.shard.first == other.shard.first) {
            let shard = of_one_file[0].shard;
            let Some(direct) = &shard.direct else { continue };
            let Some(file) = direct.kept() else { continue };
            let block = direct.block();
            let whole = |bytes: &Range<u64>| bytes.start / block * block..bytes.end.next_multiple_of(block);
            let mut rest = of_one_file.iter().map(|stretch| whole(&stretch.bytes)).peekable();
            // Stretches that touch are read together.
            while let Some(mut range) = rest.next() {
                while let Some(next) =
                    rest.next_if(|next| next.start <= range.end && next.end <= range.start + PIECE)
                {
                    range.end = range.end.max(next.end);
                }
                if fits {
                    fits = state.read(shard.first, range, block, file, room);
                } else {
                    state.pass(&range, room);
                }
            }
            for Stretch { bytes, own_end, .. } in of_one_file {
                // What a batch needs now was counted when it was asked for, unless nobody had asked for it.
                let since = if room.now { before.0 } else { 0 };
                state.want(shard.first, &(bytes.start..*own_end), since);
            }
        }
        state.queue.start();
        let asked = (state.asked - before.0, state.next_tag - before.1);
        drop(state);
        READ_CALLS.with(|calls| calls.set(calls.get() + asked.1));
        asked
    }

    /// Gives up what was asked for and has not begun: the order of reading has changed.
    pub(crate) fn forget_queued(&self) {
        let Some(mut state) = self.state() else { return };
        for (tag, memory) in state.queue.forget_queued() {
            state.pool.put(memory);
            if let Some(key) = state.tags.remove(&tag) {
                state.give_up(key);
            }
        }
    }

    /// Takes as many of `stretches` as have been asked for, up to a moderate number of bytes, and waits for them.
    ///
    /// Each gets its copies, and how it ended. The bytes are copied by the caller, while others may take theirs.
    pub(crate) fn take<'a>(
        &self,
        stretches: impl Iterator<Item = Stretch<'a>>,
        copies: &mut Vec<Copy>,
        ends: &mut Vec<Taken>,
    ) {
        let Some(mut state) = self.state() else { return };
        state.settle_ended();
        let mut bytes_taken = 0;
        for stretch in stretches {
            bytes_taken += stretch.bytes.end - stretch.bytes.start;
            let before = copies.len();
            let end = state.take(&stretch, ends.len(), copies);
            if !matches!(end, Taken::Whole) {
                copies.truncate(before);
            }
            // The caller asks once more for what is not there.
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

/// Bytes that are copied between two looks at what the disk has finished.
const AT_ONCE: u64 = 256 << 10;

impl State {
    /// The same room with that of the windows that are being read, so that batches of another plan do not push them out.
    fn shared(&mut self, room: Room) -> Room {
        if room.window >= self.window.0 || self.asked > self.window.1 {
            self.window = (room.window, self.asked.saturating_add(room.window));
        }
        Room { window: self.window.0, ..room }
    }

    /// Begins to read the parts of `range` that no piece has, as far as there is room and memory.
    fn read(&mut self, shard: u64, range: Range<u64>, block: u64, file: &Arc<File>, room: Room) -> bool {
        let Range { mut start, end } = range;
        while start < end {
            if let Some((_, piece)) = self.at(shard, start) {
                start = piece.end;
                continue;
            }
            let next = self.pieces.range((shard, start)..(shard, end)).next();
            let until = next.map_or(end, |(&(_, next), _)| next);
            let parts = (until - start).div_ceil(PIECE + SPILL).max(1);
            let len = (until - start).div_ceil(parts).next_multiple_of(block).min(until - start);
            if !self.read_piece(shard, start..start + len, file, room) {
                self.pass(&(start..end), room);
                return false;
            }
            start += len;
        }
        true
    }

    /// Notes what there is no room for: the reading will come to it, and ask for it then.
    const fn pass(&mut self, range: &Range<u64>, room: Room) {
        if !room.now {
            self.hinted += range.end - range.start;
        }
    }

    /// Whether there was room and memory for it.
    fn read_piece(&mut self, shard: u64, range: Range<u64>, file: &Arc<File>, room: Room) -> bool {
        // At most a piece and the blocks at its ends, which fit a usize.
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let held = pool::class(len) as u64;
        if !self.make_room(held, room) {
            return false;
        }
        self.recover_spent();
        let Some(into) = self.pool.take(len, room.memory()) else { return false };
        let key = (shard, range.start);
        let tag = self.next_tag;
        self.next_tag += 1;
        let bytes = range.end - range.start;
        self.asked += bytes;
        self.held += held;
        let due = if room.now {
            self.reached = self.reached.saturating_add(bytes).min(self.hinted);
            self.reached
        } else {
            self.hinted += bytes;
            self.hinted
        };
        let piece = Piece { end: range.end, at: self.asked, due, wanted: 0, held, content: Content::Coming };
        self.pieces.insert(key, piece);
        if self.order.len() > 2 * self.pieces.len() + 64 {
            let pieces = &self.pieces;
            self.order.retain(|(at, key)| pieces.get(key).is_some_and(|piece| piece.at == *at));
        }
        self.order.push_back((self.asked, key));
        self.tags.insert(tag, key);
        self.queue.push(Read { file: file.clone(), offset: range.start, into, len, tag });
        true
    }

    /// Gives up old pieces until so many bytes more may be held.
    fn make_room(&mut self, more: u64, room: Room) -> bool {
        while self.held + more > room.most() {
            let Some(&(at, key)) = self.order.front() else { break };
            let piece = self.pieces.get(&key).filter(|piece| piece.at == at);
            let needed = |due: u64| room.age().is_some_and(|age| due.saturating_add(age) >= self.reached);
            match piece {
                Some(piece) if needed(piece.due) || matches!(piece.content, Content::Coming) => break,
                Some(_) => self.give_up(key),
                None => {}
            }
            self.order.pop_front();
        }
        self.held + more <= room.most()
    }

    fn give_up(&mut self, key: Key) {
        let Some(piece) = self.pieces.remove(&key) else { return };
        self.held -= piece.held;
        if let Content::There(memory, _) = piece.content {
            self.spent.push(memory);
        }
    }

    /// The memory from which nobody copies any more is free again.
    fn recover_spent(&mut self) {
        let mut index = 0;
        while index < self.spent.len() {
            if Arc::strong_count(&self.spent[index]) > 1 {
                index += 1;
            } else if let Ok(memory) = Arc::try_unwrap(self.spent.swap_remove(index)) {
                self.pool.put(memory);
            }
        }
    }

    /// The piece that has this byte.
    fn at(&self, shard: u64, offset: u64) -> Option<(Key, &Piece)> {
        let (&key, piece) = self.pieces.range(..=(shard, offset)).next_back()?;
        (key.0 == shard && offset < piece.end).then_some((key, piece))
    }

    /// Whether one piece or two that follow each other have all of it.
    fn has(&self, stretch: &Stretch<'_>) -> bool {
        let Stretch { shard, bytes, .. } = stretch;
        let end = |at| self.at(shard.first, at).map_or(at, |(_, piece)| piece.end);
        let first = end(bytes.start);
        first >= bytes.end || (first > bytes.start && end(first) >= bytes.end)
    }

    /// Counts bytes that will be taken from the pieces that were asked for after `since`.
    fn want(&mut self, shard: u64, bytes: &Range<u64>, since: u64) {
        let mut at = bytes.start;
        while at < bytes.end {
            let next = match self.at(shard, at) {
                Some((key, piece)) => {
                    let end = piece.end.min(bytes.end);
                    if let Some(piece) = self.pieces.get_mut(&key).filter(|piece| piece.at > since) {
                        piece.wanted += end - at;
                    }
                    end
                }
                None => match self.pieces.range((shard, at)..(shard, bytes.end)).next() {
                    Some((&(_, next), _)) => next,
                    None => return,
                },
            };
            at = next;
        }
    }

    /// Takes one stretch. The copies of one that cannot be taken whole are the caller's to remove.
    fn take(&mut self, stretch: &Stretch<'_>, number: usize, copies: &mut Vec<Copy>) -> Taken {
        let Stretch { shard, bytes, own_end } = stretch;
        let mut at = bytes.start;
        let mut end = Taken::Whole;
        while at < bytes.end {
            let Some((key, piece)) = self.at(shard.first, at) else { return Taken::Not };
            if matches!(piece.content, Content::Coming) {
                match self.queue.wait() {
                    Some(done) => self.settle(done),
                    None => return Taken::Not,
                }
                continue;
            }
            let until = piece.end.min(bytes.end);
            let place = |offset: u64| usize::try_from(offset - bytes.start).unwrap_or(usize::MAX);
            match &piece.content {
                // Waited for above.
                Content::Coming => return Taken::Not,
                Content::There(memory, found) => {
                    let start = usize::try_from(at - key.1).unwrap_or(usize::MAX);
                    let place = place(at)..place(until);
                    if start.saturating_add(place.len()) <= *found {
                        copies.push(Copy { from: memory.clone(), start, stretch: number, place });
                    } else {
                        end = Taken::Not;
                    }
                }
                Content::Failed(error) => {
                    let too_small = shard.direct.as_ref().is_some_and(|direct| direct.has_grown(error));
                    let error = io::Error::new(error.kind(), error.to_string());
                    self.give_up(key);
                    if too_small {
                        return Taken::Not;
                    }
                    return Taken::Failed { offset: key.1.max(bytes.start), error };
                }
            }
            if let Some(piece) = self.pieces.get_mut(&key) {
                self.reached = self.reached.max(piece.due);
                piece.wanted = piece.wanted.saturating_sub((*own_end).clamp(at, until) - at);
                if piece.wanted == 0 {
                    self.give_up(key);
                }
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
        let piece = self.tags.remove(&tag).and_then(|key| self.pieces.get_mut(&key));
        let Some(piece) = piece else { return self.pool.put(into) };
        piece.content = match read {
            Ok(found) => Content::There(Arc::new(into), found),
            Err(error) => {
                self.pool.put(into);
                Content::Failed(error)
            }
        };
    }
}
