//! Records mixed within windows of several chunks: the order behind [`Shuffle::Window`](super::Shuffle::Window).
//!
//! 1. The records form a ring, which begins at a record that differs each epoch. So do the borders of the chunks into
//!    which the ring is cut.
//! 2. The chunks are laid out in rows, as many to a row as there are windows. A window takes one chunk from each row,
//!    so its chunks lie evenly over the whole ring; each row is rotated by a random number, and the columns are
//!    permuted. The last row may be shorter, and is permuted separately: its chunks go to the first windows.
//! 3. A separate permutation mixes the positions inside each window.
//!
//! Every step can be computed for one position alone. All chunks but the last of the ring are equally long, so the
//! borders of windows follow from their numbers.

use std::ops::Range;

use super::chunks::Slots;
use super::permute::{Key, Permutation};

/// The order of one epoch.
#[derive(Clone, Debug)]
pub(super) struct Windows {
    records: u64,
    /// Records in a chunk.
    chunk: u64,
    /// The record at which the ring begins.
    shift: u64,
    /// The number of windows, which is that of the columns.
    windows: u64,
    /// Rows, the last one included: chunks in one of the larger windows, at least 1.
    rows: u64,
    /// The number of larger windows, at least 1. The others have one chunk less.
    larger: u64,
    slots: Slots,
    key: Key,
    /// The window of the last position.
    current: Option<Window>,
}

/// One window.
#[derive(Clone, Debug)]
struct Window {
    positions: Range<u64>,
    order: Permutation,
    column: Column,
}

/// The chunks of one window.
#[derive(Clone, Copy, Debug)]
struct Column {
    /// The slot of the first chunk.
    first: u64,
    /// The place in every row before the row is rotated.
    place: u64,
    /// The chunk from the last row, if the window is one of the larger.
    last: u64,
}

impl Windows {
    /// For `records` records in chunks of `chunk`, with at most `most` chunks to a window; all at least 1.
    pub(super) fn new(records: u64, chunk: u64, most: u64, seed: u64, epoch: u64) -> Self {
        let key = Key::new(seed, epoch);
        let chunks = records.div_ceil(chunk);
        let windows = chunks.div_ceil(most);
        let rows = chunks.div_ceil(windows);
        let larger = chunks - (rows - 1) * windows;
        let shift = key.of(Role::Shift as u64).below(records);
        // The last chunk of the ring is the last of the last row.
        let window = last_row(key, larger).inverse(larger - 1);
        let slots = Slots::new(records, chunk, window * rows + rows - 1);
        Self { records, chunk, shift, windows, rows, larger, slots, key, current: None }
    }

    /// The record at `position`.
    pub(super) fn record(&mut self, position: u64) -> u64 {
        if self.current.as_ref().is_none_or(|window| !window.positions.contains(&position)) {
            self.current = Some(self.window(self.window_of(position)));
        }
        let Some(Window { positions, order, column }) = &self.current else {
            unreachable!("it was just set")
        };
        let mixed = positions.start + order.forward(position - positions.start);
        let (slot, within, _) = self.slots.find(mixed);
        let record = self.chunk_at(column, slot - column.first) * self.chunk + within;
        add_modulo(record, self.shift, self.records)
    }

    /// The number of the window that has `position`.
    pub(super) fn window_of(&self, position: u64) -> u64 {
        let (slot, ..) = self.slots.find(position);
        // With one row all windows are larger ones, so the division is never by 0.
        match slot.checked_sub(self.larger.saturating_mul(self.rows)) {
            Some(past) if self.rows > 1 => self.larger + past / (self.rows - 1),
            _ => slot / self.rows,
        }
    }

    /// The positions of a window.
    pub(super) fn positions(&self, window: u64) -> Range<u64> {
        let end = match window + 1 {
            next if next == self.windows => self.records,
            next => self.slots.start(self.first_slot(next)),
        };
        self.slots.start(self.first_slot(window))..end
    }

    /// The number of windows.
    pub(super) const fn len(&self) -> u64 {
        self.windows
    }

    /// The number of chunks in a window.
    pub(super) const fn chunks(&self, window: u64) -> u64 {
        if window < self.larger { self.rows } else { self.rows - 1 }
    }

    /// Some chunks of a window, as ranges of records: one, or two where the ring is closed.
    pub(super) fn ranges(&self, window: u64, chunks: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let column = self.column(window);
        chunks
            .flat_map(move |index| {
                let start = self.chunk_at(&column, index) * self.chunk;
                let len = self.chunk.min(self.records - start);
                let start = add_modulo(start, self.shift, self.records);
                let front = len.min(self.records - start);
                [start..start + front, 0..len - front]
            })
            .filter(|range| !range.is_empty())
    }

    fn window(&self, window: u64) -> Window {
        let positions = self.positions(window);
        let key = self.key.of(Role::Window as u64).of(window);
        let order = Permutation::keyed(positions.end - positions.start, key);
        Window { positions, order, column: self.column(window) }
    }

    fn column(&self, window: u64) -> Column {
        let place = Permutation::keyed(self.windows, self.key.of(Role::Columns as u64)).forward(window);
        let last = if window < self.larger { last_row(self.key, self.larger).forward(window) } else { 0 };
        Column { first: self.first_slot(window), place, last }
    }

    fn first_slot(&self, window: u64) -> u64 {
        window * (self.rows - 1) + window.min(self.larger)
    }

    /// The chunk of the ring that a window takes from row `row`.
    fn chunk_at(&self, column: &Column, row: u64) -> u64 {
        let within = if row == self.rows - 1 {
            column.last
        } else {
            let turned = self.key.of(Role::Rows as u64).of(row).below(self.windows);
            add_modulo(column.place, turned, self.windows)
        };
        row * self.windows + within
    }
}

/// What a key is derived for. The numbers are part of the order, which stays the same in every version.
#[derive(Clone, Copy)]
enum Role {
    Shift = 1,
    Columns = 2,
    LastRow = 3,
    Rows = 4,
    Window = 5,
}

/// The order of the last row, of which each entry goes to one of the first windows.
fn last_row(key: Key, larger: u64) -> Permutation {
    Permutation::keyed(larger, key.of(Role::LastRow as u64))
}

/// The sum modulo `modulus`, for two numbers below it.
const fn add_modulo(a: u64, b: u64, modulus: u64) -> u64 {
    let room = modulus - b;
    if a >= room { a - room } else { a + b }
}
