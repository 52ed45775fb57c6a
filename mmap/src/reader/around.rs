//! Reading around: what to prefetch around small records that are scattered over files that fit in memory.
//!
//! All bytes of such files are needed sooner or later, and a disk reads a stretch of 128 KiB in nearly the time of a
//! record. Each stretch is asked for once an epoch.

use std::ops::Range;

use crate::ranges::Ranges;

/// Bytes that are asked for together: what Linux itself reads around a page that is touched (`read_ahead_kb`, by default).
pub(super) const STRETCH: u64 = 128 << 10;

/// Records of a stretch that an epoch has to read for it to pay to ask for all of it.
const WORTH: u64 = 2;

/// The stretches of all files that were requested in this epoch.
#[derive(Debug, Default)]
pub(super) struct Around(Vec<u64>);

impl Around {
    pub(super) fn new(ranges: &Ranges) -> Self {
        let bytes = ranges.shards().last().map_or(0, |shard| shard.before.saturating_add(shard.bytes.end));
        let words = usize::try_from(bytes / STRETCH / 64).unwrap_or(0) + 1;
        Self(vec![0; words])
    }

    /// Whether reading around pays for records at every `stride` bytes if an epoch reads one of `share` records.
    pub(super) const fn pays(stride: u64, share: u64) -> bool {
        STRETCH / stride >= WORTH.saturating_mul(share)
    }

    /// Another epoch begins.
    pub(super) fn clear(&mut self) {
        self.0.fill(0);
    }

    /// The stretches around `bytes` that have not been asked for, cut at `file`. All files follow each other, this one from
    /// `before` on.
    pub(super) fn missing(
        &mut self,
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

    /// Whether this one has not been asked for.
    fn first(&mut self, stretch: u64) -> bool {
        let word = usize::try_from(stretch / 64).ok().and_then(|index| self.0.get_mut(index));
        let Some(word) = word else { return true };
        let bit = 1 << (stretch % 64);
        let first = *word & bit == 0;
        *word |= bit;
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stretch_is_asked_for_once_an_epoch() {
        let file = 1000..10 * STRETCH + 77;
        let around = std::cell::RefCell::new(Around(vec![0; 4]));
        let before = 3 * STRETCH - 500;
        let ask = |bytes: Range<u64>| around.borrow_mut().missing(before, &bytes, &file).collect::<Vec<_>>();
        around.borrow_mut().clear();
        assert_eq!(ask(5000..5001), std::slice::from_ref(&(1000..STRETCH + 500)));
        assert_eq!(ask(1000..STRETCH + 500), []);
        assert_eq!(
            ask(STRETCH + 499..STRETCH + 501),
            std::slice::from_ref(&(STRETCH + 500..2 * STRETCH + 500))
        );
        let end = file.end;
        assert_eq!(ask(end - 1..end), std::slice::from_ref(&(9 * STRETCH + 500..end)));
        assert_eq!(ask(end - 1..end), []);
        around.borrow_mut().clear();
        assert_eq!(ask(2000..2001), std::slice::from_ref(&(1000..STRETCH + 500)));
    }

    #[test]
    fn it_pays_for_small_records_of_which_many_are_read() {
        assert!(Around::pays(4096, 1) && Around::pays(4096, 16) && !Around::pays(4096, 17));
        assert!(Around::pays(64 << 10, 1) && !Around::pays((64 << 10) + 1, 1));
        assert!(!Around::pays(u64::MAX, 1) && !Around::pays(1, u64::MAX));
    }
}
