//! How an epoch is shuffled.

/// How an epoch's records are shuffled.
///
/// The seed and the epoch determine a shuffled order; with [`Shuffle::Window`] the number of ranks and the batch size do
/// too. It does not depend on threads, depth or timing, and it is the same on every platform and in every version of this
/// crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case", deny_unknown_fields)
)]
pub enum Shuffle {
    /// No shuffling: every epoch visits the records in the order of the files.
    #[default]
    None,
    /// Shuffles chunks of consecutive records and keeps the order inside each chunk.
    ///
    /// The disk reads long stretches. Records inside a chunk are never mixed: with batches of a chunk or less, every
    /// batch is a run of neighbouring records. The last chunk may be shorter, and is shuffled like the others.
    Chunks {
        /// Records in a chunk, at least 1.
        records: u64,
    },
    /// Shuffles the records of all chunks that are in memory, while chunks are read and dropped one by one.
    ///
    /// A window slides over chunks that come from all over the files. As many records as a chunk has are drawn from all
    /// chunks of the window in equal parts, then the window moves on by one chunk. Where chunks begin, their order, and
    /// the order of the records all differ from epoch to epoch. If the window holds all of a rank's chunks, the rank's
    /// records are shuffled as a whole.
    ///
    /// The disk reads whole chunks, each of them once an epoch, over all ranks together. Memory must hold a window and
    /// the chunks that are being read. How many chunks are in a window decides how well it mixes: small chunks mix
    /// better than large ones in the same memory. Start with chunks of 128 to 256 KiB (they keep a disk busy if many
    /// are requested at a time) and with four times as many chunks as a batch has records: that is close to a full
    /// shuffle even if the files are sorted by class.
    ///
    /// The number of ranks and the batch size are part of the order, because each rank has chunks to itself.
    Window {
        /// Records in a chunk, at least 1.
        chunk_records: u64,
        /// Chunks in a window, at least 1.
        window_chunks: u64,
    },
    /// Shuffles all records individually.
    Full,
}
