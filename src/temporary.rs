//! Temporary files and folders next to a target. They get the name of the target when they are whole.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The end of the names of temporary files and folders.
const SUFFIX: &str = ".twinbuf-tmp";

/// A new file or folder that no other call uses. It is in the folder of the target, because a rename does not cross file
/// systems. Its drop removes it, unless it was published.
///
/// On Unix its maker holds a lock on it, if the file system has locks. One without a lock was left by a killed process.
#[derive(Debug)]
pub(crate) struct Temporary {
    pub(crate) path: PathBuf,
    target: PathBuf,
    /// The beginning of the names of all that is made for the target.
    prefix: OsString,
    /// The file that it replaces, which has permissions.
    old: Option<Metadata>,
    lock: Option<File>,
}

impl Temporary {
    pub(crate) fn create(target: PathBuf, folder: bool) -> io::Result<Self> {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let old = fs::metadata(&target).ok();
        if !folder && old.as_ref().is_some_and(|old| !old.is_file()) {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "a device, pipe or folder has this name"));
        }
        let prefix =
            OsString::from_iter([".".as_ref(), target.file_name().unwrap_or_default(), ".".as_ref()]);
        loop {
            // The process ID alone is not unique: a process in another container or on another machine may have the
            // same.
            let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.subsec_nanos());
            // Relaxed: the counter gives each call of this process another number, and orders nothing else.
            let call = CALLS.fetch_add(1, Ordering::Relaxed);
            let unique = format!("{:x}-{call:x}-{nanos:x}{SUFFIX}", std::process::id());
            let path = target.with_file_name(OsString::from_iter([&*prefix, unique.as_ref()]));
            let mut options = File::options();
            options.write(true).create_new(true);
            // An older file may be private.
            #[cfg(unix)]
            if old.is_some() {
                std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            }
            // On Windows, `File::open` fails for a folder, so the file is `None`. Only Unix needs it, for the lock.
            let made = match folder {
                true => fs::create_dir(&path).map(|()| File::open(&path).ok()),
                false => options.open(&path).map(Some),
            };
            match made {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                // Before this call locked the file, another process mistook it for one that a killed process left: it has
                // locked or removed it.
                Ok(made)
                    if made.as_ref().is_some_and(|made| lock(made, true) == Err(true))
                        || matches!(path.try_exists(), Ok(false)) => {}
                made => return Ok(Self { path, target, prefix, old, lock: made? }),
            }
        }
    }

    /// Removes what killed processes left for the same target. Skips what cannot be opened or removed. Fails if there is
    /// another one whose maker lives; of several calls at one moment, one does not, if all have their turn within
    /// `wait_ms`. Does nothing if the system has no locks.
    pub(crate) fn alone(self, wait_ms: u128) -> io::Result<Self> {
        if self.others().next().is_none() {
            return Ok(self); // a call that comes later finds this one
        }
        // The calls take turns: otherwise each of two finds the other. A program may hold this lock of the folder for a
        // purpose of its own: go on without it then.
        let (turn, start) = (File::open(self.target.with_file_name(".")), Instant::now());
        let is_taken = |turn: &File| lock(turn, true) == Err(true);
        while start.elapsed().as_millis() < wait_ms && turn.as_ref().is_ok_and(is_taken) {
            std::thread::yield_now();
        }
        let found = self.others().try_for_each(|path| {
            // Lock it before it is removed: one who has just created it then finds it locked, and makes another.
            match File::open(&path).map(|file| (lock(&file, true), file)) {
                Ok((Ok(()), _locked)) => drop(fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path))),
                Ok((Err(true), _)) => return Err(io::Error::other("another writer has not finished")),
                _ => {}
            }
            Ok(())
        });
        let own = found.map(|()| self); // after an error, it is gone before the turn ends
        // A process that was forked meanwhile has a copy, and would keep the lock.
        let _ = turn.map(|turn| lock(&turn, false));
        own
    }

    /// Returns the paths of all others that are made for the same target.
    fn others(&self) -> impl Iterator<Item = PathBuf> {
        let all = fs::read_dir(self.target.with_file_name(".")).into_iter().flatten().flatten();
        all.map(|entry| (entry.file_name(), entry.path())).filter_map(|(name, path)| {
            let number = name.as_encoded_bytes().strip_prefix(self.prefix.as_encoded_bytes());
            let number = number.and_then(|rest| rest.strip_suffix(SUFFIX.as_bytes()));
            // With a dot, the target has a longer name.
            (number.is_some_and(|number| !number.contains(&b'.')) && !self.path.ends_with(&name))
                .then_some(path)
        })
    }

    /// Renames it to its target. Its bytes must be on the disk: otherwise a crash of the system could leave an empty file
    /// under the new name. The new file gets the permissions of the file that it replaces, also if that was removed
    /// meanwhile.
    pub(crate) fn publish(&self) -> io::Result<()> {
        // Sync the folders so that the names survive a crash of the system. Some file systems cannot: ignore the error.
        let sync = |path: PathBuf| File::open(path).and_then(|folder| folder.sync_all()).unwrap_or_default();
        let old = fs::metadata(&self.target).ok().or_else(|| self.old.clone());
        let _ = old.map(|old| fs::set_permissions(&self.path, old.permissions()));
        sync(self.path.clone());
        fs::rename(&self.path, &self.target)?;
        sync(self.target.with_file_name("."));
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // To remove what is in a folder takes a descriptor, and there may be no other. To remove an empty one takes none.
        self.lock = None;
        // After the rename these calls fail, because nothing has the temporary name any more.
        let removed = fs::remove_file(&self.path).or_else(|_| fs::remove_dir(&self.path));
        let _ = removed.or_else(|_| fs::remove_dir_all(&self.path));
    }
}

/// Checks that this process may write a file of `end` bytes: a write past `RLIMIT_FSIZE` raises a signal that, by
/// default, ends the process (setrlimit(2)).
///
/// # Errors
///
/// The limit in bytes, and `EFBIG`, if the file would be larger. Never outside Unix.
#[cfg(unix)]
pub fn check_size(end: u64) -> Result<(), (u64, io::Error)> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the kernel writes to `limit`, a live local.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    // The type of the limit depends on the system.
    let most = u64::try_from(i128::from(limit.rlim_cur)).unwrap_or(u64::MAX);
    let fits = end <= most || limit.rlim_cur == libc::RLIM_INFINITY;
    fits.then_some(()).ok_or_else(|| (most, io::Error::from_raw_os_error(libc::EFBIG)))
}

/// Does nothing: outside Unix there is no such limit.
///
/// # Errors
///
/// None.
#[cfg(not(unix))]
pub fn check_size(_: u64) -> Result<(), (u64, io::Error)> {
    Ok(())
}

/// Takes the lock of a file or folder. If `on` is false, releases it, for all processes that have a copy of `file`. Returns
/// `Err(true)` if another has it, and `Err(false)` if the file system has no locks.
#[cfg(unix)]
fn lock(file: &File, on: bool) -> Result<(), bool> {
    let how = if on { libc::LOCK_EX | libc::LOCK_NB } else { libc::LOCK_UN };
    // SAFETY: `file` is open, so the descriptor is valid.
    match unsafe { libc::flock(std::os::fd::AsRawFd::as_raw_fd(file), how) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error().kind() == ErrorKind::WouldBlock),
    }
}

#[cfg(not(unix))]
fn lock(_: &File, _: bool) -> Result<(), bool> {
    Err(false)
}
