#![doc = include_str!("../README.md")]

mod client;
mod error;
mod open;
mod options;

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::{OnceCell, Semaphore};
use tokio::task::{JoinSet, unconstrained};
use twinbuf::loader::Locator;
use twinbuf::mmap::DType;
use twinbuf::{BatchIndices, BoxError, Dataset};

use client::{Client, Object};
pub use error::{Error, Kind};
pub use options::Options;

/// Records of one size in objects. Clones share the store, the counters and the chunks of a window.
#[derive(Clone)]
pub struct Objects {
    client: Arc<Client>,
    blocks: Arc<Mutex<VecDeque<Block>>>,
    shards: Arc<[Shard]>,
    record: usize,
    element: Option<(DType, Vec<usize>)>,
}

/// An object and its records.
struct Shard {
    object: Arc<Object>,
    records: Range<u64>,
    /// The offset of its first record.
    first: u64,
    /// From the start of a record to the start of the next.
    stride: u64,
}

/// A record of a batch: its shard, its offset in the object, its place in the batch.
type Piece = (usize, u64, usize);

/// A range of an object, and the pieces in it.
struct Request {
    shard: usize,
    range: Range<u64>,
    pieces: Range<usize>,
    /// Other batches need other records of it.
    kept: bool,
}

#[allow(clippy::len_without_is_empty, reason = "the openers of records refuse empty data")]
impl Objects {
    /// Returns the number of records, at least 1.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.shards.last().map_or(0, |shard| shard.records.end)
    }

    /// Returns what this data set and its clones have read so far. The opening does not count.
    #[must_use]
    pub fn stats(&self) -> Stats {
        // Relaxed, as where they are added to: counts, and nothing is read because of them.
        let [requests, bytes, used] = self.client.counters.each_ref().map(|counter| counter.load(Relaxed));
        Stats { requests, bytes, used }
    }

    /// The shard of a record, and its offset in the object.
    fn locate(&self, record: u64) -> Option<(usize, u64)> {
        let index = self.shards.partition_point(|shard| shard.records.end <= record);
        let shard = self.shards.get(index)?;
        Some((index, shard.first + (record - shard.records.start) * shard.stride))
    }

    /// The part of a chunk that has the record at `offset` of a shard, as bytes of the object. `None` if no chunk has it.
    fn block(&self, shard: usize, offset: u64, chunks: &[Range<u64>]) -> Option<Range<u64>> {
        let Shard { records, first, stride, .. } = &self.shards[shard];
        let record = records.start + (offset - first) / stride;
        let chunk = &chunks[chunks.partition_point(|chunk| chunk.start <= record).checked_sub(1)?];
        let (start, end) = (chunk.start.max(records.start), chunk.end.min(records.end));
        // A chunk of many bytes is several blocks.
        let most = (self.client.options.request_bytes / stride).max(1);
        let start = start + (record - start) / most * most;
        let last = end.min(start.saturating_add(most)).checked_sub(1).filter(|last| *last >= record)?;
        let [start, last] = [start, last].map(|record| first + (record - records.start) * stride);
        Some(start..last + self.record as u64)
    }

    /// The requests for the pieces, which are in the order of the objects. `chunks` are the chunks to request as a whole, in
    /// the order of their records.
    fn requests(&self, pieces: &[Piece], chunks: &[Range<u64>]) -> Vec<Request> {
        let Options { gap, request_bytes, .. } = self.client.options;
        let mut requests: Vec<Request> = Vec::new();
        for (index, &(shard, offset, _)) in pieces.iter().enumerate() {
            let end = offset + self.record as u64;
            let block = self.block(shard, offset, chunks);
            let (kept, range) = (block.is_some(), block.unwrap_or(offset..end));
            let last = requests.last_mut().filter(|last| {
                let near = !kept && !last.kept && offset <= last.range.end.saturating_add(gap);
                let fits = || end == last.range.end || end - last.range.start <= request_bytes;
                last.shard == shard && (last.range == range || near && fits())
            });
            match last {
                Some(last) => (last.range.end, last.pieces.end) = (last.range.end.max(end), index + 1),
                None => requests.push(Request { shard, range, pieces: index..index + 1, kept }),
            }
        }
        requests
    }

    /// Starts all requests, several at a time. Each task returns the index and the bytes of its
    /// request. They end early if the set is dropped. Keeps about `most` bytes for other batches.
    fn fetch(&self, requests: &[Request], most: u64) -> JoinSet<Result<(usize, Bytes), Error>> {
        let limit = Arc::new(Semaphore::new(self.client.options.requests.clamp(1, Semaphore::MAX_PERMITS)));
        let mut tasks = JoinSet::new();
        for (index, &Request { shard, ref range, kept, .. }) in requests.iter().enumerate() {
            let (client, limit) = (self.client.clone(), limit.clone());
            let (object, range) = (self.shards[shard].object.clone(), range.clone());
            let place = if kept { self.keep(shard, &range, most) } else { Arc::default() };
            let get = async move {
                let _turn = limit.acquire().await;
                let get = async || {
                    let (_, bytes) = client.get(&object, range).await?;
                    client.counters[0].fetch_add(1, Relaxed);
                    client.counters[1].fetch_add(bytes.len() as u64, Relaxed);
                    // The bytes of a response may be part of a larger buffer, and would keep all of it in memory.
                    Ok(if kept { Bytes::copy_from_slice(&bytes) } else { bytes })
                };
                Ok((index, place.get_or_try_init(get).await?.clone()))
            };
            tasks.spawn_on(get, &self.client.runtime);
        }
        tasks
    }

    /// Returns the bytes of a block, or the place for them. Drops those blocks that were not used
    /// for the longest time, until all have at most `most` bytes together, or no other is left.
    fn keep(&self, shard: usize, range: &Range<u64>, most: u64) -> Arc<OnceCell<Bytes>> {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let known = blocks.iter().position(|block| block.shard == shard && block.range == *range);
        let bytes = known.and_then(|at| blocks.remove(at)).map(|block| block.bytes).unwrap_or_default();
        blocks.push_back(Block { shard, range: range.clone(), bytes: bytes.clone() });
        let len = |block: &Block| block.range.end - block.range.start;
        while blocks.len() > 1 && blocks.iter().map(len).sum::<u64>() > most {
            blocks.pop_front();
        }
        bytes
    }
}

impl Dataset for Objects {
    fn records(&self) -> u64 {
        self.len()
    }

    fn record_bytes(&self) -> usize {
        self.record
    }

    fn element(&self) -> Option<(DType, Vec<usize>)> {
        self.element.clone()
    }

    fn name(&self) -> String {
        format!("{} objects of {}", self.shards.len(), self.client.root)
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        if self.client.process != std::process::id() {
            return Err(self.client.ended().into());
        }
        let piece = |(index, record)| {
            let place = self.locate(record).ok_or_else(|| format!("there is no record {record}"));
            place.map(|(shard, offset)| (shard, offset, index * self.record))
        };
        let mut pieces = batch.runs().flatten().enumerate().map(piece).collect::<Result<Vec<Piece>, _>>()?;
        pieces.sort_unstable();
        let mut chunks = batch.window_chunks().unwrap_or_default();
        chunks.sort_unstable_by_key(|chunk| chunk.start);
        // A block has the gaps between its records too.
        let each = pieces.iter().map(|piece| self.shards[piece.0].stride).fold(self.record as u64, u64::max);
        let window = chunks.iter().map(|chunk| chunk.end - chunk.start).sum::<u64>().saturating_mul(each);
        let requests = self.requests(&pieces, &chunks);
        // Twice the window: other workers are at other places of the epoch.
        let (mut tasks, mut copied) = (self.fetch(&requests, window.saturating_mul(2)), 0);
        // The caller may be a task of tokio, which must yield after 128 answers. `block_on` never yields, so it would then
        // wait forever. `unconstrained` removes that limit.
        while let Some(answer) = pollster::block_on(unconstrained(tasks.join_next())) {
            let (index, bytes) = answer.unwrap_or_else(|_| Err(self.client.ended()))?;
            let Request { range, pieces: within, .. } = &requests[index];
            for &(_, offset, to) in &pieces[within.clone()] {
                // A request is in memory.
                let at = usize::try_from(offset - range.start).unwrap_or(usize::MAX);
                out[to..][..self.record].copy_from_slice(&bytes[at..][..self.record]);
                copied += self.record;
            }
        }
        self.client.counters[2].fetch_add(copied as u64, Relaxed);
        Ok(copied)
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }

    fn locator(&self) -> Option<Locator> {
        let objects = self.clone();
        Some(Box::new(move |record| {
            let (shard, offset) = objects.locate(record)?;
            Some((objects.client.url(&objects.shards[shard].object.path).into(), offset))
        }))
    }

    /// FNV-1a (64 bits) over the objects' sizes and ETags, or without these times of change, in
    /// order. Their names have no effect: a copy with the same ETags is the same data set.
    fn fingerprint(&mut self) -> Result<u64, BoxError> {
        let bytes = self.shards.iter().flat_map(|shard| {
            let tag = shard.object.tag.as_deref().unwrap_or_default();
            shard.object.size.to_le_bytes().into_iter().chain(tag.bytes()).chain([0])
        });
        let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Ok(bytes.fold(0xcbf2_9ce4_8422_2325, step))
    }
}

/// A block that several batches need: a chunk of a windowed shuffle, or a part of one. The blocks that were used last are kept,
/// up to a number of bytes. The last one was used last.
struct Block {
    shard: usize,
    range: Range<u64>,
    /// Its bytes once the request of one batch has ended without an error.
    bytes: Arc<OnceCell<Bytes>>,
}

/// What was requested so far. [`Objects::stats`] returns it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// The number of requests that succeeded after the opening, without retries.
    pub requests: u64,
    /// The number of bytes that these requests received.
    pub bytes: u64,
    /// The number of bytes copied to batches.
    pub used: u64,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests, bytes, used } = self;
        let wasted = bytes.saturating_sub(*used) as f64 / (*bytes).max(1) as f64 * 100.0;
        write!(f, "{requests} requests, {bytes} bytes received, {wasted:.1} % of them not used")
    }
}
