//! The ways to read: through the page cache or past it.

/// Where a [`Reader`](crate::Reader) gets bytes from; set by [`ReadOptions::mode`](crate::ReadOptions::mode).
///
/// All modes deliver the same bytes, and none can raise a signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReadMode {
    /// As much of the data as fits in memory comes through the page cache and stays there; the rest is read past it.
    ///
    /// One rule for every order: of the memory that is left when the reader is made (the machine's, or less if a control
    /// group has less left; pages of files count as free), a sixteenth is kept back. If the files that the plan reads fit
    /// in the rest, all of them come through the page cache. If not, memory for reads past it is set aside (two windows
    /// and a quarter with [`Shuffle::Window`](crate::Shuffle::Window), and 32 MiB), and as many bytes at the front of the
    /// data set as then fit come through the page cache. Nothing else goes there, so they stay, and an epoch reads only
    /// the others from the disk. Ranks on one machine share these pages.
    ///
    /// The page cache is memory that the kernel takes back when programs need it: then these pages are read again.
    /// [`Reader::choice`](crate::Reader::choice) tells what was chosen. Everything comes through the page cache on systems
    /// other than Linux, where files have no reads past it, and where files are opened for each use.
    #[default]
    Auto,
    /// Through the page cache: by one call for each run of records (`pread` on Unix, `ReadFile` with an offset on Windows).
    /// On Linux small records that are scattered are copied out of the mapping, many by one call (`process_vm_writev`).
    Pread,
    /// Past the page cache: `O_DIRECT` on Linux and FreeBSD, `F_NOCACHE` on macOS, `FILE_FLAG_NO_BUFFERING` on Windows.
    ///
    /// Up to 96 reads of up to 8 MiB together are in flight at a time: by `io_uring` where the kernel and the container
    /// allow it, otherwise by up to 32 threads. They fill memory of the reader
    /// ([`Reader::memory`](crate::Reader::memory)), and batches are copied from there.
    ///
    /// A run of 4 MiB or more is read by one call straight into the caller's buffer, without a CPU copy. This is
    /// fastest into a [`Buffer`](crate::Buffer). Do not `fork` during such a read (NOTES in `open(2)`). So are files
    /// that are opened for each use (see [`Options::open`](crate::Options::open)) and those of FUSE.
    ///
    /// A child of a `fork` waits for each read before it begins the next: make the reader in it instead.
    ///
    /// The page cache is neither used nor filled: every read waits for the disk, also the second of the same record.
    /// Each file is opened a second time: through `/proc/self/fd` on Linux, through its handle on Windows, elsewhere by
    /// its path, where it must be the same file.
    Direct,
}
