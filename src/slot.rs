//! A slot of the ring: its layout, the position of its batch, and the times of its load.

use std::any::type_name;
use std::fmt;
use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::AnyBitPattern;
use twinbuf_mmap::{BatchIndices, DType};

use crate::batch::checkpoint::{Checkpoint, Identity};
use crate::batch::memory::Taken;
use crate::error::{At, Error};
use crate::thread::Share;
use crate::transform::RecordType;

/// The maximum of [`host_depth`](crate::loader::LoaderBuilder::host_depth).
pub const MAX_HOST_DEPTH: usize = 8;

/// A slot of the ring: the content of one batch, and what is known about it.
///
/// No line of the cache, nor the pair that processors fetch, has parts of two slots: each is written while the other
/// is read.
#[derive(Debug)]
#[repr(align(128))]
pub struct Slot<T> {
    pub(crate) content: T,
    /// `None` until the slot has been filled once.
    pub(crate) meta: Option<BatchMeta>,
    /// When the batch was dropped, and by what thread.
    pub(crate) freed: Option<(Instant, usize)>,
    /// `None` if the batch goes as a whole.
    pub(crate) chunks: Option<Box<Chunks>>,
}

impl<T> Slot<T> {
    pub(crate) fn new(content: T) -> Self {
        Self { content, meta: None, freed: None, chunks: None }
    }

    pub(crate) fn meta(&self) -> &BatchMeta {
        let Some(meta) = &self.meta else { unreachable!("a slot is handed over with its meta data") };
        meta
    }
}

/// Sends parts of a batch on while the rest of it is being filled.
#[derive(Clone)]
pub(crate) struct Sending {
    /// The filling thread calls it with the address of a slot, and the bytes of the slot to send: they are filled. With no
    /// bytes it waits until nothing reads the slot, which is about to be filled again.
    pub(crate) send: Arc<dyn Fn(usize, Range<usize>) + Send + Sync>,
    /// The batch that the caller asked for last: generation and number. No other is sent, because the caller has no room
    /// for it yet.
    pub(crate) asked: Arc<Mutex<(u64, u64)>>,
}

impl Sending {
    /// The caller asks for this batch.
    pub(crate) fn ask(&self, ticket: Ticket) {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = ticket.place();
    }
}

impl fmt::Debug for Sending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sending").field("asked", &self.asked).finish_non_exhaustive()
    }
}

/// What was sent of a slot's batch.
#[derive(Debug)]
pub(crate) struct Chunks {
    sending: Sending,
    /// Bytes of a chunk.
    pub(crate) bytes: usize,
    /// The batch that is being filled: generation and number.
    batch: (u64, u64),
    /// Bytes at the start that were sent.
    sent: usize,
}

impl Chunks {
    pub(crate) fn new(sending: Sending, bytes: usize) -> Self {
        Self { sending, bytes, batch: (0, 0), sent: 0 }
    }

    /// The slot at `start` is about to be filled with this batch.
    pub(crate) fn begin(&mut self, start: usize, ticket: Ticket) {
        self.batch = ticket.place();
        if mem::take(&mut self.sent) > 0 {
            (self.sending.send)(start, 0..0);
        }
    }

    /// The first bytes of the slot at `start` are filled.
    pub(crate) fn filled(&mut self, start: usize, bytes: usize) {
        let end = bytes / self.bytes * self.bytes;
        let asked = || *self.sending.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if end > self.sent && asked() == self.batch {
            (self.sending.send)(start, self.sent..end);
            self.sent = end;
        }
    }
}

/// The position and load times of a batch. The loader attaches it to a
/// [`Lease`](crate::loader::DeviceBatch::into_lease). It has no public fields or methods.
#[derive(Debug)]
pub struct BatchMeta {
    pub(crate) ticket: Ticket,
    /// `None` for rounds of a generator: they are not made of records.
    pub(crate) records: Option<Origin>,
    /// For each field, where its records begin, and last where they end, if they differ in length; else empty.
    pub(crate) offsets: Vec<Vec<usize>>,
    /// The bytes of the batch, or why it could not be loaded.
    pub(crate) result: Result<usize, Box<Error>>,
    pub(crate) load: LoadTimes,
}

/// The records of a batch and their places in it.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) plan: BatchIndices,
    /// What a checkpoint after the batch belongs to.
    pub(crate) identity: Arc<Identity>,
    pub(crate) layout: Arc<Layout>,
}

impl BatchMeta {
    /// The position after the batch.
    pub(crate) fn checkpoint(&self) -> Checkpoint {
        self.records().identity.at(self.ticket.epoch, self.ticket.step + 1)
    }

    pub(crate) fn records(&self) -> &Origin {
        let Some(records) = &self.records else { unreachable!("a loader's batch is made of records") };
        records
    }

    /// The bytes of a field in the slot. `None` if there is no such field.
    pub(crate) fn range(&self, field: usize) -> Option<Range<usize>> {
        let Origin { plan, layout, .. } = self.records();
        let Range { start, end } = layout.range(field, usize::try_from(plan.len()).ok()?)?;
        let own = self.offsets.get(field).and_then(|offsets| offsets.last());
        Some(start..own.map_or(end, |own| start + own))
    }

    /// The bytes of one of its records, counted from the first of the field. `None` if there is no such record.
    pub(crate) fn place(&self, field: usize, record: usize) -> Option<Range<usize>> {
        let Origin { plan, layout, .. } = self.records();
        match self.offsets.get(field).filter(|offsets| !offsets.is_empty()) {
            Some(offsets) => Some(*offsets.get(record)?..*offsets.get(record.checked_add(1)?)?),
            None => {
                let len = layout.fields.get(field)?.len();
                let start = record.checked_mul(len)?;
                ((record as u64) < plan.len()).then_some(start..start + len)
            }
        }
    }
}

/// A batch that a loader or generator may load next, or has loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ticket {
    /// Numbers the calls that ask for epochs. A batch loaded for an earlier call is discarded.
    pub(crate) generation: u64,
    /// Batches of the same generation before it.
    pub(crate) seq: u64,
    /// Epochs that were started before this one: decides whether the trace records it.
    pub(crate) ordinal: u64,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    /// The number of steps in this epoch.
    pub(crate) steps: u64,
    /// The last epoch that the same call asks for.
    pub(crate) last: u64,
}

impl Ticket {
    /// Generation and number: only this batch has these, and later batches have greater ones.
    pub(crate) fn place(&self) -> (u64, u64) {
        (self.generation, self.seq)
    }
}

/// Names batches: in errors as [`At`], in traces as [`BatchId`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Naming {
    pub(crate) loader: Option<Arc<str>>,
    /// The epochs are the rounds of a generator, and have no steps.
    pub(crate) rounds: bool,
}

impl Naming {
    pub(crate) fn at(&self, ticket: Ticket) -> At {
        let BatchId { epoch, step, .. } = self.id(ticket);
        At { loader: self.loader.clone(), epoch, step }
    }

    #[inline]
    pub(crate) fn id(&self, ticket: Ticket) -> BatchId {
        let step = (!self.rounds).then_some(ticket.step);
        BatchId { ordinal: ticket.ordinal, epoch: ticket.epoch, step }
    }
}

/// What a trace event is about: a batch, or with no step an epoch or a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchId {
    pub(crate) ordinal: u64,
    pub(crate) epoch: u64,
    pub(crate) step: Option<u64>,
}

/// How a slot was filled: the loading thread's part of the event log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadTimes {
    /// Since when the loading thread waited for the slot, or for leave to start; `start` if it did not.
    pub(crate) since: Instant,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
    /// The part of it that was no reading.
    pub(crate) transform: Duration,
    /// System calls that read files.
    pub(crate) io_calls: u64,
    /// Bytes before the transforms.
    pub(crate) bytes: usize,
    /// CPU share of the load, if it was measured.
    pub(crate) cpu: Option<Share>,
    /// How long the caller took part in it while it waited. `None` if it may not.
    pub(crate) helped: Option<Duration>,
    /// When the batch that had the slot before freed it.
    pub(crate) freed: Option<Freed>,
}

impl LoadTimes {
    /// Of a load that begins now, without a wait before it.
    pub(crate) const fn new(start: Instant) -> Self {
        Self {
            since: start,
            start,
            end: start,
            transform: Duration::ZERO,
            io_calls: 0,
            bytes: 0,
            cpu: None,
            helped: None,
            freed: None,
        }
    }
}

/// When the slot of a batch was freed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    /// Generation and number of that batch.
    pub(crate) batch: (u64, u64),
    pub(crate) at: Instant,
    pub(crate) thread: usize,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(loader) = &self.loader {
            write!(f, "{loader}: ")?;
        }
        match self.step {
            Some(step) => write!(f, "epoch {}, step {step}", self.epoch),
            None => write!(f, "round {}", self.epoch),
        }
    }
}

/// Where the fields of a batch are in its slot, and who owns the slots' memory.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) fields: Vec<RecordType>,
    /// The room for the records of each field that differ in length; 0 where they do not.
    rooms: Vec<usize>,
    /// What the slots take of a limit. Each slot has this layout, so the last of them gives it back.
    pub(crate) taken: Option<Taken>,
    /// Whether the caller gave the memory.
    pub(crate) lent: bool,
}

/// Fields begin at multiples of it.
const ALIGN: usize = 64;

impl Layout {
    pub(crate) fn new(fields: Vec<RecordType>, rooms: Vec<usize>) -> Self {
        Self { fields, rooms, taken: None, lent: false }
    }

    /// The place of a field of a batch of this many records: the full room, also if the records differ in length and
    /// take less. `None` if it does not fit the memory.
    pub(crate) fn range(&self, field: usize, records: usize) -> Option<Range<usize>> {
        let mut end = 0_usize;
        let mut range = None;
        for (record, &room) in self.fields.get(..=field)?.iter().zip(&self.rooms) {
            let start = end.checked_next_multiple_of(ALIGN)?;
            let len = if record.is_ragged() { room } else { records.checked_mul(record.len())? };
            end = start.checked_add(len)?;
            range = Some(start..end);
        }
        range
    }

    /// Bytes of a batch of this many records, with the gaps between its fields.
    pub(crate) fn len(&self, records: usize) -> Option<usize> {
        self.range(self.fields.len() - 1, records).map(|last| last.end)
    }
}

/// Whether elements of this type may be taken as values of type `T`: as themselves or arrays of them, as bytes, and
/// those of 16 bits without a type in Rust as their bits. Types that are no numbers, such as a caller's `struct`, need
/// only have the alignment of the elements and be a whole number of them.
pub(crate) fn fits<T: AnyBitPattern>(dtype: Option<DType>) -> bool {
    const NUMBERS: [&str; 12] =
        ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "u64", "i64", "f64", "f16", "bf16"];
    let Some(dtype) = dtype else { return true };
    // `[[f32; 3]; 2]` is numbers of `f32`, and `half::bfloat::bf16` is known by its last name. Where the compiler wrote
    // names in another way, sizes and alignments would still be compared.
    let name = type_name::<T>().trim_start_matches('[');
    let name = name.split(';').next().unwrap_or(name);
    let name = name.rsplit("::").next().unwrap_or(name);
    if NUMBERS.contains(&name) {
        let bits = name == "u16" && matches!(dtype, DType::F16 | DType::Bf16);
        return name == "u8" || bits || name == dtype.to_string();
    }
    let align = match dtype {
        DType::C64 | DType::C128 => dtype.size() / 2,
        _ => dtype.size(),
    };
    size_of::<T>() % dtype.size() == 0 && align_of::<T>() == align
}
