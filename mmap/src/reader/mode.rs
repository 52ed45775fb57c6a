//! The ways to read: through the page cache or past it.

/// How [`Records::read`] gets bytes out of a file; set by [`Options::read_mode`](crate::Options::read_mode).
///
/// All modes deliver the same bytes, and none can raise a signal.
///
/// [`Records::read`]: crate::Records::read
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReadMode {
    /// `Pread`; but on Linux `Direct` if the files are larger than half of the memory that the process may use (the
    /// machine's, or its control group's), all of them stay open, their file system has such reads, and records are
    /// shorter than 4 MiB.
    ///
    /// Of files that fit, [`Records::will_need`] asks for 128 KiB around each small record, once an epoch, and on ext4 and XFS
    /// for the huge pages of runs of 1 to 4 MiB: all of it will be needed, and the disk has brought the whole file long
    /// before the first epoch is over.
    ///
    /// An epoch of what does not fit into memory finds little in the page cache anyway, and pushes out what others have
    /// there. All such reads go to memory of our own first, so that other threads may `fork` meanwhile. What cannot be read
    /// that way, as in a child of a `fork`, comes through the page cache.
    ///
    /// [`Records::will_need`]: crate::Records::will_need
    #[default]
    Auto,
    /// The kernel copies from its page cache, one call for each run of records: `pread` on Unix, `ReadFile` with an
    /// offset on Windows. Right for files that fit in memory and are read in several epochs.
    Pread,
    /// Past the page cache: `O_DIRECT` on Linux and FreeBSD, `F_NOCACHE` on macOS, `FILE_FLAG_NO_BUFFERING` on Windows.
    /// Right for files that are larger than memory.
    ///
    /// Up to 96 reads of up to 8 MiB together are under way at a time: by `io_uring` where the kernel and the container
    /// allow it, otherwise by up to 32 threads. They fill memory of the data set's own
    /// ([`Records::ahead_bytes`]), from which [`Records::read`] copies. [`Records::will_need`] begins the reads of later
    /// batches; without it only those of the batch itself are under way together. With
    /// [`Shuffle::Window`](crate::Shuffle::Window) whole chunks are read, and two windows are kept in memory.
    ///
    /// A run of 4 MiB or more is read by one call straight into the caller's buffer, and no CPU copies it, which is
    /// fastest into a [`Buffer`](crate::Buffer). Do not `fork` during such a read (NOTES in `open(2)`). So are the files
    /// that are opened for each use (see [`Options::open`](crate::Options::open)) and those of FUSE.
    ///
    /// A child of a `fork` waits for each read before it begins the next: open the files in it instead.
    ///
    /// The page cache is neither used nor filled: every read waits for the disk, also the second of the same record, and
    /// [`CachePolicy`](crate::CachePolicy) has no effect.
    ///
    /// Each file is opened a second time: through `/proc/self/fd` on Linux, through its handle on Windows, elsewhere by
    /// its path, where it must be the same file.
    ///
    /// [`Records::ahead_bytes`]: crate::Records::ahead_bytes
    /// [`Records::read`]: crate::Records::read
    /// [`Records::will_need`]: crate::Records::will_need
    Direct,
}
