//! Saves and loads checkpoints as JSON files. A save replaces the file atomically, even if others save to it at the
//! same time.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use twinbuf_mmap::{PartialEpoch, Plan};

use super::{Checkpoint, Identity};
use crate::error::{BoxError, Error};
use crate::temporary::{Temporary, check_size};

/// The version of the format.
const VERSION: u32 = 4;

/// The fields of a saved [`Checkpoint`]. In a checkpoint from [`Checkpoint::start`], the fields about the plan and the
/// data set are `null`. serde takes a missing `Option` for `null`, unless another function deserializes it.
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
    fn from(Checkpoint { identity, epoch, step }: Checkpoint) -> Self {
        let own = identity.as_ref();
        Self {
            version: VERSION,
            epoch,
            step,
            trained: own.map(|own| own.trained.1),
            before: Some(own.map(|own| own.before.clone()).unwrap_or_default()),
            plan: own.map(|own| own.plan.clone()),
            list: own.and_then(|own| own.list),
            record_bytes: own.map(|own| own.record_bytes),
            fingerprint: own.map(|own| own.fingerprint),
        }
    }
}

impl TryFrom<Saved> for Checkpoint {
    type Error = String;

    fn try_from(saved: Saved) -> Result<Self, String> {
        let Saved { version, epoch, step, trained, before, plan, list, record_bytes, fingerprint } = saved;
        if version != VERSION {
            return Err(format!("field `version`: wanted {VERSION}, found {version}"));
        }
        let missing = |field| format!("field `{field}`: wanted one in version {version}, found none");
        let before = before.ok_or_else(|| missing("before"))?;
        let identity = match (plan, record_bytes, fingerprint) {
            (Some(plan), Some(record_bytes), Some(fingerprint)) => {
                if before.iter().try_fold(0_u64, |sum, leg| sum.checked_add(leg.steps)).is_none() {
                    return Err("field `before`: wanted fewer than 2^64 steps".into());
                }
                let trained = (epoch, trained.ok_or_else(|| missing("trained"))?);
                Some(Identity { plan, list, record_bytes, fingerprint, before, trained })
            }
            (None, None, None) if before.is_empty() => None,
            _ => Err("wanted `plan`, `record_bytes` and `fingerprint`, found some of them null")?,
        };
        Ok(Self { identity, epoch, step })
    }
}

impl Checkpoint {
    /// Writes the checkpoint to a JSON file at `path`.
    ///
    /// An existing file is replaced atomically: after a crash of the program or the system, the file holds the old
    /// checkpoint or the new one. Several threads and processes may save to the same path at the same time. Each call
    /// writes a temporary file `.NAME.*.twinbuf-tmp` in the same folder. On Unix, calls also remove the temporary files
    /// that killed processes left, if the file system has locks. The new file gets the permissions of the file that it
    /// replaces. If `path` is a link, the file replaces the link.
    ///
    /// # Errors
    ///
    /// [`Error::CheckpointFile`] if the file or the temporary file cannot be written, or if `path` is a folder, device or
    /// pipe. What is at `path` is then unchanged.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        let path = path.as_ref();
        let write = || -> Result<(), BoxError> {
            let text = serde_json::to_string(self)? + "\n";
            let temporary = Temporary::create(path.to_path_buf(), false)?;
            let mut file = File::create(&temporary.path)?;
            check_size(text.len() as u64).map_err(|(_, error)| error)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            temporary.publish()?;
            let _ = temporary.alone(0); // others may save at the same time
            Ok(())
        };
        write().map_err(|source| Error::CheckpointFile { path: path.to_path_buf(), source })
    }

    /// Reads a checkpoint from a file written by [`save`](Self::save). Returns [`start`](Self::start) if the file
    /// does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::CheckpointFile`] if the file cannot be read or is not a checkpoint, or if `path` is a link to nothing.
    pub fn load_or_start(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let error = |source: BoxError| Error::CheckpointFile { path: path.to_path_buf(), source };
        match fs::read(path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|source| error(source.into())),
            // Not if there is a link: what it leads to may be on a disk that is not mounted.
            Err(e) if e.kind() == io::ErrorKind::NotFound && !path.is_symlink() => Ok(Self::start()),
            Err(source) => Err(error(source.into())),
        }
    }
}
