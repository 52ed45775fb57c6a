//! Replaces a file in one step, whoever else does so at the same time.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The end of the names of temporary files.
const SUFFIX: &str = ".twinbuf-tmp";

/// Writes `bytes` to a temporary file, then renames it to `path`.
///
/// The temporary file is in the same folder, because a rename does not cross file systems. Its bytes are on the disk
/// before the rename, and the folder after it. On Unix its writer holds a lock on it: a temporary file without one was
/// left by a process that was killed, and is removed.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let wanted = || io::Error::new(io::ErrorKind::InvalidInput, "wanted the path of a file");
    let mut prefix = OsString::from(".");
    prefix.push(path.file_name().ok_or_else(wanted)?);
    prefix.push(".");
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let temporary = Temporary::create(folder, &prefix)?;
    (&temporary.file).write_all(bytes)?;
    // Before the rename, or a crash of the system could leave an empty file under the new name.
    temporary.file.sync_all()?;
    fs::rename(&temporary.path, path)?;
    #[cfg(unix)]
    {
        // The file has its new name; where a folder cannot be synced, a crash of the system may undo that.
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
        remove_abandoned(folder, &prefix);
    }
    Ok(())
}

/// A file that no other call has. It is removed when this is dropped, unless it has another name by then.
struct Temporary {
    path: PathBuf,
    file: File,
}

impl Temporary {
    fn create(folder: &Path, prefix: &OsString) -> io::Result<Self> {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        loop {
            // Another call may have the process's number: in another container, or on another machine.
            let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.subsec_nanos());
            // Relaxed: a number that no other call of this process gets.
            let call = CALLS.fetch_add(1, Ordering::Relaxed);
            let mut name = prefix.clone();
            name.push(format!("{:x}-{call:x}-{nanos:x}{SUFFIX}", process::id()));
            let path = folder.join(name);
            let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                file => file?,
            };
            // Between the two calls another process may have taken it for one that was left.
            #[cfg(unix)]
            {
                let lost = lock(&file).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
                if lost || !path.exists() {
                    continue;
                }
            }
            return Ok(Self { path, file });
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // After the rename there is no such name.
        let _ = fs::remove_file(&self.path);
    }
}

/// Takes the file's lock. It is released when the file is closed or the process ends. Fails if the lock is taken or the
/// file system has no locks.
#[cfg(unix)]
fn lock(file: &File) -> io::Result<()> {
    use std::os::fd::AsRawFd as _;
    // SAFETY: the descriptor is that of an open file.
    match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Removes temporary files whose writers were killed. What cannot be looked at or removed is left.
#[cfg(unix)]
fn remove_abandoned(folder: &Path, prefix: &OsString) {
    let prefix = prefix.as_encoded_bytes();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.as_encoded_bytes();
        if !name.starts_with(prefix) || !name.ends_with(SUFFIX.as_bytes()) {
            continue;
        }
        // Its lock keeps a writer that created it just now from using it.
        match File::open(entry.path()) {
            Ok(file) if lock(&file).is_ok() => drop(fs::remove_file(entry.path())),
            _ => {}
        }
    }
}
