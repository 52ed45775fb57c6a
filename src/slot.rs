//! What a slot carries beside its content: which batch it is, and what it took to load.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use twinbuf_mmap::BatchIndices;

use crate::error::{At, Error};
use crate::loader::checkpoint::Identity;
use crate::loader::layout::Layout;
use crate::observe::cpu::Share;

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
    /// When the batch was dropped, and on which thread.
    pub(crate) freed: Option<(Instant, usize)>,
}

impl<T> Slot<T> {
    pub(crate) fn new(content: T) -> Self {
        Self { content, meta: None, freed: None }
    }

    pub(crate) fn meta(&self) -> &BatchMeta {
        let Some(meta) = &self.meta else { unreachable!("a slot is handed over with its meta data") };
        meta
    }
}

/// What travels with a batch from the thread that loads it to the caller. Its content is private.
#[derive(Debug)]
pub struct BatchMeta {
    pub(crate) ticket: Ticket,
    /// `None` for rounds of a generator, which are not made of records.
    pub(crate) records: Option<Origin>,
    /// The bytes of the batch, or why it could not be loaded.
    pub(crate) result: Result<usize, Error>,
    pub(crate) stats: LoadStats,
}

/// Which records a batch is made of, and how they lie in it.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) plan: BatchIndices,
    /// What a checkpoint after the batch belongs to.
    pub(crate) identity: Arc<Identity>,
    pub(crate) layout: Arc<Layout>,
}

impl BatchMeta {
    pub(crate) fn records(&self) -> &Origin {
        let Some(records) = &self.records else { unreachable!("a loader's batch is made of records") };
        records
    }
}

/// A batch that a loader or generator may load next, or has loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// Names batches: in errors as [`At`], in traces as [`BatchId`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Naming {
    pub(crate) loader: Option<Arc<str>>,
    /// The epochs are the rounds of a generator, and have no steps.
    pub(crate) rounds: bool,
}

impl Naming {
    pub(crate) fn at(&self, ticket: Ticket) -> At {
        let step = (!self.rounds).then_some(ticket.step);
        At { loader: self.loader.clone(), epoch: ticket.epoch, step }
    }

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

/// What it took to fill a slot.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LoadStats {
    /// Reading, hints included; or generating.
    pub(crate) read: Duration,
    pub(crate) transform: Duration,
    /// How long the loading thread waited for the slot, or for leave to start.
    pub(crate) waited: Duration,
    /// System calls that read files.
    pub(crate) io_calls: u64,
    /// When the load began.
    pub(crate) started: Option<Instant>,
    /// Of the load, if it was looked at.
    pub(crate) cpu: Option<Share>,
    /// When the batch that had the slot before freed it.
    pub(crate) freed: Option<Freed>,
}

/// When the slot of a batch was freed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) ticket: Ticket,
    pub(crate) at: Instant,
    pub(crate) thread: usize,
}

impl LoadStats {
    /// How long the loading thread worked on the batch.
    pub(crate) fn busy(&self) -> Duration {
        self.read + self.transform
    }
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
