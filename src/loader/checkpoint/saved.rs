//! Checkpoints as JSON files.

use std::fs;
use std::io;
use std::path::Path;

use twinbuf_mmap::{PartialEpoch, Plan};

use super::replace::replace;
use super::{Checkpoint, Identity, VERSION};
use crate::error::{BoxError, Error};

/// The fields of a [`Checkpoint`]. The fields for its plan and data set are `null` in one that marks the start.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename = "Checkpoint", deny_unknown_fields)]
pub(super) struct Saved {
    version: u32,
    epoch: u64,
    step: u64,
    trained: Option<u64>,
    #[serde(default)]
    before: Vec<PartialEpoch>,
    plan: Option<Plan>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    list: Option<u64>,
    record_bytes: Option<u64>,
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
            before: Vec::new(),
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
        let (plan, record_bytes, fingerprint) = (Some(plan), Some(record_bytes), Some(fingerprint));
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
        let identity = match (plan, record_bytes, fingerprint) {
            (Some(plan), Some(record_bytes), Some(fingerprint)) => {
                if before.iter().try_fold(0_u64, |sum, leg| sum.checked_add(leg.steps)).is_none() {
                    return Err("field `before`: wanted fewer than 2^64 steps".into());
                }
                let trained = (epoch, trained.unwrap_or_else(|| plan.steps_between(0..epoch, 0)));
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
