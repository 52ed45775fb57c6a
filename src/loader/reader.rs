//! The source of a loader: how the records of a batch are read and transformed into a slot.

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Instant;

use twinbuf_mmap::{BatchIndices, Buffer, Records as FileRecords};

use super::batch::Records;
use super::sizes::Stage;
use crate::dataset::Dataset;
use crate::error::{BoxError, Error};
use crate::pipe::{Content, Filling, Source};
use crate::transform::{Context, RecordTransform};

/// The source of a loader's pipe: reads all fields of a batch.
pub(crate) struct Reader {
    /// At least one.
    pub(crate) fields: Vec<FieldReader>,
}

/// One data set and the transforms of its records.
pub(crate) struct FieldReader {
    pub(crate) dataset: Box<dyn Dataset>,
    /// Reads the records instead of `dataset` if the data set is files. All workers share this reader.
    pub(crate) files: Option<Arc<twinbuf_mmap::Reader>>,
    /// The bytes of a record before the transforms; of the longest, if lengths vary.
    pub(crate) record_bytes: usize,
    /// Whether lengths vary before the transforms.
    pub(crate) ragged: bool,
    /// The number of records that are transformed at a time.
    pub(crate) part: u64,
    /// In the order of application.
    pub(crate) transforms: Vec<Transforming>,
}

impl<S: DerefMut<Target = [u8]> + ?Sized> Source<S> for Reader {
    type Unit = Records;

    fn fill(&mut self, records: &mut Records, slot: &mut S, at: &mut Filling<'_>) -> Result<Content, Error> {
        let Records { plan, layout, offsets, .. } = records;
        let (mut len, io_calls) = (0, FileRecords::read_calls());
        for (index, field) in self.fields.iter_mut().enumerate() {
            at.runs("data set");
            let range = layout.range(index, count(plan.len())).unwrap_or_default();
            let mut own = Vec::new();
            let ragged = layout.fields[index].is_ragged();
            len = range.start + field.load(plan, index, &mut slot[range], ragged.then_some(&mut own), at)?;
            if ragged {
                offsets.resize(index + 1, Vec::new());
                offsets[index] = own;
            }
        }
        at.times.io_calls += FileRecords::read_calls() - io_calls;
        Ok(Content::Bytes(len))
    }

    /// True if all fields are files in memory: a fill then waits for no disk, and runs no code of the caller.
    fn pays(&self) -> bool {
        let in_memory = |field: &FieldReader| field.files.as_ref().is_some_and(|files| files.is_in_memory());
        self.fields.iter().all(in_memory)
    }
}

impl FieldReader {
    /// Reads the records of a batch to the start of `out`; with transforms, part by part. Returns where the records
    /// end. If lengths vary, `offsets` receives the offset of each record and the end of the last one.
    fn load(
        &mut self,
        plan: &BatchIndices,
        index: usize,
        out: &mut [u8],
        mut offsets: Option<&mut Vec<usize>>,
        at: &mut Filling<'_>,
    ) -> Result<usize, Error> {
        let step = if self.transforms.is_empty() { plan.len() } else { self.part };
        if let Some(offsets) = &mut offsets {
            offsets.push(0);
        }
        let (mut done, mut end) = (0, 0);
        while let Some(part) = plan.part(done..plan.len().min(done + step)) {
            let mut lengths = Vec::new();
            let made = self.part(&part, index, &mut lengths, &mut out[end..], at)?;
            if let Some(offsets) = &mut offsets {
                let mut start = end;
                offsets.extend(lengths.iter().map(|len| {
                    start += len;
                    start
                }));
            }
            end += made;
            done += part.len();
        }
        Ok(end)
    }

    /// Reads and transforms some records to the start of `out`, and returns the bytes of the transformed records. If
    /// lengths vary, `lengths` receives the length of each transformed record.
    fn part(
        &mut self,
        part: &BatchIndices,
        index: usize,
        lengths: &mut Vec<usize>,
        out: &mut [u8],
        at: &mut Filling<'_>,
    ) -> Result<usize, Error> {
        let Self { dataset, files, record_bytes, ragged, transforms, .. } = self;
        // `lengths` stays empty if all records have the same length, before and after each transform.
        *lengths = match ragged.then(|| dataset.lengths(part)).flatten() {
            Some(lengths) if lengths.len() == count(part.len()) => lengths,
            found if *ragged => {
                let wanted = format!("the lengths of {} records", part.len());
                let found = found.map_or_else(|| "none".to_string(), |found| found.len().to_string());
                return Err(Error::Field { at: at.at(), field: index, wanted, found });
            }
            _ if transforms.iter().any(|transform| transform.stage.ragged[1]) => {
                vec![*record_bytes; count(part.len())]
            }
            _ => Vec::new(),
        };
        let wanted = match &**lengths {
            [] => bytes(part.len(), *record_bytes),
            lengths => lengths.iter().fold(0, |sum: usize, &len| sum.saturating_add(len)),
        };
        let Some(first) = transforms.first_mut() else {
            read(&mut **dataset, files.as_deref(), part, index, wanted, out, at)?;
            return Ok(wanted);
        };
        read(&mut **dataset, files.as_deref(), part, index, wanted, &mut first.scratch, at)?;
        let began = Instant::now();
        at.runs("transform");
        let made = transform(transforms, part, lengths, out)
            .map_err(|source| Error::Transform { at: Some(at.at()), source })?;
        at.runs("data set");
        at.times.transform += began.elapsed();
        Ok(made)
    }
}

/// Reads the `wanted` bytes of some records of field `index` to the start of `room`.
fn read(
    dataset: &mut dyn Dataset,
    files: Option<&twinbuf_mmap::Reader>,
    part: &BatchIndices,
    index: usize,
    wanted: usize,
    room: &mut [u8],
    at: &mut Filling<'_>,
) -> Result<(), Error> {
    at.read_bytes(wanted);
    let found = room.len();
    let Some(out) = room.get_mut(..wanted) else {
        let (wanted, found) = (wanted as u64, found as u64);
        return Err(at.failed(twinbuf_mmap::Error::BufferTooSmall { wanted, found }));
    };
    if let Some(run) = part.runs().next() {
        at.reads(index, run.start);
    }
    let read = match files {
        Some(files) => files.read(part, out).map_err(Into::into),
        None => dataset.read(part, out),
    };
    match read {
        Ok(found) if found == wanted => Ok(()),
        Ok(found) => Err(Error::Length { at: at.at(), wanted, found }),
        Err(source) => Err(at.failed(source)),
    }
}

/// Converts the number of records that are in memory, which therefore fits `usize`.
pub(super) fn count(records: u64) -> usize {
    usize::try_from(records).unwrap_or(usize::MAX)
}

/// Returns the bytes of `records` records. The builder has checked that a full batch fits a slot, so this does not
/// overflow.
fn bytes(records: u64, record_bytes: usize) -> usize {
    count(records).saturating_mul(record_bytes)
}

/// A transform, and the memory for the records before it.
pub(crate) struct Transforming {
    pub(crate) transform: Box<dyn RecordTransform>,
    pub(crate) stage: Stage,
    /// The records of a part before the transform.
    pub(crate) scratch: Buffer,
}

/// Applies the transforms one after the other. The last one writes to the start of `out`. Returns how many bytes it
/// wrote. If lengths vary, `lengths` has the length of each record, and receives the length of each transformed record.
/// Otherwise it is empty.
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
