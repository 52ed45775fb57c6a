//! Reading around: what to ask for beside small records that are scattered over files which fit in memory.
//!
//! All bytes of such files are needed sooner or later, and a disk that answers so many requests a second brings a stretch
//! of 128 KiB in nearly the time of a record. Each stretch is asked for once an epoch.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes that are asked for together: what Linux itself reads around a page that is touched (`read_ahead_kb`, by default).
pub(crate) const STRETCH: u64 = 128 << 10;

/// Records of a stretch that an epoch has to read, so that it pays to ask for all of it.
const WORTH: u64 = 2;

/// Which stretches of all files have been asked for in this epoch. Only hints depend on it, so every access is relaxed.
#[derive(Debug)]
pub(crate) struct Around {
    asked: Vec<AtomicUsize>,
    /// Names the epoch.
    epoch: AtomicUsize,
}

impl Around {
    /// For files of so many bytes together. `None` if that is more than can be counted here.
    pub(crate) fn new(bytes: u64) -> Option<Self> {
        let words = usize::try_from(bytes / STRETCH / u64::from(usize::BITS)).ok()?.checked_add(1)?;
        let asked = (0..words).map(|_| AtomicUsize::new(0)).collect();
        Some(Self { asked, epoch: AtomicUsize::new(0) })
    }

    /// Whether it pays for records at every `stride` bytes, of which an epoch reads one of `share`.
    pub(crate) const fn pays(stride: u64, share: u64) -> bool {
        STRETCH / stride >= WORTH.saturating_mul(share)
    }

    /// Forgets what was asked for in another epoch.
    pub(crate) fn begin(&self, epoch: usize) {
        if self.epoch.swap(epoch, Relaxed) != epoch {
            self.asked.iter().for_each(|word| word.store(0, Relaxed));
        }
    }

    /// The stretches around `bytes` that nobody has asked for, cut at `file`. All files lie one behind the other, this
    /// one from `before` on.
    pub(crate) fn missing(
        &self,
        before: u64,
        bytes: &Range<u64>,
        file: &Range<u64>,
    ) -> impl Iterator<Item = Range<u64>> {
        let stretches = (before + bytes.start) / STRETCH..(before + bytes.end).div_ceil(STRETCH);
        let (start, end) = (file.start, file.end);
        stretches.filter(|&stretch| self.first(stretch)).filter_map(move |stretch| {
            let at =
                (stretch * STRETCH).saturating_sub(before)..((stretch + 1) * STRETCH).saturating_sub(before);
            let at = at.start.max(start)..at.end.min(end);
            (!at.is_empty()).then_some(at)
        })
    }

    /// Whether nobody has asked for this one.
    fn first(&self, stretch: u64) -> bool {
        let bits = u64::from(usize::BITS);
        let word = usize::try_from(stretch / bits).ok().and_then(|index| self.asked.get(index));
        word.is_none_or(|word| word.fetch_or(1 << (stretch % bits), Relaxed) >> (stretch % bits) & 1 == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stretch_is_asked_for_once_an_epoch() {
        let file = 1000..10 * STRETCH + 77;
        let around = Around::new(3 * STRETCH + file.end).unwrap();
        let before = 3 * STRETCH - 500;
        let ask = |bytes: Range<u64>| around.missing(before, &bytes, &file).collect::<Vec<_>>();
        around.begin(1);
        assert_eq!(ask(5000..5001), std::slice::from_ref(&(1000..STRETCH + 500)));
        assert_eq!(ask(1000..STRETCH + 500), []);
        assert_eq!(
            ask(STRETCH + 499..STRETCH + 501),
            std::slice::from_ref(&(STRETCH + 500..2 * STRETCH + 500))
        );
        let end = file.end;
        assert_eq!(ask(end - 1..end), std::slice::from_ref(&(9 * STRETCH + 500..end)));
        around.begin(1);
        assert_eq!(ask(end - 1..end), []);
        around.begin(2);
        assert_eq!(ask(2000..2001), std::slice::from_ref(&(1000..STRETCH + 500)));
    }

    #[test]
    fn it_pays_for_small_records_of_which_many_are_read() {
        assert!(Around::pays(4096, 1) && Around::pays(4096, 16) && !Around::pays(4096, 17));
        assert!(Around::pays(64 << 10, 1) && !Around::pays((64 << 10) + 1, 1));
        assert!(!Around::pays(u64::MAX, 1) && !Around::pays(1, u64::MAX));
    }
}
