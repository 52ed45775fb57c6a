//! Handles: numbers of places in one table. A number is never given twice, so a stale handle is found, not followed.

use crate::error::{Failure, TWINBUF_ERROR_HANDLE, TWINBUF_ERROR_NULL, TWINBUF_ERROR_OTHER};

/// The low bits of a handle are its place plus 1, so that no handle is 0. The others count the uses of the place.
/// With 64 bits: 2 million handles at a time, 2^43 uses of each place.
const PLACE_BITS: u32 = usize::BITS / 3;
const PLACES: usize = (1 << PLACE_BITS) - 1;

/// What handles stand for.
pub(crate) struct Table<E> {
    /// Each place with its last handle, and the entry that the handle stands for.
    pub(crate) places: Vec<(usize, Option<E>)>,
    /// The next handle of each empty place.
    pub(crate) unused: Vec<usize>,
}

impl<E> Table<E> {
    /// Returns a handle for `entry`, or an error if all places are taken.
    pub(crate) fn insert(&mut self, entry: E) -> Result<usize, Failure> {
        let most = || format!("wanted at most {PLACES} handles at a time: release batches");
        let new = Some(self.places.len() + 1).filter(|&id| id <= PLACES);
        let id = self.unused.pop().or(new).ok_or_else(|| Failure::new(TWINBUF_ERROR_OTHER, most()))?;
        let at = (id & PLACES) - 1;
        self.places.resize_with(self.places.len().max(at + 1), || (0, None));
        self.places[at] = (id, Some(entry));
        Ok(id)
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
        let entry = match (id & PLACES).checked_sub(1).and_then(|at| self.places.get_mut(at)) {
            Some((last, entry @ Some(_))) if *last == id => entry,
            _ if id == 0 => return Err(wrong(TWINBUF_ERROR_NULL, "NULL")),
            _ => return Err(wrong(TWINBUF_ERROR_HANDLE, "one that was released or freed")),
        };
        let found = look(entry).ok_or_else(|| wrong(TWINBUF_ERROR_HANDLE, "that of something else"));
        // A place whose uses no longer fit into a handle stays empty.
        self.unused.extend(if entry.is_none() { id.checked_add(PLACES + 1) } else { None });
        found
    }
}
