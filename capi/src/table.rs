//! Handles: numbers of places in one table. A number is never given twice, so a stale handle is found, not followed.

use crate::error::{Failure, TWINBUF_ERROR_HANDLE, TWINBUF_ERROR_NULL, TWINBUF_ERROR_OTHER};

/// The low bits of a handle are its place plus 1, so that no handle is 0. The others count the uses of the place.
/// With 64 bits: 2 million handles at a time, 2^43 uses of each place.
const PLACE_BITS: u32 = usize::BITS / 3;
const PLACES: usize = (1 << PLACE_BITS) - 1;

/// What handles stand for.
pub(crate) struct Table<E> {
    /// The places, each with the number of its earlier uses.
    pub(crate) all: Vec<(usize, Option<E>)>,
    pub(crate) free: Vec<usize>,
}

impl<E> Table<E> {
    /// Returns a handle for `entry`, or an error if all places are taken.
    pub(crate) fn insert(&mut self, entry: E) -> Result<usize, Failure> {
        let at = self.free.pop().unwrap_or(self.all.len());
        if at >= PLACES {
            let full = format!("wanted at most {PLACES} handles at a time: release batches");
            return Err(Failure::new(TWINBUF_ERROR_OTHER, full));
        }
        if at == self.all.len() {
            self.all.push((0, None));
        }
        self.all[at].1 = Some(entry);
        Ok((self.all[at].0 << PLACE_BITS) | (at + 1))
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
        let at = (id & PLACES).checked_sub(1).ok_or_else(|| wrong(TWINBUF_ERROR_NULL, "NULL"))?;
        let (uses, entry) = match self.all.get_mut(at) {
            Some((uses, entry @ Some(_))) if id >> PLACE_BITS == *uses => (uses, entry),
            _ => return Err(wrong(TWINBUF_ERROR_HANDLE, "one that was released or freed")),
        };
        let found = look(entry).ok_or_else(|| wrong(TWINBUF_ERROR_HANDLE, "that of something else"));
        if entry.is_none() {
            *uses += 1;
            // A place whose uses no longer fit into a handle stays empty.
            if *uses <= usize::MAX >> PLACE_BITS {
                self.free.push(at);
            }
        }
        found
    }
}
