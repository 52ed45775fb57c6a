//! Blocks that several batches need: the chunks of a windowed shuffle, or parts of them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::OnceCell;

/// The blocks that were used last, up to a number of bytes. The last one was used last.
#[derive(Default)]
pub(crate) struct Blocks(Mutex<VecDeque<Block>>);

struct Block {
    shard: usize,
    range: Range<u64>,
    /// Its bytes once the request of one batch has ended without an error.
    bytes: Arc<OnceCell<Bytes>>,
}

impl Blocks {
    /// Returns the bytes of a block, or the place for them. Drops those blocks that were not used
    /// for the longest time, until all have at most `most` bytes together, or no other is left.
    pub(crate) fn block(&self, shard: usize, range: &Range<u64>, most: u64) -> Arc<OnceCell<Bytes>> {
        let mut blocks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
