//! How many files may stay open, and how much memory there is.

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

/// Bytes of memory that this process may use: the machine's, or less if a control group says so. `None` if unknown.
#[cfg(target_os = "linux")]
pub(crate) fn memory() -> Option<u64> {
    use std::path::Path;

    // SAFETY: these calls take no pointer.
    let [pages, page] = [libc::_SC_PHYS_PAGES, libc::_SC_PAGESIZE].map(|name| unsafe { libc::sysconf(name) });
    let machine = u64::try_from(pages).ok()?.checked_mul(u64::try_from(page).ok()?)?;
    // Version 2, "0::/path", and version 1, "4:memory:/path"; a container may see its own group at the top.
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (root, file) = match parts.next() {
            Some("") => ("/sys/fs/cgroup", "memory.max"),
            Some(kinds) if kinds.split(',').any(|kind| kind == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return Vec::new(),
        };
        let group = Path::new(root).join(parts.next().unwrap_or_default().trim_start_matches('/'));
        let all = group.ancestors().take_while(|group| group.starts_with(root));
        all.filter_map(|group| std::fs::read_to_string(group.join(file)).ok()?.trim().parse().ok()).collect()
    });
    Some(limits.fold(machine, u64::min))
}

#[cfg(not(target_os = "linux"))]
pub(crate) const fn memory() -> Option<u64> {
    None
}
