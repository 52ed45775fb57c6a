//! Handles: numbers of entries in one table. A number is never given twice, so a stale handle is found, not followed.

use std::collections::BTreeMap;

use crate::error::{Failure, TWINBUF_ERROR_HANDLE, TWINBUF_ERROR_NULL, TWINBUF_ERROR_OTHER};

/// What handles stand for, and the last handle that was given. The newest entries come and go: they are at the end of the
/// map, where that moves no others.
pub(crate) struct Table<E>(BTreeMap<usize, Option<E>>, usize);

impl<E> Table<E> {
    pub(crate) const fn new() -> Self {
        Self(BTreeMap::new(), 0)
    }

    /// Returns a handle for `entry`, or an error if all numbers were given.
    pub(crate) fn insert(&mut self, entry: E) -> Result<usize, Failure> {
        let full = || Failure::new(TWINBUF_ERROR_OTHER, "wanted another handle, found all numbers given");
        self.1 = self.1.checked_add(1).ok_or_else(full)?;
        self.0.insert(self.1, Some(entry));
        Ok(self.1)
    }

    /// Returns what `look` returns for the entry of a handle. `None` becomes an error. If `look` takes the entry out, the
    /// handle ends.
    pub(crate) fn with<T>(
        &mut self,
        id: usize,
        wanted: &str,
        look: impl FnOnce(&mut Option<E>) -> Option<T>,
    ) -> Result<T, Failure> {
        let wrong = |code, found| Failure::new(code, format!("wanted the handle of {wanted}, found {found}"));
        let Some(entry) = self.0.get_mut(&id) else {
            let released = wrong(TWINBUF_ERROR_HANDLE, "one that was released or freed");
            return Err(if id == 0 { wrong(TWINBUF_ERROR_NULL, "NULL") } else { released });
        };
        let found = look(entry).ok_or_else(|| wrong(TWINBUF_ERROR_HANDLE, "that of something else"));
        if entry.is_none() {
            self.0.remove(&id);
        }
        found
    }
}
