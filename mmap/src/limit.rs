//! How many files may stay open.

/// How many of `files` files to keep open; the others are opened for each use.
///
/// A quarter of the descriptors that the process may have, so that direct reads, which need a second one for each
/// file, and the rest of the program find some. The soft limit is raised for it, as far as the hard one allows.
#[cfg(unix)]
pub(crate) fn kept(files: usize) -> usize {
    const SHARE: libc::rlim_t = 4;
    /// For the rest of the program, beside the files.
    const OTHERS: libc::rlim_t = 256;
    let wanted =
        libc::rlim_t::try_from(files).unwrap_or(libc::rlim_t::MAX / 8).saturating_mul(SHARE) + OTHERS;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit`.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return 0;
    }
    if limit.rlim_cur < wanted && limit.rlim_cur < limit.rlim_max {
        let raised = libc::rlimit { rlim_cur: wanted.min(limit.rlim_max), ..limit };
        // SAFETY: the kernel reads one `rlimit`. A refusal, as macOS gives above `OPEN_MAX`, leaves the limit as it is.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) } == 0 {
            limit = raised;
        }
    }
    usize::try_from(limit.rlim_cur / SHARE).unwrap_or(usize::MAX)
}

/// All of them: there is no such limit.
#[cfg(not(unix))]
pub(crate) fn kept(_: usize) -> usize {
    usize::MAX
}
