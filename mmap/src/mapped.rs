//! The ways to read, and those through the mapping: copies that cannot raise a signal, and views of it.

use std::ops::Range;

use crate::{Error, Records, direct};

/// How [`Records::read`] gets bytes out of a file; chosen by [`Records::with_read_mode`].
///
/// All of them deliver the same bytes, and none can raise a signal. The default is the fastest for pages that
/// are in the cache, where hints bring them. Measured by `cargo bench -p twinbuf-mmap --bench read` on 2 vCPUs,
/// Linux 6.18, ext4, `read_ahead_kb` 8192, without hints, least of 11 rounds:
///
/// | a batch | pages before | `Pread` | `MapChecked` |
/// | --- | --- | --- | --- |
/// | 4 MiB in order | not in the cache | 3.8 ms | 3.7 ms |
/// | | in the cache | 1.68 ms | 1.96 ms |
/// | | in the cache and mapped | 1.68 ms | 1.87 ms |
/// | 1000 records of 4 KiB, shuffled | not in the cache | 68 ms | 46 ms |
/// | | in the cache | 1.27 ms | 3.10 ms |
/// | | in the cache and mapped | 1.40 ms | 1.18 ms |
///
/// Page faults bring more of the pages around from the disk than `pread` does, so what `MapChecked` gains for
/// cold shuffled records depends on how much of the file is used soon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReadMode {
    /// The kernel copies from its cache, one call for each run of records: `pread` on Unix, `ReadFile` with an
    /// offset on Windows.
    #[default]
    Pread,
    /// The kernel copies out of the mapping, many runs in one call: `process_vm_readv(2)` on this process.
    /// Linux only.
    ///
    /// Where touching a page would raise SIGBUS, the call stops short instead. Zeros between a new end of the
    /// file and the end of its page would not stop it, so the length of each file is looked at afterwards.
    /// After either of the two, the same runs are read by `pread`, which tells exactly what is missing.
    ///
    /// Pages that were read stay mapped and count as this process's memory (`VmRSS`) until the kernel needs
    /// them or [`Records::evict_batch`] unmaps them.
    MapChecked,
    /// This process copies out of the mapping, without a call. Linux only, and only from sealed files
    /// (`memfd_create(2)` with `F_SEAL_SHRINK` and `F_SEAL_WRITE`, see `fcntl(2)`), since a file that can be
    /// truncated raises SIGBUS here. They are opened as `/proc/self/fd/N`, or `/proc/PID/fd/N` of another
    /// process's.
    MapCopy,
    /// Past the page cache, straight from the disk into the caller's buffer: `O_DIRECT`, one call for each run
    /// of records. Linux only.
    ///
    /// For data that is larger than memory and read in runs of 1 MiB and more: an epoch of it finds nothing in
    /// the cache anyway, the CPU copies nothing, no page of anybody else is pushed out, and the time of a read
    /// varies less. Every read waits for the disk, also the second of the same record, and nothing is read
    /// ahead inside the kernel: hints and [`Evict`](crate::Evict) have no effect, and small records, shuffled
    /// one by one, are better left to `Pread` and hints.
    ///
    /// It is at its best into a [`Buffer`](crate::Buffer) of 2 MiB or more; any other memory will do. Where a
    /// run does not begin at a multiple of the disk's block (512 or 4096 bytes), as after a header of 128
    /// bytes, it is moved by less than a block inside `out` afterwards.
    ///
    /// Files are opened once more for it, by `/proc/self/fd`. Do not `fork` during such a read (NOTES in
    /// `open(2)`).
    Direct,
}

impl Records {
    /// Chooses how [`read`](Self::read) gets at the bytes. The default is [`ReadMode::Pread`].
    ///
    /// # Errors
    ///
    /// What makes the mode impossible here: [`Error::Unsupported`] on another operating system,
    /// [`Error::System`] if a file could not be mapped or the kernel refuses the call, as it does under some
    /// seccomp filters, and as some file systems refuse [`ReadMode::Direct`]; for [`ReadMode::MapCopy`] also
    /// those of [`view_sealed`](Self::view_sealed).
    pub fn with_read_mode(mut self, mode: ReadMode) -> Result<Self, Error> {
        direct::close(self.shards_mut());
        match mode {
            ReadMode::Pread => {}
            ReadMode::MapChecked => checked::probe(self.shards())?,
            ReadMode::MapCopy => self.shards().iter().try_for_each(sealed::check)?,
            ReadMode::Direct => direct::open(self.shards_mut())?,
        }
        self.mode = mode;
        Ok(self)
    }

    /// How [`read`](Self::read) gets at the bytes.
    #[must_use]
    pub const fn read_mode(&self) -> ReadMode {
        self.mode
    }

    /// The bytes of `records`, which must lie in one file, in place: nothing is copied, and pages that are not
    /// in memory are read when they are touched. Unix only.
    ///
    /// They are the bytes from the first of the first record to the last of the last as the file has them:
    /// those that overlapping windows share stand there once, and those in gaps between windows stand there too.
    ///
    /// # Safety
    ///
    /// As long as the view lives nobody, in this or another process, truncates the file or writes to it. A
    /// touch past the end of a truncated file raises SIGBUS; so does a disk that fails.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchRecord`]; [`Error::AcrossFiles`] if the records do not lie in one file;
    /// [`Error::System`] if that file could not be mapped; [`Error::Unsupported`] on another operating system.
    pub unsafe fn view(&self, records: Range<u64>) -> Result<&[u8], Error> {
        let Some(span) = self.in_one_file(records)? else { return Ok(&[]) };
        // SAFETY: by this function's own contract nobody changes or truncates the file while the slice lives.
        unsafe { in_place::bytes(span.shard, &span.bytes) }
    }

    /// The bytes of `records` in place, as [`view`](Self::view) gives them, of a file that is sealed: nobody
    /// can truncate or write to it any more. Linux only.
    ///
    /// The seals are `F_SEAL_SHRINK` and `F_SEAL_WRITE`; see `fcntl(2)`. Only files made by `memfd_create(2)`
    /// have them. Those on huge pages (`MFD_HUGETLB`) are refused, because their holes cannot be told.
    ///
    /// # Errors
    ///
    /// Those of [`view`](Self::view). [`Error::NotSealed`] if the file lacks one of the seals, or has holes:
    /// to touch a hole takes memory, and is SIGBUS if there is none. [`Error::Truncated`] if it became shorter
    /// before it was sealed.
    pub fn view_sealed(&self, records: Range<u64>) -> Result<&[u8], Error> {
        let Some(span) = self.in_one_file(records)? else { return Ok(&[]) };
        sealed::check(span.shard)?;
        // SAFETY: the seals just seen cannot be taken off (fcntl(2)), and forbid both writing and shrinking.
        unsafe { in_place::bytes(span.shard, &span.bytes) }
    }
}

#[cfg(unix)]
pub(crate) mod in_place {
    //! Slices of a mapping.

    use std::ops::Range;

    use crate::{Error, Shard};

    /// Bytes of the mapping, which must lie within the shard's.
    ///
    /// # Safety
    ///
    /// Nobody writes to the file or truncates it while the slice lives, and all of `bytes` are in it.
    pub(crate) unsafe fn bytes<'a>(shard: &'a Shard, bytes: &Range<u64>) -> Result<&'a [u8], Error> {
        let map = shard.mapping()?;
        // Within the mapping, whose length is a usize.
        let clamp = |offset| usize::try_from(offset).map_or(map.len(), |offset: usize| offset.min(map.len()));
        let (start, end) = (clamp(bytes.start), clamp(bytes.end));
        // SAFETY: `start` is no further than the end of the mapping, and both pointers lie in it.
        let first = unsafe { map.as_ptr().add(start) };
        // SAFETY: the bytes lie in a mapping that `shard` keeps alive, readable and no longer than isize::MAX.
        // By the contract above the file has them all and nobody writes to them.
        Ok(unsafe { std::slice::from_raw_parts(first, end - start) })
    }
}

#[cfg(not(unix))]
pub(crate) mod in_place {
    //! Nothing is mapped here.

    use std::ops::Range;

    use crate::{Error, Shard};

    /// # Safety
    ///
    /// None needed; as on Unix.
    pub(crate) unsafe fn bytes<'a>(_: &'a Shard, _: &Range<u64>) -> Result<&'a [u8], Error> {
        Err(Error::Unsupported { call: "mmap" })
    }
}

#[cfg(target_os = "linux")]
mod sealed {
    //! Files that nobody can change any more.

    use std::fs::File;
    use std::io;
    use std::mem::MaybeUninit;
    use std::ops::Range;
    use std::os::fd::AsRawFd;

    use crate::{Error, Shard};

    /// Whether every byte of the shard is in its file and stays there as it is.
    pub(super) fn check(shard: &Shard) -> Result<(), Error> {
        const WANTED: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_WRITE;
        shard.mapping()?;
        let path = || shard.path().to_owned();
        let file = &shard.file.file;
        // SAFETY: the descriptor is open as long as `file` lives; the call takes no pointer.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        // File systems without seals answer -1, which has all bits set.
        if seals < 0 || seals & WANTED != WANTED {
            return Err(Error::NotSealed { path: path() });
        }
        // Only after the seals: from now on the file becomes no shorter and gets no holes.
        let failed = |source: io::Error| Error::System { path: path(), call: "fstat", source };
        let (len, wanted) = (file.metadata().map_err(failed)?.len(), shard.bytes.end);
        if len < wanted {
            return Err(Error::Truncated { path: path(), offset: len, wanted, found: len });
        }
        if whole(file, &shard.bytes) { Ok(()) } else { Err(Error::NotSealed { path: path() }) }
    }

    /// Whether none of `bytes`, which are within the file, is in a hole. `false` where that cannot be told.
    ///
    /// The number of a file's blocks does not tell: there may be more of them behind its end (`fallocate(2)`
    /// with `FALLOC_FL_KEEP_SIZE`). Nor does `lseek` on hugetlbfs, which has seals too.
    fn whole(file: &File, bytes: &Range<u64>) -> bool {
        let mut system = MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: the descriptor is open as long as `file` lives; the kernel writes one `statfs`, no more.
        if unsafe { libc::fstatfs(file.as_raw_fd(), system.as_mut_ptr()) } != 0 {
            return false;
        }
        // SAFETY: the call succeeded, so the kernel has written all of it.
        let system = unsafe { system.assume_init() };
        let Ok(start) = libc::off_t::try_from(bytes.start) else { return false };
        // SAFETY: as before; the call takes no pointer. It moves the file's cursor, which nothing here uses.
        let hole = unsafe { libc::lseek(file.as_raw_fd(), start, libc::SEEK_HOLE) };
        // Both are of types that differ between C libraries; the number is small and positive in all of them.
        system.f_type as u64 == libc::TMPFS_MAGIC as u64
            && u64::try_from(hole).is_ok_and(|hole| hole >= bytes.end)
    }
}

#[cfg(not(target_os = "linux"))]
mod sealed {
    //! No files with Linux's seals.

    use crate::{Error, Shard};

    pub(super) fn check(_: &Shard) -> Result<(), Error> {
        Err(Error::Unsupported { call: "fcntl(F_GET_SEALS)" })
    }
}

#[cfg(target_os = "linux")]
pub(crate) mod checked {
    //! `process_vm_readv` on this process, runs gathered.

    use std::io;

    use crate::records::{Span, expand};
    use crate::{Error, Shard};

    /// Ranges in one call: `UIO_MAXIOV` in the kernel's `include/uapi/linux/uio.h`.
    const RANGES: usize = 1024;

    /// Bytes in one call, below the 2 GiB less a page at which the kernel stops (`MAX_RW_COUNT`).
    const BYTES: usize = 1 << 30;

    /// Whether all shards are mapped and the kernel allows the call.
    pub(super) fn probe(shards: &[Shard]) -> Result<(), Error> {
        for shard in shards {
            shard.mapping()?;
        }
        let (mut to, from) = ([0_u8], [1_u8]);
        let local = [libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: 1 }];
        let remote = [libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: 1 }];
        // SAFETY: `local` names the one byte of `to`, which nothing else uses.
        match unsafe { copy(&local, &remote) } {
            Ok(1) => Ok(()),
            Ok(_) => Err(Error::Unsupported { call: "process_vm_readv" }),
            // It is the same for all files; the first has to stand for them.
            Err(source) => {
                Err(Error::System { path: shards[0].path().to_owned(), call: "process_vm_readv", source })
            }
        }
    }

    /// Reads spans, each to its part of the caller's buffer.
    pub(crate) fn read<'a, 'b>(
        parts: impl Iterator<Item = Result<(Span<'a>, &'b mut [u8]), Error>>,
        record: usize,
    ) -> Result<(), Error> {
        let mut group = Vec::new();
        let mut bytes = 0;
        for part in parts {
            let (span, out) = part?;
            if group.len() == RANGES || out.len() > BYTES - bytes {
                read_group(&mut group, record)?;
                bytes = 0;
            }
            bytes = (bytes + out.len()).min(BYTES);
            group.push((span, out));
        }
        read_group(&mut group, record)
    }

    fn read_group(group: &mut Vec<(Span<'_>, &mut [u8])>, record: usize) -> Result<(), Error> {
        let whole = copy_group(group) && all_there(group);
        for (span, out) in group.drain(..) {
            let shared = span.shared(out.len());
            if !whole {
                span.shard.file.read_exact(&mut out[shared..], span.bytes.start)?;
            }
            expand(out, record, shared);
        }
        Ok(())
    }

    /// Whether all bytes were copied out of the mappings.
    fn copy_group(group: &mut [(Span<'_>, &mut [u8])]) -> bool {
        let mut local = Vec::with_capacity(group.len());
        let mut remote = Vec::with_capacity(group.len());
        let mut wanted = 0;
        for (span, out) in group {
            let shared = span.shared(out.len());
            let out = &mut out[shared..];
            let (Ok(map), Ok(start)) = (span.shard.mapping(), usize::try_from(span.bytes.start)) else {
                return false;
            };
            wanted += out.len();
            // Only an address for the kernel, which checks it.
            let address = map.as_mut_ptr().wrapping_add(start);
            remote.push(libc::iovec { iov_base: address.cast(), iov_len: out.len() });
            local.push(libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() });
        }
        // SAFETY: each of `local` is a part of its own of the caller's buffer, borrowed by `group` until after
        // the call.
        wanted <= BYTES && unsafe { copy(&local, &remote) }.is_ok_and(|copied| copied == wanted)
    }

    /// Whether the files still hold all their records.
    fn all_there(group: &[(Span<'_>, &mut [u8])]) -> bool {
        let mut shards: Vec<&Shard> = group.iter().map(|(span, _)| span.shard).collect();
        shards.sort_unstable_by_key(|shard| shard.records().start);
        shards.dedup_by_key(|shard| shard.records().start);
        shards.iter().all(|shard| shard.file.file.metadata().is_ok_and(|now| now.len() >= shard.bytes.end))
    }

    /// Copies from this process's memory to this process's memory, and says how many bytes. It stops at the
    /// first page of `remote` that cannot be read.
    ///
    /// # Safety
    ///
    /// All of `local` may be written to during the call.
    unsafe fn copy(local: &[libc::iovec], remote: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: takes no pointer and cannot fail. Asked each time: after a fork it is another process.
        let this = unsafe { libc::getpid() };
        let (locals, remotes) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
        // SAFETY: the kernel reads the two arrays, as long as said, and writes to `local` only, as the caller
        // allows. `remote` may be any addresses: pages that are not there end the call.
        let copied =
            unsafe { libc::process_vm_readv(this, local.as_ptr(), locals, remote.as_ptr(), remotes, 0) };
        usize::try_from(copied).map_err(|_| io::Error::last_os_error())
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) mod checked {
    //! No `process_vm_readv`.

    use crate::records::Span;
    use crate::{Error, Shard};

    pub(super) fn probe(_: &[Shard]) -> Result<(), Error> {
        Err(Error::Unsupported { call: "process_vm_readv" })
    }

    /// Never called: the mode cannot be chosen.
    pub(crate) fn read<'a, 'b>(
        _: impl Iterator<Item = Result<(Span<'a>, &'b mut [u8]), Error>>,
        _: usize,
    ) -> Result<(), Error> {
        Err(Error::Unsupported { call: "process_vm_readv" })
    }
}
