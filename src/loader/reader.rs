//! Reads one batch of a data set into a slot: read, transform.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use twinbuf_mmap::{BatchIndices, Buffer, Records};

use super::schedule::Schedule;
use crate::backend::sealed::SlotGuard;
use crate::dataset::Dataset;
use crate::error::{At, BoxError, Error};
use crate::observe::log::What;
use crate::slot::{LoadTimes, Origin, Ticket};
use crate::stage::progress::Progress;
use crate::stage::worker::{Load, Source};
use crate::transform::{Context, RecordTransform};

/// Data sets as the source of a stage.
pub(crate) struct Reader {
    /// At least one.
    pub(crate) fields: Vec<FieldReader>,
    pub(crate) schedule: Schedule,
    /// The last call whose batches the files' readers were told, if they read ahead; all workers have the same.
    pub(crate) begun: Option<Arc<Mutex<u64>>>,
}

/// One data set, and what becomes of its records.
pub(crate) struct FieldReader {
    pub(crate) dataset: Box<dyn Dataset>,
    /// Reads in its place, if it is files; all workers have the same.
    pub(crate) files: Option<Arc<twinbuf_mmap::Reader>>,
    /// Of a record in the file.
    pub(crate) record_bytes: usize,
    /// Of a record in the slot.
    pub(crate) out_bytes: usize,
    /// Records that are transformed at a time.
    pub(crate) part: u64,
    /// In the order in which they are applied.
    pub(crate) transforms: Vec<Transforming>,
}

impl Source<[u8]> for Reader {
    fn log(&self) -> (What, &'static str) {
        (What::Read, "read")
    }

    fn load(&mut self, load: Load<'_>, slot: &mut dyn SlotGuard<Content = [u8]>) -> Result<usize, Error> {
        let Load { ticket, records, naming, times, who, progress } = load;
        let at = || naming.at(ticket);
        // A call that was left long ago: the batch will be discarded.
        let Some(Origin { plan, layout, .. }) = records else { return Err(Error::ThreadGone { at: at() }) };
        *who = "data set";
        self.begin(ticket);
        let mut slot = Filling { slot, flushed: 0 };
        let (mut len, io_calls) = (0, Records::read_calls());
        for (index, field) in self.fields.iter_mut().enumerate() {
            let range = layout.range(index, count(plan.len())).unwrap_or_default();
            len = range.end;
            let asks = Asks { progress, field: index, at: &at };
            field.load(plan, range, &mut slot, &asks, times, who)?;
        }
        times.io_calls = Records::read_calls() - io_calls;
        Ok(len)
    }

    fn records(&self, ticket: Ticket) -> (Option<Origin>, usize) {
        let origin = self.schedule.batch(ticket);
        let records = origin.as_ref().map_or(0, |origin| origin.plan.len());
        let sum = |sum: usize, field: &FieldReader| sum.saturating_add(bytes(records, field.record_bytes));
        let bytes = self.fields.iter().fold(0, sum);
        (origin, bytes)
    }
}

impl Reader {
    /// Tells the files' readers which batches come, once for each call that asks for epochs.
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

/// A slot that is being filled from its start, some of which may have been sent on.
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
    /// Reads and transforms the records to the range `out` of the slot: with transforms, or if the slot goes on to a
    /// device in chunks, part by part.
    fn load(
        &mut self,
        plan: &BatchIndices,
        out: Range<usize>,
        slot: &mut Filling<'_>,
        asks: &Asks<'_>,
        times: &mut LoadTimes,
        who: &mut &'static str,
    ) -> Result<(), Error> {
        let Self { dataset, files, out_bytes, transforms, .. } = self;
        let chunk = slot.slot.chunk().map(|chunk| (chunk / (*out_bytes).max(1)).max(1) as u64);
        let step = if transforms.is_empty() { chunk.unwrap_or(plan.len()) } else { self.part };
        let (mut done, mut start) = (0, out.start);
        while let Some(part) = plan.part(done..plan.len().min(done + step)) {
            let end = start + bytes(part.len(), *out_bytes);
            let front = slot.bytes(start..end);
            if transforms.is_empty() {
                asks.read(&mut **dataset, files.as_deref(), &part, front)?;
            } else {
                asks.read(&mut **dataset, files.as_deref(), &part, transforms[0].records(part.len()))?;
                let start = Instant::now();
                *who = "transform";
                transform(transforms, &part, front)
                    .map_err(|source| Error::Transform { at: Some((asks.at)()), source })?;
                *who = "data set";
                times.transform += start.elapsed();
            }
            slot.filled(end);
            start = end;
            done += part.len();
        }
        Ok(())
    }
}

/// A number of records that fit the memory.
fn count(records: u64) -> usize {
    usize::try_from(records).unwrap_or(usize::MAX)
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
        out: &mut [u8],
    ) -> Result<(), Error> {
        if let (Some(progress), Some(run)) = (self.progress, plan.runs().next()) {
            progress.reads(self.field, run.start);
        }
        let wanted = out.len();
        let read = match files {
            Some(files) => files.read(plan, out).map_err(Into::into),
            None => dataset.read(plan, out),
        };
        match read {
            Ok(found) if found == wanted => Ok(()),
            Ok(found) => Err(Error::Length { at: (self.at)(), wanted, found }),
            Err(source) => Err(Error::Load { at: (self.at)(), source }),
        }
    }
}

/// The bytes of so many records. The builder has checked that a full batch fits a slot, so this does not overflow.
fn bytes(records: u64, record_bytes: usize) -> usize {
    count(records).saturating_mul(record_bytes)
}

/// A transform and what it is applied to.
pub(crate) struct Transforming {
    pub(crate) transform: Box<dyn RecordTransform>,
    /// Bytes of a record in front of it.
    pub(crate) record_bytes: usize,
    /// Room for the records of a part, in front of it.
    pub(crate) scratch: Buffer,
}

impl Transforming {
    /// The memory of the records in front of it.
    fn records(&mut self, records: u64) -> &mut [u8] {
        &mut self.scratch[..bytes(records, self.record_bytes)]
    }
}

/// Applies the transforms in turn, the last one to `out`.
fn transform(transforms: &mut [Transforming], part: &BatchIndices, out: &mut [u8]) -> Result<(), BoxError> {
    let Some((first, others)) = transforms.split_first_mut() else { return Ok(()) };
    let records = &first.scratch[..bytes(part.len(), first.record_bytes)];
    match others.first_mut() {
        None => first.transform.apply(records, out, &Context::new(part)),
        Some(next) => {
            first.transform.apply(records, next.records(part.len()), &Context::new(part))?;
            transform(others, part, out)
        }
    }
}
