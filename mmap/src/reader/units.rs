//! The units that a reader reads: batches of a data set, or groups of tensors. Each is a list of extents.

use std::fmt::Debug;
use std::sync::Arc;

use crate::ranges::{Extent, Ranges, Shard};
use crate::{BatchIndices, Error};

/// The data of a [`Reader`](crate::Reader): `Arc<Ranges>`, whose units are batches, or `Groups`, whose units are
/// indices of groups of tensors. Other types cannot implement it.
pub trait Units: Sealed {}

impl<D: Sealed> Units for D {}

/// The methods of [`Units`]. Code outside this crate cannot implement them.
pub trait Sealed: Debug + Send + Sync {
    /// A batch, or the index of a group.
    type Unit: Clone + Send + 'static;

    /// The files of the data.
    fn shards(&self) -> &[Shard];

    /// The size of a unit in a slot, in bytes.
    fn size(&self, unit: &Self::Unit) -> Result<u64, Error>;

    /// The extents of a unit, in the order of the slot.
    fn extents(&self, unit: &Self::Unit) -> impl Iterator<Item = Result<Extent, Error>>;

    /// Copies bytes that several records of a unit share to each place where they belong. Call it after the extents
    /// were read.
    fn spread(&self, _: &Self::Unit, _: &mut [u8]) -> Result<(), Error> {
        Ok(())
    }

    /// Cuts a unit in two: a front of about `bytes` bytes, or more, and the rest, if there is one.
    fn split(&self, unit: Self::Unit, _: u64) -> (Self::Unit, Option<Self::Unit>) {
        (unit, None)
    }

    /// The number of the unit's epoch. `None`: these units have no epochs.
    fn epoch(_: &Self::Unit) -> Option<u64> {
        None
    }

    /// Calls `ask` for each extent to request before `unit` is read. `windows`: whether to request whole chunks of a
    /// windowed shuffle. Returns whether it did so for `unit`. `last` is the unit that was requested before it, and
    /// what the call for that unit returned.
    fn ahead(
        &self,
        unit: &Self::Unit,
        last: Option<&(Self::Unit, bool)>,
        windows: bool,
        ask: impl FnMut(Extent, Use),
    ) -> Result<bool, Error>;
}

/// How an extent that is requested ahead will be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// With its unit. A batch starts where the last one ended in the file, and is one run, at most with gaps that
    /// skip no page.
    InOrder,
    /// With its unit, any other batch.
    Next,
    /// By several units, which all end within the next so many bytes of units.
    Window(u64),
}

impl Sealed for Arc<Ranges> {
    type Unit = BatchIndices;

    fn shards(&self) -> &[Shard] {
        Ranges::shards(self)
    }

    fn size(&self, batch: &BatchIndices) -> Result<u64, Error> {
        Ok(Ranges::size(self, batch))
    }

    fn extents(&self, batch: &BatchIndices) -> impl Iterator<Item = Result<Extent, Error>> {
        Ranges::extents(self, batch.runs())
    }

    fn spread(&self, batch: &BatchIndices, out: &mut [u8]) -> Result<(), Error> {
        Ranges::spread(self, batch, out)
    }

    fn split(&self, batch: BatchIndices, bytes: u64) -> (BatchIndices, Option<BatchIndices>) {
        let records = bytes.div_ceil(self.mean_len()).clamp(1, batch.len());
        let rest = batch.part(records..batch.len());
        (batch.part(0..records).unwrap_or(batch), rest)
    }

    fn epoch(batch: &BatchIndices) -> Option<u64> {
        Some(batch.epoch())
    }

    fn ahead(
        &self,
        batch: &BatchIndices,
        last: Option<&(BatchIndices, bool)>,
        windows: bool,
        mut ask: impl FnMut(Extent, Use),
    ) -> Result<bool, Error> {
        let follows = last.is_some_and(|(last, windowed)| *windowed && batch.is_behind(last));
        if let Some(chunks) = windows.then(|| batch.chunks(follows)).flatten() {
            // A chunk is requested an eighth of a window before its use. The first window begins to slide when half of its
            // records were taken.
            let (chunk, window) = batch.shuffle.window();
            let life = window.saturating_add(window / 4 + 2 + if follows { 0 } else { window / 2 });
            let how = Use::Window(life.saturating_mul(chunk).saturating_mul(self.mean_len()));
            Ranges::extents(self, chunks.into_iter())
                .try_for_each(|extent| extent.map(|extent| ask(extent, how)))?;
            return Ok(true);
        }
        // A batch is in order if its first run is all of it, and starts where the batch before ended. The kernel's
        // read-ahead also continues over gaps that skip no page, if each record is a read of its own.
        let end = |batch: &BatchIndices| batch.part(batch.len() - 1..batch.len())?.runs().next();
        let goes_on = |start| last.is_none_or(|(last, _)| end(last).is_some_and(|last| last.end == start));
        let gap = if self.kind.bytes as u64 > super::cached::GATHERED[0] { super::ring::PAGE - 1 } else { 0 };
        let first = batch.runs().next().filter(|_| self.kind.stride <= self.kind.bytes as u64 + gap);
        let in_order = first.is_some_and(|run| run.end - run.start == batch.len() && goes_on(run.start));
        let how = if in_order { Use::InOrder } else { Use::Next };
        Ranges::extents(self, batch.runs()).try_for_each(|extent| extent.map(|extent| ask(extent, how)))?;
        Ok(false)
    }
}

#[cfg(feature = "safetensors")]
impl Sealed for crate::Groups {
    type Unit = usize;

    fn shards(&self) -> &[Shard] {
        self.model().shards()
    }

    fn size(&self, group: &usize) -> Result<u64, Error> {
        let none = || Error::NoSuchRecord { wanted: *group as u64, found: self.len() as u64 };
        self.extents_of(*group).map(|_| self.bytes(*group) as u64).ok_or_else(none)
    }

    fn extents(&self, group: &usize) -> impl Iterator<Item = Result<Extent, Error>> {
        self.extents_of(*group).unwrap_or_default().iter().cloned().map(Ok)
    }

    fn ahead(
        &self,
        group: &usize,
        _: Option<&(usize, bool)>,
        _: bool,
        mut ask: impl FnMut(Extent, Use),
    ) -> Result<bool, Error> {
        // The kernel's own read-ahead suffices: tensors are long, and mostly in the order of the file.
        self.extents(group).try_for_each(|extent| extent.map(|extent| ask(extent, Use::InOrder)))?;
        Ok(false)
    }
}
