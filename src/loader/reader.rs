//! The source of a loader: the batch of a step, perhaps of a training begun under another plan, and how it is
//! read and transformed into a slot.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use twinbuf_mmap::{BatchIndices, Buffer, Plan, Records, RemainingEpoch};

use super::shared::{Room, Shared, Split, count};
use super::sizes::Stage;
use crate::backend::sealed::SlotGuard;
use crate::batch::checkpoint::{Begun, Identity};
use crate::dataset::Dataset;
use crate::error::{At, BoxError, Error};
use crate::observe::log::What;
use crate::slot::{Layout, LoadTimes, Origin, Ticket};
use crate::stage::gate::Progress;
use crate::stage::worker::{Load, Source};
use crate::transform::{Context, RecordTransform};

/// Data sets as the source of a stage.
pub(crate) struct Reader {
    /// At least one.
    pub(crate) fields: Vec<FieldReader>,
    pub(crate) schedule: Schedule,
    /// The last call whose batches the files' readers were told, if they read ahead; all workers have the same.
    pub(crate) begun: Option<Arc<Mutex<u64>>>,
    /// Shares fills with the caller while it waits. `None`: this thread fills every batch alone.
    pub(crate) shared: Option<Arc<Shared>>,
}

/// One data set and the transforms of its records.
pub(crate) struct FieldReader {
    pub(crate) dataset: Box<dyn Dataset>,
    /// Reads in its place, if it is files; all workers have the same.
    pub(crate) files: Option<Arc<twinbuf_mmap::Reader>>,
    /// Bytes of a record in the file; of the longest, if they differ.
    pub(crate) record_bytes: usize,
    /// Bytes of a record in the slot; of the longest, if they differ.
    pub(crate) out_bytes: usize,
    /// Whether records in the file differ in length.
    pub(crate) ragged: bool,
    /// Records that are transformed at a time.
    pub(crate) part: u64,
    /// In the order of application.
    pub(crate) transforms: Vec<Transforming>,
}

impl Source<[u8]> for Reader {
    fn log(&self) -> (What, &'static str) {
        (What::Read, "read")
    }

    fn load(&mut self, load: Load<'_>, slot: &mut dyn SlotGuard<Content = [u8]>) -> Result<usize, Error> {
        let Load { ticket, records, naming, times, offsets, who, progress } = load;
        let at = || naming.at(ticket);
        // A call that was left long ago: the batch will be discarded.
        let Some(Origin { plan, layout, .. }) = records else { return Err(Error::ThreadGone { at: at() }) };
        *who = "data set";
        self.begin(ticket);
        slot.begin(ticket);
        let mut slot = Filling { slot, flushed: 0 };
        let (mut len, io_calls) = (0, Records::read_calls());
        for (index, field) in self.fields.iter_mut().enumerate() {
            let range = layout.range(index, count(plan.len())).unwrap_or_default();
            let asks = Asks { progress, field: index, at: &at };
            let ragged = layout.fields[index].is_ragged();
            let shares = self.shared.as_deref().and_then(|shared| {
                let split = field.shares(plan, &slot, ragged);
                shared.turn(split.is_some());
                Some((shared, split?))
            });
            if let Some((shared, split)) = shares {
                len = range.end;
                field.files.iter().for_each(|files| files.ask_ahead(plan));
                let fill = |part: &BatchIndices, room: Room<'_>| {
                    field.part(part, &mut Vec::new(), room, &asks, times, who).map(|_| ())
                };
                let helped = shared.fill((index, plan), split, slot.bytes(range), fill)?;
                times.helped = Some(times.helped.unwrap_or_default() + helped.time);
                times.io_calls += helped.io_calls;
                times.bytes += bytes(helped.records, field.record_bytes);
                slot.filled(len);
                continue;
            }
            let mut own = Vec::new();
            len = field.load(plan, range, &mut slot, ragged.then_some(&mut own), &asks, times, who)?;
            if ragged {
                offsets.resize(index + 1, Vec::new());
                offsets[index] = own;
            }
        }
        times.io_calls += Records::read_calls() - io_calls;
        Ok(len)
    }

    fn records(&self, ticket: Ticket) -> Option<Origin> {
        self.schedule.batch(ticket)
    }
}

impl Reader {
    /// Passes the coming batches to the files' readers, once for each call that asks for epochs.
    fn begin(&self, ticket: Ticket) {
        let Some(begun) = &self.begun else { return };
        let mut begun = begun.lock().unwrap_or_else(PoisonError::into_inner);
        // Another worker may have begun with what the caller asked for since.
        if ticket.generation > *begun {
            *begun = ticket.generation;
            let files = self.fields.iter().filter_map(|field| field.files.as_ref());
            files.for_each(|files| files.begin(self.schedule.from(ticket)));
        }
    }
}

/// A slot that is being filled from its start. Some of it may have been sent to the device.
struct Filling<'s> {
    slot: &'s mut dyn SlotGuard<Content = [u8]>,
    /// Bytes at the start that were sent on.
    flushed: usize,
}

impl Filling<'_> {
    /// Some bytes of the slot, counted from its start; none of them was marked as filled.
    fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.slot.content()[range.start - self.flushed..range.end - self.flushed]
    }

    /// All bytes before `end` are filled.
    fn filled(&mut self, end: usize) {
        self.flushed += self.slot.flush(end - self.flushed);
    }
}

impl FieldReader {
    /// Reads and transforms the records to the range `out` of the slot: with transforms, or if the slot is sent to a
    /// device in chunks, part by part. Returns where they end, and notes where each begins and ends if they differ in
    /// length.
    #[expect(clippy::too_many_arguments, reason = "called once")]
    fn load(
        &mut self,
        plan: &BatchIndices,
        out: Range<usize>,
        slot: &mut Filling<'_>,
        mut offsets: Option<&mut Vec<usize>>,
        asks: &Asks<'_>,
        times: &mut LoadTimes,
        who: &mut &'static str,
    ) -> Result<usize, Error> {
        let chunk = slot.slot.chunk().map(|chunk| (chunk / self.out_bytes.max(1)).max(1) as u64);
        let step = if self.transforms.is_empty() { chunk.unwrap_or(plan.len()) } else { self.part };
        if let Some(offsets) = &mut offsets {
            offsets.push(0);
        }
        let (mut done, mut start) = (0, out.start);
        while let Some(part) = plan.part(done..plan.len().min(done + step)) {
            let mut lengths = Vec::new();
            let end = start
                + self.part(&part, &mut lengths, (slot.bytes(start..out.end), None), asks, times, who)?;
            if let Some(offsets) = &mut offsets {
                let mut at = start - out.start;
                offsets.extend(lengths.iter().map(|len| {
                    at += len;
                    at
                }));
            }
            slot.filled(end);
            start = end;
            done += part.len();
        }
        Ok(start)
    }

    /// Reads and transforms some records to the start of the room, and returns the bytes that they became. `lengths` becomes the
    /// length of each, if they differ.
    fn part(
        &mut self,
        part: &BatchIndices,
        lengths: &mut Vec<usize>,
        room: Room<'_>,
        asks: &Asks<'_>,
        times: &mut LoadTimes,
        who: &mut &'static str,
    ) -> Result<usize, Error> {
        let Self { dataset, files, record_bytes, ragged, transforms, .. } = self;
        // Lengths are all equal unless the data set gives them.
        *lengths = match ragged.then(|| dataset.lengths(part)).flatten() {
            Some(lengths) if lengths.len() == count(part.len()) => lengths,
            Some(lengths) => {
                let (at, wanted, found) = ((asks.at)(), count(part.len()), lengths.len());
                return Err(Error::Length { at, wanted, found });
            }
            None if transforms.iter().any(|transform| transform.stage.ragged[1]) => {
                vec![*record_bytes; count(part.len())]
            }
            None => Vec::new(),
        };
        let wanted = match &**lengths {
            [] => bytes(part.len(), *record_bytes),
            lengths => lengths.iter().sum(),
        };
        times.bytes += wanted;
        let Some(first) = transforms.first_mut() else {
            asks.read(&mut **dataset, files.as_deref(), part, wanted, room)?;
            return Ok(wanted);
        };
        asks.read(&mut **dataset, files.as_deref(), part, wanted, (&mut first.scratch, room.1.map(|_| 0)))?;
        let began = Instant::now();
        *who = "transform";
        let made = transform(transforms, part, lengths, room.0)
            .map_err(|source| Error::Transform { at: Some((asks.at)()), source })?;
        *who = "data set";
        times.transform += began.elapsed();
        Ok(made)
    }

    /// How to cut the batch, if two threads can fill it: its files are in memory, and the records have one length.
    fn shares(&self, plan: &BatchIndices, slot: &Filling<'_>, ragged: bool) -> Option<Split> {
        let most = (!self.transforms.is_empty()).then_some(self.part);
        let part = Shared::part(plan.len(), self.record_bytes, most)?;
        let may = !ragged && !self.ragged && slot.slot.chunk().is_none();
        let split = Split { part, most: most.unwrap_or(u64::MAX), each: self.out_bytes };
        (may && self.files.as_ref()?.is_in_memory()).then_some(split)
    }

    /// Fills the room with records of a batch that another thread loads. That thread reports an error when it meets it.
    pub(crate) fn help(&mut self, part: &BatchIndices, room: Room<'_>) -> Result<(), Error> {
        let at = || At { loader: None, epoch: part.epoch(), step: Some(part.step()) };
        let asks = Asks { progress: None, field: 0, at: &at };
        self.part(part, &mut Vec::new(), room, &asks, &mut LoadTimes::new(Instant::now()), &mut "")
            .map(|_| ())
    }
}

/// How a data set is asked for records of a batch.
struct Asks<'a> {
    progress: Option<&'a Progress>,
    field: usize,
    at: &'a dyn Fn() -> At,
}

impl Asks<'_> {
    fn read(
        &self,
        dataset: &mut dyn Dataset,
        files: Option<&twinbuf_mmap::Reader>,
        plan: &BatchIndices,
        wanted: usize,
        (room, behind): Room<'_>,
    ) -> Result<(), Error> {
        let found = room.len();
        let Some(out) = room.get_mut(..wanted) else {
            let (wanted, found) = (wanted as u64, found as u64);
            let source = twinbuf_mmap::Error::BufferTooSmall { wanted, found }.into();
            return Err(Error::Load { at: (self.at)(), source });
        };
        if let (Some(progress), Some(run)) = (self.progress, plan.runs().next()) {
            progress.reads(self.field, run.start);
        }
        let read = match files {
            Some(files) => match behind {
                Some(behind) => files.read_part(plan, out, behind),
                None => files.read(plan, out),
            }
            .map_err(Into::into),
            None => dataset.read(plan, out),
        };
        match read {
            Ok(found) if found == wanted => Ok(()),
            Ok(found) => Err(Error::Length { at: (self.at)(), wanted, found }),
            Err(source) => Err(Error::Load { at: (self.at)(), source }),
        }
    }
}

/// The bytes of this many records. The builder has checked that a full batch fits a slot, so this does not overflow.
fn bytes(records: u64, record_bytes: usize) -> usize {
    count(records).saturating_mul(record_bytes)
}

/// A transform and what it is applied to.
pub(crate) struct Transforming {
    pub(crate) transform: Box<dyn RecordTransform>,
    pub(crate) stage: Stage,
    /// Room for the records of a part, in front of it.
    pub(crate) scratch: Buffer,
}

/// Applies the transforms in turn, the last one to the front of `out`, and returns how many bytes it made. `lengths` are those
/// of the records, and then those of what they became; empty if they have one size all the way.
fn transform(
    transforms: &mut [Transforming],
    part: &BatchIndices,
    lengths: &mut [usize],
    out: &mut [u8],
) -> Result<usize, BoxError> {
    let Some((first, others)) = transforms.split_first_mut() else { return Ok(0) };
    let Transforming { transform: apply, stage, scratch } = first;
    let to = match others.first_mut() {
        Some(next) => &mut next.scratch[..],
        None => &mut *out,
    };
    let [before, after] = stage.bytes;
    let made = if stage.ragged == [false; 2] {
        let (from, made) = (bytes(part.len(), before), bytes(part.len(), after));
        apply.apply(&scratch[..from], &mut to[..made], &Context::new(part))?;
        lengths.fill(after);
        made
    } else {
        let (mut from, mut made) = (0, 0);
        for (len, record) in lengths.iter_mut().zip(0..) {
            let Some(one) = part.part(record..record + 1) else { break };
            let room = made..to.len().min(made + after);
            let most = room.len();
            let found = apply.apply_one(&scratch[from..from + *len], &mut to[room], &Context::new(&one))?;
            if found > most || (!stage.ragged[1] && found != after) {
                let wanted = if found > most { most } else { after };
                return Err(format!("wanted a record of {wanted} bytes, found {found}").into());
            }
            from += *len;
            made += found;
            *len = found;
        }
        made
    };
    if others.is_empty() { Ok(made) } else { transform(others, part, lengths, out) }
}

/// The batches of a loader, shared by all its threads.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pub(crate) plan: Plan,
    pub(crate) identity: Arc<Identity>,
    layout: Arc<Layout>,
    /// The last [`KEPT`] calls that continued a training of another plan, by generation, the oldest first.
    begun: Arc<Mutex<Vec<(u64, Begun)>>>,
    /// The epoch of the last batch: those that follow are mostly of the same.
    last: Arc<Mutex<Option<Epoch>>>,
}

/// The batches of an epoch in a call, and what a checkpoint in it belongs to.
#[derive(Debug)]
struct Epoch {
    generation: u64,
    epoch: u64,
    batches: RemainingEpoch,
    identity: Arc<Identity>,
}

/// Older calls than these load batches that are discarded.
const KEPT: usize = 8;

impl Schedule {
    pub(crate) fn new(plan: Plan, identity: Identity, layout: Layout) -> Self {
        Self {
            plan,
            identity: Arc::new(identity),
            layout: Arc::new(layout),
            begun: Arc::default(),
            last: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(u64, Begun)>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Continues the training of another plan, in one call.
    pub(crate) fn begin(&self, generation: u64, start: Begun) {
        let mut begun = self.lock();
        if begun.len() == KEPT {
            begun.remove(0);
        }
        begun.push((generation, start));
    }

    /// Returns the batches of an epoch in a call, and what a checkpoint in it belongs to.
    pub(crate) fn epoch(&self, generation: u64, epoch: u64) -> (RemainingEpoch, Arc<Identity>) {
        let begun = self.lock();
        let identity = match begun.iter().rfind(|(of, _)| *of == generation) {
            Some((_, Begun { epoch: first, rest, identity, .. })) if *first == epoch => {
                return (rest.clone(), identity.clone());
            }
            Some((_, Begun { later, .. })) => later,
            None => &self.identity,
        };
        (self.plan.epoch_after(identity.steps_before(epoch)), identity.clone())
    }

    /// Returns the records of a step. `None` past the end of the epoch, and perhaps for a call that is over.
    pub(crate) fn batch(&self, ticket: Ticket) -> Option<Origin> {
        let Ticket { generation, epoch, step, .. } = ticket;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|last| (last.generation, last.epoch) != (generation, epoch)) {
            let (batches, identity) = self.epoch(generation, epoch);
            *last = Some(Epoch { generation, epoch, batches, identity });
        }
        let Epoch { batches, identity, .. } = last.as_ref()?;
        let plan = batches.batch(epoch, step)?;
        Some(Origin { plan, identity: identity.clone(), layout: self.layout.clone() })
    }

    /// The batches from this one to the last that the same call asks for.
    pub(crate) fn from(&self, mut ticket: Ticket) -> impl Iterator<Item = BatchIndices> + Send + use<> {
        let schedule = self.clone();
        let (mut batches, _) = self.epoch(ticket.generation, ticket.epoch);
        std::iter::from_fn(move || {
            loop {
                if let Some(plan) = batches.batch(ticket.epoch, ticket.step) {
                    ticket.step += 1;
                    return Some(plan);
                }
                // An epoch without a step is followed by none.
                if ticket.epoch >= ticket.last || ticket.step == 0 {
                    return None;
                }
                (ticket.epoch, ticket.step) = (ticket.epoch + 1, 0);
                (batches, _) = schedule.epoch(ticket.generation, ticket.epoch);
            }
        })
    }
}
