//! How much of a data set stays in the page cache, and how much memory the rest goes through.

use std::ops::Range;

use super::direct::Direct;
use crate::ranges::Ranges;
use crate::{Error, Plan, ReadMode};

/// Memory for reads ahead past the page cache and, as much, for what is needed now and was not asked for: what the disk has in
/// flight, twice.
const LANE: u64 = 16 << 20;

/// The least memory for reads past the page cache. A process that has less left reads through it.
const LEAST: u64 = 1 << 20;

/// How a data set and the memory are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Bytes of the files that the plan reads.
    pub(super) data: u64,
    /// The part of `data` that is read through the page cache, in bytes, and where it ends, counted from the front of
    /// all files.
    pub(super) cached: u64,
    pub(super) until: u64,
    /// Bytes of memory for reads ahead past it, and for those that are needed now.
    pub(super) ahead: u64,
    pub(super) now: u64,
    /// Whether whole windows fit.
    pub(super) windows: bool,
}

impl Share {
    /// All of it through the page cache.
    pub(super) const fn all(data: u64) -> Self {
        Self { data, cached: data, until: u64::MAX, ahead: 0, now: 0, windows: true }
    }

    /// All of it past the page cache.
    const fn none(data: u64, window: u64) -> Self {
        Self { data, cached: 0, until: 0, ahead: room(window).saturating_add(LANE), now: LANE, windows: true }
    }

    /// As much as fits through the page cache, if `left` bytes of memory are left to this many readers.
    fn fitting(data: u64, from: u64, window: u64, left: u64, readers: u64) -> Self {
        let most = left - left / 16;
        let lane = LANE.min(most / 16 / readers);
        if data <= most || lane < LEAST {
            return Self::all(data);
        }
        let most = most - 2 * lane * readers;
        let windows = room(window).saturating_mul(readers);
        // Chunks of a window that stay in the page cache need no room in it: with c bytes of n there,
        // c + windows * (n - c) / n = most.
        let (cached, windows) = match most.checked_sub(windows) {
            Some(rest) if windows < data => (scale(data, rest, data - windows), windows),
            _ => (most, 0),
        };
        let ahead = scale(windows / readers, data - cached, data).saturating_add(lane);
        let until = from.saturating_add(cached);
        Self { data, cached, until, ahead, now: lane, windows: windows > 0 }
    }
}

/// Memory for windows of this many bytes: chunks are requested an eighth of a window before they are needed, and given
/// back in order when all of their records are taken.
const fn room(window: u64) -> u64 {
    window.saturating_add(window / 8)
}

/// `number * of / whole`.
fn scale(number: u64, of: u64, whole: u64) -> u64 {
    let product = u128::from(number) * u128::from(of) / u128::from(whole.max(1));
    u64::try_from(product).unwrap_or(u64::MAX)
}

/// Decides how `ranges` are read, and opens the files for it where some are read past the page cache.
pub(super) fn decide(
    ranges: &Ranges,
    plan: &Plan,
    mode: ReadMode,
    left: Option<u64>,
) -> Result<(Share, Vec<Direct>), Error> {
    let extent = extent(ranges, plan);
    let data = extent.end - extent.start;
    let window = match plan.shuffle() {
        crate::Shuffle::Window { chunk_records: chunk, window_chunks: chunks } => {
            chunk.saturating_mul(chunks).saturating_mul(ranges.stride()).min(data)
        }
        _ => 0,
    };
    let share = match (mode, left) {
        (ReadMode::Pread, _) | (ReadMode::Auto, None) => return Ok((Share::all(data), Vec::new())),
        (ReadMode::Direct, _) => Share::none(data, window),
        (ReadMode::Auto, Some(left)) => {
            Share::fitting(data, extent.start, window, left, crate::limit::ranks_here())
        }
    };
    if share.cached == data && mode == ReadMode::Auto {
        return Ok((Share::all(data), Vec::new()));
    }
    let files = Direct::all(ranges.shards(), mode)?;
    Ok(if files.is_empty() { (Share::all(data), files) } else { (share, files) })
}

/// The bytes of the plan's records, counted from the front of all files.
fn extent(ranges: &Ranges, plan: &Plan) -> Range<u64> {
    let place = |record: u64| {
        let at = ranges.locate(record.min(ranges.len() - 1))?;
        let start = ranges.shards()[at.shard].before.saturating_add(at.offset);
        Some(start..start.saturating_add(at.len))
    };
    let range = plan.range();
    let first = place(range.start).unwrap_or_default();
    first.start..place(range.end.saturating_sub(1)).unwrap_or(first).end
}
