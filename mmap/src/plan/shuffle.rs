//! How an epoch is shuffled.

/// How an epoch's records are shuffled.
///
/// The seed and the epoch alone determine a shuffled order. It does not depend on threads, depth or timing, and it
/// is the same on every platform and in every version of this crate.
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
    /// Mixes records inside windows of several chunks that come from all over the files: nearly as random as
    /// [`Shuffle::Records`], while the disk reads whole chunks.
    ///
    /// A window's chunks are read as a whole and its records visited in random order, so the page cache must hold two
    /// windows: the current one and the next, which [`Reader`](crate::Reader) asks for piece by
    /// piece. The chunks of a window lie evenly over the whole range, one in each of `chunks` equal parts. Where chunks
    /// begin, which of them make up a window, and the order inside it all differ from epoch to epoch. Each rank has
    /// its own windows.
    ///
    /// Choose chunks of about 1 MiB, so that the disk reads long stretches, and as many as fit the memory: the more
    /// chunks, the better the mixing. [`ReadMode::Direct`](crate::ReadMode::Direct) keeps two windows in memory
    /// ([`Reader::memory`](crate::Reader::memory)).
    Window {
        /// Records in a chunk, at least 1.
        records: u64,
        /// Chunks in a window, at least 1. Where they do not divide the data set, all windows get a chunk less or so.
        chunks: u64,
    },
    /// Shuffles all records individually.
    Records,
}
