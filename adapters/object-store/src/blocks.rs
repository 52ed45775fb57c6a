//! Blocks that several batches need: the chunks of a windowed shuffle, or parts of them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::OnceCell;

/// The blocks that were used last, up to a number of bytes.
#[derive(Default)]
pub(crate) struct Blocks(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    /// By shard and offset.
    blocks: HashMap<(usize, u64), Block>,
    bytes: u64,
    /// The number of uses so far.
    uses: u64,
}

struct Block {
    len: u64,
    /// Which use was the last.
    used: u64,
    /// Its bytes once the request of one batch has ended without an error.
    bytes: Arc<OnceCell<Bytes>>,
}

impl Blocks {
    /// Returns the bytes of a block, or the place for them. Drops those blocks that were not used
    /// for the longest time, until all have at most `most` bytes together, or no other is left.
    pub(crate) fn block(&self, shard: usize, range: &Range<u64>, most: u64) -> Arc<OnceCell<Bytes>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Kept { blocks, bytes, uses } = &mut *kept;
        *uses += 1;
        let (key, len) = ((shard, range.start), range.end - range.start);
        // Another epoch has other chunks, which may start at the same offset.
        let block = blocks.remove(&key).filter(|block| {
            *bytes -= block.len;
            block.len == len
        });
        let found = block.map(|block| block.bytes).unwrap_or_default();
        while *bytes + len > most {
            let Some(oldest) = blocks.iter().min_by_key(|(_, block)| block.used).map(|(key, _)| *key) else {
                break;
            };
            *bytes -= blocks.remove(&oldest).map_or(0, |block| block.len);
        }
        *bytes += len;
        blocks.insert(key, Block { len, used: *uses, bytes: found.clone() });
        found
    }
}
