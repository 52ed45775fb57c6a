//! The shuffle of an epoch.

/// How the records of an epoch are shuffled.
///
/// The seed and the epoch determine the order. With [`Shuffle::Window`], the number of ranks and the batch size also
/// affect it. The order does not depend on threads, depth or timing. It is the same on every platform and in every
/// version of this crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", deny_unknown_fields)
)]
pub enum Shuffle {
    /// No shuffle: every epoch visits the records in file order.
    #[default]
    None,
    /// Shuffles chunks of consecutive records. The order inside a chunk stays the same.
    ///
    /// The disk reads long contiguous ranges. Records of one chunk stay together: a batch that is not larger than a
    /// chunk contains consecutive records from only a few chunks. The last chunk may be shorter, and is shuffled
    /// like the others.
    Chunks {
        /// The number of records in a chunk, at least 1.
        records: u64,
    },
    /// Shuffles records within a sliding window of chunks in memory.
    ///
    /// Chunks enter the window in random order. The shuffle draws one chunk's worth of records evenly from all
    /// chunks in the window, then the window advances by one chunk. In each epoch, the chunk boundaries, the order
    /// of the chunks and the order of the records differ. If the window holds all chunks of a rank, the rank's
    /// records are fully shuffled.
    ///
    /// The disk reads whole chunks, each once per epoch over all ranks. Memory must hold one window plus the chunks
    /// being read. The number of chunks in a window determines the quality of the shuffle: with the same memory,
    /// many small chunks mix better than a few large chunks. Start with chunks of 128 to 256 KiB (large enough to
    /// keep a disk busy if many are in flight), and four times as many chunks as a batch has records. This is close
    /// to a full shuffle even if the files are sorted by class.
    ///
    /// The order depends on the number of ranks and the batch size, because each rank has separate chunks.
    Window {
        /// The number of records in a chunk, at least 1.
        chunk_records: u64,
        /// The number of chunks in a window, at least 1.
        window_chunks: u64,
    },
    /// Shuffles all records individually.
    Full,
}
