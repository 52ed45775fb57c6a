//! The source of a loader: how the records of a batch are read and transformed into a slot.
//!
//! A fill goes on where it was: a driven worker keeps its [`Progress`]. So a data set or a transform whose work somebody
//! else does can put it off ([`Dataset::read`]), and a [`Driven`] worker calls the source again.

use std::io;
use std::ops::DerefMut;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;
use std::{iter, mem};

use twinbuf_mmap::{BatchIndices, Buffer, Records as FileRecords};

use super::batch::Records;
use super::layout::{ALIGN, Field, bytes, count};
use crate::dataset::Dataset;
use crate::error::{BoxError, Error};
use crate::pipe::memory::{Backend, Host};
use crate::pipe::{self, Content, Filling, Source};
use crate::thread::message;
use crate::transform::{Context, RecordTransform, RecordType};

/// The source of a loader's pipe: reads all fields of a batch.
#[derive(Default)]
pub(crate) struct Reader {
    /// At least one.
    pub(crate) fields: Vec<FieldReader>,
}

/// How far the fill of a slot has come.
#[derive(Debug, Default)]
struct Progress {
    /// The fields that are whole. The rest is about the next one.
    fields: usize,
    /// The records that are in the slot, and the bytes that they take.
    done: u64,
    end: usize,
    /// The steps that are over of the part of records after those: its read, and then each of its transforms.
    steps: usize,
    /// If lengths vary, the length of each record of that part: as it is by now, before or after the next transform.
    lengths: Vec<usize>,
    /// If lengths vary, how many records the present transform has converted, and their bytes before and after it.
    changed: (usize, usize, usize),
    /// When the first transform of the part began.
    since: Option<Instant>,
}

/// One data set and the transforms of its records.
pub(crate) struct FieldReader {
    pub(crate) dataset: Box<dyn Dataset>,
    /// Reads the records instead of `dataset` if the data set is files. All workers share this reader.
    pub(crate) files: Option<Arc<twinbuf_mmap::Reader>>,
    /// In the order of application.
    pub(crate) transforms: Vec<Transforming>,
}

impl<S: DerefMut<Target = [u8]> + ?Sized> Source<S> for Reader {
    type Unit = Records;

    fn fill(&mut self, records: &mut Records, slot: &mut S, at: &mut Filling<'_>) -> Result<Content, Error> {
        self.go_on(&mut Progress::default(), records, slot, at).map(Content::Bytes)
    }

    /// True if all fields are files in memory: a fill then waits for no disk, and runs no code of the caller.
    fn pays(&self) -> bool {
        let in_memory = |field: &FieldReader| field.files.as_ref().is_some_and(|files| files.is_in_memory());
        self.fields.iter().all(in_memory)
    }
}

impl Reader {
    /// Fills the slot from where the fill is. Returns the bytes of all fields.
    fn go_on(
        &mut self,
        progress: &mut Progress,
        records: &mut Records,
        slot: &mut [u8],
        at: &mut Filling<'_>,
    ) -> Result<usize, Error> {
        let Records { plan, layout, offsets, .. } = records;
        let mut len = 0;
        while let Some(field) = self.fields.get_mut(progress.fields) {
            at.runs("data set");
            let index = progress.fields;
            let range = layout.range(index, count(plan.len())).unwrap_or_default();
            let shape = &layout.fields[index];
            let ragged = shape.record().is_ragged();
            if ragged && offsets.len() <= index {
                offsets.resize(index, Vec::new());
                offsets.push(vec![0]);
            }
            // Without transforms, one part has all records.
            let step = if field.transforms.is_empty() { plan.len() } else { shape.part };
            while let Some(part) = plan.part(progress.done..plan.len().min(progress.done + step)) {
                let out = &mut slot[range.clone()][progress.end..];
                let made = field.part(shape, &part, progress, out, at)?;
                if ragged {
                    let ends = progress.lengths.iter().scan(progress.end, |end, length| {
                        *end += length;
                        Some(*end)
                    });
                    offsets[index].extend(ends);
                }
                progress.end += made;
                progress.done += part.len();
                progress.steps = 0;
            }
            len = range.start + progress.end;
            // Up to the next field: otherwise what was in the slot before.
            slot[len..].iter_mut().take(len.next_multiple_of(ALIGN) - len).for_each(|byte| *byte = 0);
            *progress = Progress { fields: index + 1, ..Progress::default() };
        }
        Ok(len)
    }
}

impl FieldReader {
    /// Reads and transforms some records to the start of `out`, and returns the bytes of the transformed records.
    fn part(
        &mut self,
        shape: &Field,
        part: &BatchIndices,
        progress: &mut Progress,
        out: &mut [u8],
        at: &mut Filling<'_>,
    ) -> Result<usize, Error> {
        let Self { dataset, files, transforms } = self;
        let (first, later) = (&shape.records[0], &shape.records[1..]);
        if progress.steps == 0 {
            // `lengths` stays empty if all records have the same length, before and after each transform.
            progress.lengths = match first.is_ragged().then(|| dataset.lengths(part)).flatten() {
                Some(lengths) if lengths.len() == count(part.len()) => lengths,
                found if first.is_ragged() => {
                    let wanted = format!("the lengths of {} records", part.len());
                    let found = found.map_or_else(|| "none".to_string(), |found| found.len().to_string());
                    return Err(Error::Field { at: at.at(), field: progress.fields, wanted, found });
                }
                _ if later.iter().any(RecordType::is_ragged) => vec![first.len(); count(part.len())],
                _ => Vec::new(),
            };
            let wanted = match &*progress.lengths {
                [] => bytes(part.len(), first.len()),
                lengths => lengths.iter().fold(0, |sum: usize, &len| sum.saturating_add(len)),
            };
            let room = transforms.first_mut().map_or(&mut *out, |first| &mut first.scratch);
            let found = room.len() as u64;
            let Some(room) = room.get_mut(..wanted) else {
                return Err(at.failed(twinbuf_mmap::Error::BufferTooSmall { wanted: wanted as u64, found }));
            };
            at.reads(progress.fields, part.first());
            let calls = FileRecords::read_calls();
            let read = match files {
                Some(files) => files.read(part, room).map_err(Into::into),
                None => dataset.read(part, room),
            };
            at.times.io_calls += FileRecords::read_calls() - calls;
            match read {
                Ok(found) if found == wanted => at.read_bytes(wanted),
                Ok(found) => return Err(Error::Length { at: at.at(), wanted, found }),
                Err(source) => return Err(at.failed(source)),
            }
            if transforms.is_empty() {
                return Ok(wanted);
            }
            progress.steps = 1;
        }
        at.runs("transform");
        let since = *progress.since.get_or_insert_with(Instant::now);
        let made = transform(transforms, shape, part, progress, out)
            .map_err(|source| Error::Transform { at: Some(at.at()), source })?;
        at.runs("data set");
        at.times.transform += since.elapsed();
        progress.since = None;
        Ok(made)
    }
}

/// A transform, and the memory for the records before it.
pub(crate) struct Transforming {
    pub(crate) transform: Box<dyn RecordTransform>,
    /// The records of a part before the transform.
    pub(crate) scratch: Buffer,
}

/// Applies the transforms that are left, one after the other. The last one writes to the start of `out`. Returns how many
/// bytes it wrote.
fn transform(
    transforms: &mut [Transforming],
    shape: &Field,
    part: &BatchIndices,
    progress: &mut Progress,
    out: &mut [u8],
) -> Result<usize, BoxError> {
    let mut made = 0;
    while let Some((before, others)) = transforms.split_at_mut_checked(progress.steps) {
        let Some(Transforming { transform: apply, scratch }) = before.last_mut() else { break };
        let to = others.first_mut().map_or(&mut *out, |next| &mut next.scratch);
        let [from, into] = [&shape.records[progress.steps - 1], &shape.records[progress.steps]];
        let (before, after) = (from.len(), into.len());
        if !from.is_ragged() && !into.is_ragged() {
            let from = bytes(part.len(), before);
            made = bytes(part.len(), after);
            apply.apply(&scratch[..from], &mut to[..made], &Context::new(part))?;
            progress.lengths.fill(after);
        } else {
            let (ragged, (record, from, into)) = (into.is_ragged(), &mut progress.changed);
            while let Some(len) = progress.lengths.get_mut(*record) {
                let Some(one) = part.part(*record as u64..*record as u64 + 1) else { break };
                let room = *into..to.len().min(*into + after);
                let most = room.len();
                let found =
                    apply.apply_one(&scratch[*from..*from + *len], &mut to[room], &Context::new(&one))?;
                if found > most || (!ragged && found != after) {
                    let wanted = if found > most { most } else { after };
                    return Err(format!("wanted a record of {wanted} bytes, found {found}").into());
                }
                (*record, *from, *into) = (*record + 1, *from + *len, *into + found);
                *len = found;
            }
            (_, _, made) = mem::take(&mut progress.changed);
        }
        progress.steps += 1;
    }
    Ok(made)
}

/// A loader's worker without a thread: whoever has it, the driver, lets it fill slots.
///
/// It is for a data set, or a transform, whose work must not be done on threads of this crate, or inside a call of it,
/// such as work of an interpreter. Such a data set notes what is to be read, and puts the read off by
/// [`io::ErrorKind::WouldBlock`]. The driver does what was noted, and calls the worker again, which calls the data set
/// again. [`LoaderBuilder::driven`](super::LoaderBuilder::driven) builds such a loader.
pub struct Driven<B: Backend = Host> {
    worker: pipe::Driven<B::Ring<Records>>,
    reader: Reader,
    /// How far the fill has come that was put off.
    progress: Progress,
}

impl<B: Backend> Driven<B> {
    pub(super) fn new(worker: pipe::Driven<B::Ring<Records>>, reader: Reader) -> Self {
        Self { worker, reader, progress: Progress::default() }
    }

    /// Fills slots, and waits for free ones, until a data set or a transform puts its work off: then this returns
    /// `true`, and the next call goes on with it. Returns `false` once the loader is closed or its device has failed.
    ///
    /// # Panics
    ///
    /// If a data set or a transform panics. The caller then receives [`Error::Panicked`] in place of the batch.
    #[expect(clippy::should_implement_trait, reason = "there are no items")]
    pub fn next(&mut self) -> bool {
        let Self { worker, reader, progress } = self;
        let mut fills = iter::from_fn(|| worker.next().map(|fill| is_put_off::<B>(reader, progress, fill)));
        fills.any(|put_off| put_off)
    }

    /// Fills one slot, if there is a free one and a batch to read; otherwise returns `Pending`. Returns as
    /// [`next`](Self::next) does, and `false` also if the slot is filled or its fill has failed.
    ///
    /// # Panics
    ///
    /// As [`next`](Self::next).
    pub fn try_next(&mut self) -> Poll<bool> {
        let Self { worker, reader, progress } = self;
        worker.try_next().map(|fill| fill.is_some_and(|fill| is_put_off::<B>(reader, progress, fill)))
    }
}

impl Driven {
    /// Leaves the memory of the slot whose fill was put off to whatever still refers to it, for ever: the slot gets new
    /// memory, and its fill begins anew. Returns `None` if that cannot be allocated; the slot then keeps its memory.
    /// Call it only if a fill was put off. It does not leave the memory that a data set with a transform fills, nor
    /// that of a transform before another: those are no slots.
    pub fn leak_slot(&mut self) -> Option<()> {
        let Poll::Ready(Some(mut fill)) = self.worker.try_next() else { return Some(()) };
        let (records, slot, _) = fill.parts();
        let new = Buffer::untouched(slot.len());
        let leaked = new.map(|new| mem::forget(mem::replace(slot, new)));
        records.offsets.clear();
        self.progress = Progress::default();
        fill.suspend();
        leaked
    }
}

/// Fills a slot as far as possible. Returns whether the rest was put off.
fn is_put_off<B: Backend>(
    reader: &mut Reader,
    kept: &mut Progress,
    mut fill: pipe::Fill<'_, B::Ring<Records>>,
) -> bool {
    let (records, slot, mut at) = fill.parts();
    // If this panics, the next fill begins anew.
    let mut progress = mem::take(kept);
    let would_block = |source: &BoxError| {
        source.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    };
    match catch_unwind(AssertUnwindSafe(|| reader.go_on(&mut progress, records, slot, &mut at))) {
        Ok(Err(Error::Load { source, .. } | Error::Transform { source, .. })) if would_block(&source) => {
            *kept = progress;
            fill.suspend();
            return true;
        }
        Ok(Ok(bytes)) => fill.commit(bytes),
        Ok(Err(error)) => fill.fail(error),
        Err(panic) => {
            let (at, who) = (at.at(), *at.who);
            fill.fail(Error::Panicked { at, who, message: message(&*panic) });
            resume_unwind(panic);
        }
    }
    false
}

debug!([B: Backend] Driven[B], |driven| worker: driven.worker);
