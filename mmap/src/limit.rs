//! How many files may stay open, and how much memory is left.

/// How many of `files` files to keep open; the others are opened for each use.
///
/// A quarter of the descriptors that the process may have. The others are for direct reads (a second descriptor for
/// each file) and for the rest of the program. The soft limit is raised up to the hard one.
#[cfg(unix)]
pub(crate) fn kept(files: usize) -> usize {
    const SHARE: libc::rlim_t = 4;
    /// For the rest of the program, in addition to the files.
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

/// Bytes of memory that this process can still use, including memory that the page cache would give up: the machine's,
/// or what a control group has left if that is less. `None` if unknown.
#[cfg(target_os = "linux")]
pub(crate) fn memory_left() -> Option<u64> {
    use std::path::Path;

    /// The files of a group in each version: what it has, its limits, and the lines of `memory.stat` that count its pages
    /// of files.
    type Names = (&'static str, &'static str, &'static [&'static str], [&'static str; 2]);
    const ROOT: &str = "/sys/fs/cgroup";
    const V2: Names =
        (ROOT, "memory.current", &["memory.max", "memory.high"], ["active_file", "inactive_file"]);
    const V1: Names = (
        "/sys/fs/cgroup/memory",
        "memory.usage_in_bytes",
        &["memory.limit_in_bytes"],
        ["total_active_file", "total_inactive_file"],
    );

    fn text(path: impl AsRef<Path>) -> String {
        std::fs::read_to_string(path).unwrap_or_default()
    }
    fn number(path: impl AsRef<Path>) -> Option<u64> {
        text(path).trim().parse().ok()
    }
    /// The number behind a name, in a file of such lines.
    fn line(text: &str, name: &str) -> Option<u64> {
        let mut lines = text.lines().map(str::split_whitespace);
        lines.find_map(|mut words| if words.next()? == name { words.next()?.parse().ok() } else { None })
    }
    fn left(group: &Path, (_, used, limits, files): &Names) -> Option<u64> {
        let limit = limits.iter().filter_map(|limit| number(group.join(limit))).min()?;
        let stat = text(group.join("memory.stat"));
        let files: u64 = files.iter().filter_map(|name| line(&stat, name)).sum();
        Some(limit.saturating_sub(number(group.join(used))?.saturating_sub(files)))
    }

    let machine = line(&text("/proc/meminfo"), "MemAvailable:")?.saturating_mul(1024);
    // A line of a control group is "0::/path" in version 2, "4:memory:/path" in version 1. A container may see its own
    // group at the root of the mount.
    let groups = text("/proc/self/cgroup");
    let of_groups = groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let names = match parts.next() {
            Some("") => V2,
            Some(kinds) if kinds.split(',').any(|kind| kind == "memory") => V1,
            _ => return Vec::new(),
        };
        let group = Path::new(names.0).join(parts.next().unwrap_or_default().trim_start_matches('/'));
        let all = group.ancestors().take_while(|group| group.starts_with(names.0));
        all.filter_map(|group| left(group, &names)).collect()
    });
    Some(of_groups.fold(machine, u64::min))
}

#[cfg(not(target_os = "linux"))]
pub(crate) const fn memory_left() -> Option<u64> {
    None
}

/// Processes of this job on this machine that read like this one, as launchers tell: torchrun, Open MPI, MPICH, Slurm. 1 if
/// none does.
pub(crate) fn ranks_here() -> u64 {
    const NAMES: [&str; 4] =
        ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"];
    let number = |name| std::env::var(name).ok()?.split(['(', ',']).next()?.parse().ok();
    NAMES.into_iter().find_map(number).unwrap_or(1).max(1)
}
