//! How many files may stay open, how much memory is left, and how many ranks share this machine.

/// Returns how many files of a data set to keep open at most. The caller opens the others of its `files` files for each
/// use.
///
/// The result is a quarter of the process's limit of descriptors. The others are for direct reads (a second descriptor
/// for each file) and for the rest of the program. If the soft limit is too low for `files`, the call raises it, at
/// most to the hard limit.
#[cfg(unix)]
pub(crate) fn kept(files: usize) -> usize {
    const SHARE: libc::rlim_t = 4;
    /// Descriptors for the rest of the program, in addition to those for the files.
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

/// Keeps all files open: this system has no such low limit.
#[cfg(not(unix))]
pub(crate) fn kept(_: usize) -> usize {
    usize::MAX
}

/// Returns how many bytes of memory this process can still use: those of the machine, or those left in one of its
/// control groups if that is less. Memory that the page cache would give up counts as usable. `None` if unknown.
#[cfg(target_os = "linux")]
pub(crate) fn memory_left() -> Option<u64> {
    use std::path::Path;

    fn text(path: impl AsRef<Path>) -> String {
        std::fs::read_to_string(path).unwrap_or_default()
    }
    /// Finds the line that starts with the word `name`, and returns the number after it.
    fn line(text: &str, name: &str) -> Option<u64> {
        let mut lines = text.lines().map(str::split_whitespace);
        lines.find_map(|mut words| if words.next()? == name { words.next()?.parse().ok() } else { None })
    }
    /// What is left in a group. Its files have one set of names in version 2 of control groups, and another in version 1.
    fn left(group: &Path) -> Option<u64> {
        let number = |name: &&str| text(group.join(name)).trim().parse::<u64>().ok();
        let least = |names: &[&str]| names.iter().filter_map(number).min();
        let limit = least(&["memory.max", "memory.high", "memory.limit_in_bytes"])?;
        let used = least(&["memory.current", "memory.usage_in_bytes"])?;
        let stat = text(group.join("memory.stat"));
        // In version 1, the numbers without `total_` leave out the groups below this one.
        let pages = |kind| line(&stat, &format!("total_{kind}")).or_else(|| line(&stat, kind)).unwrap_or(0);
        let files = pages("active_file") + pages("inactive_file");
        Some(limit.saturating_sub(used.saturating_sub(files)))
    }

    let machine = line(&text("/proc/meminfo"), "MemAvailable:")?.saturating_mul(1024);
    // The line of a control group is "0::/path" in version 2 and "4:memory:/path" in version 1. A container may see its
    // own group at the root of the mount.
    let groups = text("/proc/self/cgroup");
    let of_groups = groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let root = match parts.next() {
            Some("") => "/sys/fs/cgroup",
            Some(kinds) if kinds.split(',').any(|kind| kind == "memory") => "/sys/fs/cgroup/memory",
            _ => return Vec::new(),
        };
        let group = Path::new(root).join(parts.next().unwrap_or_default().trim_start_matches('/'));
        group.ancestors().take_while(|group| group.starts_with(root)).filter_map(left).collect()
    });
    Some(of_groups.fold(machine, u64::min))
}

#[cfg(not(target_os = "linux"))]
pub(crate) const fn memory_left() -> Option<u64> {
    None
}

/// Returns how many ranks of this job run on this machine, from the variables of torchrun, Open
/// MPI, MPICH or Slurm (there, on the first node). Returns 1 if none of them is set.
pub(crate) fn ranks_here() -> u64 {
    const NAMES: [&str; 4] =
        ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"];
    let number = |name| std::env::var(name).ok()?.split(['(', ',']).next()?.parse().ok();
    NAMES.into_iter().find_map(number).unwrap_or(1).max(1)
}
