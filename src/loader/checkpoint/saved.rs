//! Saves and loads checkpoints as JSON files. A save replaces the file atomically, even if others save to it at the
//! same time.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use twinbuf_mmap::{PartialEpoch, Plan};

use super::{Checkpoint, Identity, VERSION};
use crate::error::{BoxError, Error};

/// The fields of a saved [`Checkpoint`]. In a checkpoint from [`Checkpoint::start`], the fields about the plan and the
/// data set are `null`. Only a field that an earlier version lacks may be missing: serde takes a missing `Option` for
/// `null`, unless another function deserializes it.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename = "Checkpoint", deny_unknown_fields)]
pub(super) struct Saved {
    version: u32,
    epoch: u64,
    step: u64,
    trained: Option<u64>,
    before: Option<Vec<PartialEpoch>>,
    #[serde(deserialize_with = "Option::deserialize")]
    plan: Option<Plan>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    list: Option<u64>,
    #[serde(deserialize_with = "Option::deserialize")]
    record_bytes: Option<u64>,
    #[serde(deserialize_with = "Option::deserialize")]
    fingerprint: Option<u64>,
}

impl From<Checkpoint> for Saved {
    fn from(checkpoint: Checkpoint) -> Self {
        let Checkpoint { identity, epoch, step } = checkpoint;
        let start = Self {
            version: VERSION,
            epoch,
            step,
            trained: None,
            before: Some(Vec::new()),
            plan: None,
            list: None,
            record_bytes: None,
            fingerprint: None,
        };
        let Some(Identity { plan, list, record_bytes, fingerprint, before, trained: (_, trained), version }) =
            identity
        else {
            return start;
        };
        let (plan, before) = (Some(plan), Some(before));
        let (record_bytes, fingerprint) = (Some(record_bytes), Some(fingerprint));
        Self { version, trained: Some(trained), before, plan, list, record_bytes, fingerprint, ..start }
    }
}

impl TryFrom<Saved> for Checkpoint {
    type Error = String;

    fn try_from(saved: Saved) -> Result<Self, String> {
        let Saved { version, epoch, step, trained, before, plan, list, record_bytes, fingerprint } = saved;
        if !(1..=VERSION).contains(&version) {
            return Err(format!("field `version`: wanted 1 to {VERSION}, found {version}"));
        }
        let missing = |field| format!("field `{field}`: wanted one in version {version}, found none");
        let before = before.or((version < 2).then(Vec::new)).ok_or_else(|| missing("before"))?;
        let identity = match (plan, record_bytes, fingerprint) {
            (Some(plan), Some(record_bytes), Some(fingerprint)) => {
                if before.iter().try_fold(0_u64, |sum, leg| sum.checked_add(leg.steps)).is_none() {
                    return Err("field `before`: wanted fewer than 2^64 steps".into());
                }
                let trained = trained.or_else(|| (version < 3).then(|| plan.steps_between(0..epoch, 0)));
                let trained = (epoch, trained.ok_or_else(|| missing("trained"))?);
                Some(Identity { plan, list, record_bytes, fingerprint, before, trained, version })
            }
            (None, None, None) if epoch == 0 && before.is_empty() => None,
            _ => {
                return Err("wanted `plan`, `record_bytes` and `fingerprint`, found some of them null".into());
            }
        };
        Ok(Self { identity, epoch, step })
    }
}

impl Checkpoint {
    /// Writes the checkpoint to a JSON file at `path`.
    ///
    /// An existing file is replaced atomically: after a crash of the program or the system, the file holds the old
    /// checkpoint or the new one. Several threads and processes may save to the same path at the same time. Each
    /// call writes a temporary file `.NAME.*.twinbuf-tmp` in the same folder. On Unix, a call also removes the
    /// temporary files of killed processes.
    ///
    /// # Errors
    ///
    /// [`Error::CheckpointFile`] if the file or the temporary file cannot be written. The file at `path` is then
    /// unchanged.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let write = || -> Result<(), BoxError> {
            let mut text = serde_json::to_string(self)?;
            text.push('\n');
            Ok(replace(path, text.as_bytes())?)
        };
        write().map_err(|source| Error::CheckpointFile { path: path.to_path_buf(), source })
    }

    /// Reads a checkpoint from a file written by [`save`](Self::save). Returns [`start`](Self::start) if the file
    /// does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::CheckpointFile`] if the file cannot be read or is not a checkpoint.
    pub fn load_or_start(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let error = |source: BoxError| Error::CheckpointFile { path: path.to_path_buf(), source };
        match fs::read(path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|source| error(source.into())),
            Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(Self::start()),
            Err(source) => Err(error(source.into())),
        }
    }
}

/// The end of the names of temporary files.
const SUFFIX: &str = ".twinbuf-tmp";

/// Writes `bytes` to a temporary file, then renames it to `path`.
///
/// The temporary file is in the same folder, because a rename does not cross file systems. Its bytes are on the disk
/// before the rename, and the folder after it. On Unix its writer holds a lock on it. A temporary file without a lock
/// was left by a process that was killed, and is removed.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let wanted = || io::Error::new(io::ErrorKind::InvalidInput, "wanted the path of a file");
    let mut prefix = OsString::from(".");
    prefix.push(path.file_name().ok_or_else(wanted)?);
    prefix.push(".");
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let temporary = Temporary::create(folder, &prefix)?;
    (&temporary.file).write_all(bytes)?;
    // Sync before the rename: otherwise a crash of the system could leave an empty file under the new name.
    temporary.file.sync_all()?;
    fs::rename(&temporary.path, path)?;
    #[cfg(unix)]
    {
        // Sync the folder so that the rename survives a crash of the system. Some file systems cannot: ignore the
        // error.
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
        remove_abandoned(folder, &prefix);
    }
    Ok(())
}

/// A new file that no other call uses. Its drop removes the file, unless the file was renamed.
struct Temporary {
    path: PathBuf,
    file: File,
}

impl Temporary {
    fn create(folder: &Path, prefix: &OsString) -> io::Result<Self> {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        loop {
            // The process ID alone is not unique: a process in another container or on another machine may have the
            // same.
            let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.subsec_nanos());
            // Relaxed: the counter gives each call of this process another number, and orders nothing else.
            let call = CALLS.fetch_add(1, Ordering::Relaxed);
            let mut name = prefix.clone();
            name.push(format!("{:x}-{call:x}-{nanos:x}{SUFFIX}", process::id()));
            let path = folder.join(name);
            let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                file => file?,
            };
            // Before this call locks the file, another process may mistake it for one that a killed process left, lock
            // it and remove it.
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
        // After the rename this call fails, because no file has the temporary name any more.
        let _ = fs::remove_file(&self.path);
    }
}

/// Takes the file's lock. It is released when the file is closed or the process ends. Fails if the lock is taken or the
/// file system has no locks.
#[cfg(unix)]
fn lock(file: &File) -> io::Result<()> {
    use std::os::fd::AsRawFd as _;
    // SAFETY: `file` is open, so the descriptor is valid.
    match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Removes temporary files whose writers were killed. Skips files that cannot be opened or removed.
#[cfg(unix)]
fn remove_abandoned(folder: &Path, prefix: &OsString) {
    let prefix = prefix.as_encoded_bytes();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.as_encoded_bytes();
        if !name.starts_with(prefix) || !name.ends_with(SUFFIX.as_bytes()) {
            continue;
        }
        // Lock the file before it is removed: a writer that has just created it then finds it locked, and makes
        // another.
        match File::open(entry.path()) {
            Ok(file) if lock(&file).is_ok() => drop(fs::remove_file(entry.path())),
            _ => {}
        }
    }
}
