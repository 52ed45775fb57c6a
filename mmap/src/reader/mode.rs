//! The ways to read: through the page cache or past it.

/// How a [`Reader`](crate::Reader) reads files; set by [`ReadOptions::mode`](crate::ReadOptions::mode).
///
/// All modes return the same bytes, and none can raise a signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReadMode {
    /// Reads as much data through the page cache as fits in memory, and the rest with direct I/O.
    ///
    /// The rule is the same for every order. The reader takes the memory available when it is created (of the
    /// machine, or of the control group if that is less; the page cache counts as available) and leaves one
    /// sixteenth of it free. If the files of the plan fit in the rest, the reader uses the page cache for all data.
    /// If they do not fit, it reserves buffers for direct I/O (32 MiB, plus two and a quarter windows with
    /// [`Shuffle::Window`](crate::Shuffle::Window)). It reads the first part of the data set, as large as the
    /// remaining memory, through the page cache. This part stays in the page cache, and an epoch reads only the
    /// other part from disk. Ranks on one machine share these pages. So do the readers of a process: each counts on what
    /// the earlier ones leave, and bytes that two of them read count once.
    ///
    /// The kernel can reclaim page cache memory when programs need it, and then reads these pages again.
    /// [`Reader::choice`](crate::Reader::choice) returns the choice. All data is read through the page cache on
    /// systems other than Linux, for files without direct I/O, and for files that are reopened for each use.
    #[default]
    Auto,
    /// Reads through the page cache, with one system call per contiguous run of records (`pread` on Unix, `ReadFile`
    /// with an offset on Windows). On Linux, small scattered records are copied from the mapping, many per call
    /// (`process_vm_writev`), and so are longer ones once 32 MiB were found in the page cache without a gap, into
    /// slots of 2 MiB and more. The pages copied from count as resident memory of the process.
    Pread,
    /// Reads with direct I/O, past the page cache: `O_DIRECT` on Linux and FreeBSD, `F_NOCACHE` on macOS,
    /// `FILE_FLAG_NO_BUFFERING` on Windows.
    ///
    /// Up to 96 reads with up to 8 MiB in total are in flight, with `io_uring` if the kernel and the container allow
    /// it, otherwise with up to 32 threads. They fill buffers of the reader
    /// ([`Reader::memory`](crate::Reader::memory)), and the reader copies batches from these buffers.
    ///
    /// A run of 4 MiB or more is read with one call directly into the caller's buffer, without a copy. This is
    /// fastest with a [`Buffer`](crate::Buffer). Do not call `fork` during such a read (NOTES in `open(2)`). Files
    /// that are reopened for each use (see [`Options::open`](crate::Options::open)) and files on FUSE are also read
    /// directly into the caller's buffer.
    ///
    /// After a `fork`, a reader of the parent works in the child, but waits for each read before it starts the next.
    /// Create a new reader in the child instead.
    ///
    /// The page cache is neither used nor filled: every read waits for the disk, even if the same record was read
    /// before. The reader opens each file a second time: through `/proc/self/fd` on Linux, through its handle on
    /// Windows, and by its path on other systems. The path must still name the same file.
    Direct,
}
