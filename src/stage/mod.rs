//! One thread that loads ahead of the caller, or the caller itself that loads when it asks: what a loader and a
//! generator are made of.

pub(crate) mod gate;
pub(crate) mod worker;

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use self::gate::Gate;
use self::worker::{Source, Worker};
use crate::backend::sealed::{Backend, Batches, SlotGuard, Slots};
use crate::backend::{NoSlot, Received, Sides, Waiting};
use crate::error::Error;
use crate::observe::breakdown::Breakdown;
use crate::observe::recorder::{LoadRecorder, Recorder};
use crate::observe::report::Report;
use crate::observe::trace::{LoaderTrace, Track};
use crate::slot::{Naming, Ticket};
use crate::thread::{ForkGuard, JoinOnDrop};

/// A batch as a backend's receiving side hands it out.
type Raw<B> = <<B as Backend>::Batches as Batches>::Batch;

/// What a stage is started with.
pub(crate) struct Options<'a> {
    pub(crate) naming: Naming,
    pub(crate) overlap: bool,
    /// How long to wait for a slot that the caller holds.
    pub(crate) held_timeout: Duration,
    pub(crate) trace: Option<Arc<LoaderTrace>>,
    pub(crate) breakdown: Breakdown,
    /// Steps in an epoch.
    pub(crate) steps: u64,
    /// Bytes of a host slot, their number, and what they are for.
    pub(crate) slots: (usize, usize, &'a dyn std::fmt::Display),
}

pub(crate) struct Stage<B: Backend> {
    running: ForkGuard<Running<B>>,
    naming: Naming,
    held_timeout: Duration,
    /// Since when the next slot has been found held by calls that do not wait.
    held_since: Option<Instant>,
    loads: Arc<AtomicU64>,
    /// Numbers the calls that ask for epochs, from 1.
    generation: u64,
}

/// What goes on while a stage lives.
struct Running<B: Backend> {
    // Dropped in this order: the end of the receiving side makes the thread return from its wait for a slot, the end
    // of the feed from its wait at the gate, and joins it.
    batches: B::Batches,
    feed: Feed<B>,
    recorder: Recorder,
    trace: Option<Arc<LoaderTrace>>,
}

/// Who fills the slots.
enum Feed<B: Backend> {
    /// A thread, ahead of the caller.
    Thread(Thread),
    /// The caller itself, when it asks for a batch.
    Inline(Box<(Worker<B::Content>, B::Slots)>),
}

/// The thread, which is told to end and joined when this is dropped.
struct Thread {
    gate: Arc<Gate>,
    _join: JoinOnDrop,
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.gate.close();
    }
}

impl<B: Backend> Stage<B> {
    /// Makes the slots and starts the thread.
    pub(crate) fn start(
        backend: B,
        source: Box<dyn Source<B::Content>>,
        options: Options<'_>,
    ) -> Result<Self, Error> {
        let Options { naming, overlap, held_timeout, trace, breakdown, steps, slots } = options;
        let (slot, host_depth, sum) = slots;
        let sides = Sides { slot, host_depth, overlap, trace: trace.clone(), naming: naming.clone(), sum };
        let (slots, batches) = backend.make(sides)?;
        let loads = Arc::new(AtomicU64::new(0));
        let (row, span) = if naming.rounds { ("generate", "generate") } else { ("read", "disk_load") };
        let recorder =
            LoadRecorder::new(Track::new(trace.clone(), 2, row), span, naming.clone(), loads.clone());
        let worker = Worker { source, naming: naming.clone(), recorder };
        let feed = if overlap {
            let gate = Arc::new(Gate::new(steps));
            let seen = gate.clone();
            let thread = thread::Builder::new()
                .name(format!("twinbuf-{row}"))
                .spawn(move || worker.run(&seen, slots))
                .map_err(Error::Spawn)?;
            Feed::Thread(Thread { gate, _join: JoinOnDrop::new(thread, batches.copy_thread()) })
        } else {
            Feed::Inline(Box::new((worker, slots)))
        };
        let track = Track::new(trace.clone(), 1, "train");
        let recorder = Recorder::new(track, naming.clone(), B::WAIT, breakdown, overlap);
        let running = ForkGuard::new(Running { batches, feed, recorder, trace });
        Ok(Self { running, naming, held_timeout, held_since: None, loads, generation: 0 })
    }

    pub(crate) fn naming(&self) -> &Naming {
        &self.naming
    }

    pub(crate) fn recorder(&mut self) -> &mut Recorder {
        &mut self.running.recorder
    }

    pub(crate) fn breakdown(&self) -> &Breakdown {
        &self.running.recorder.breakdown
    }

    /// `None` without a thread.
    pub(crate) fn gate(&self) -> Option<&Gate> {
        match &self.running.feed {
            Feed::Thread(thread) => Some(&thread.gate),
            Feed::Inline(_) => None,
        }
    }

    /// Whether this is a process that was forked from the one it was started in.
    pub(crate) fn is_foreign(&self) -> bool {
        self.running.is_foreign()
    }

    /// Whether batches come from a thread that stayed in the process that this one was forked from.
    pub(crate) fn is_orphaned(&self) -> bool {
        self.gate().is_some() && self.running.is_foreign()
    }

    pub(crate) fn trace_path(&self) -> Option<&std::path::Path> {
        self.running.trace.as_ref().map(|trace| trace.path())
    }

    /// Where the time went so far.
    pub(crate) fn report(&self) -> Report {
        // Relaxed: a count. Handing a batch over made the loads before it visible.
        let loads = self.loads.load(Ordering::Relaxed);
        let (time, bytes) = self.running.batches.copies();
        self.running.recorder.report.clone().with_transfers(loads, time, bytes)
    }

    /// Starts a new generation: what was loaded for an earlier one is discarded when it comes.
    pub(crate) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// The caller asks for the batch of `ticket`: the use of the one before is over.
    pub(crate) fn asked(&mut self, ticket: Ticket, now: Instant) {
        let Running { batches, recorder, .. } = &mut *self.running;
        recorder.asked(ticket, now, |ticket| batches.copied(ticket));
    }

    /// The epoch is over, or the caller gives it up.
    pub(crate) fn ended(&mut self, now: Instant) {
        let Running { batches, recorder, feed, .. } = &mut *self.running;
        recorder.ended(now, |ticket| batches.copied(ticket));
        if let Feed::Inline(inline) = feed {
            inline.0.recorder.flush();
        }
    }

    /// The batch of `ticket`, which is the next one in order.
    pub(crate) fn receive(
        &mut self,
        ticket: Ticket,
        mut waiting: Waiting<'_, '_>,
    ) -> Poll<Result<Raw<B>, Error>> {
        self.asked(ticket, Instant::now());
        let Running { batches, feed, recorder, .. } = &mut *self.running;
        let mut found = None;
        if let Feed::Inline(inline) = feed {
            let (worker, slots) = &mut **inline;
            match slots.acquire_within(waiting.patience(self.held_timeout)) {
                Ok(mut slot) => {
                    let meta = worker.load(ticket, slot.content(), Duration::ZERO);
                    // If the backend has failed, the receiving side has the error.
                    let _ = slot.commit(meta);
                }
                Err(NoSlot::Held) => found = Some(Received::SlotHeld),
                Err(NoSlot::Gone) => {}
            }
        }
        loop {
            let received = found
                .take()
                .unwrap_or_else(|| recorder.wait(|| batches.receive(&mut waiting, self.held_timeout)));
            let mut batch = match received {
                Received::Batch(batch) => batch,
                Received::NotYet => return Poll::Pending,
                Received::SlotHeld => {
                    let (option, slots) = batches.slots();
                    let error = Error::SlotHeld { at: self.naming.at(ticket), option, slots };
                    return self.slot_held(waiting, error);
                }
                Received::Gone => return Poll::Ready(Err(Error::ThreadGone { at: self.naming.at(ticket) })),
                Received::Failed(source) => {
                    return Poll::Ready(Err(Error::Upload { at: self.naming.at(ticket), source }));
                }
            };
            let meta = B::Batches::meta(&mut batch);
            if meta.ticket.generation != ticket.generation {
                // Loaded ahead for a call that was left early: released, and on to the next.
                recorder.discarded(meta.ticket);
                continue;
            }
            self.held_since = None;
            let now = Instant::now();
            // An error is moved out. The slot that it leaves is an empty batch.
            match mem::replace(&mut meta.result, Ok(0)) {
                Ok(len) => {
                    meta.result = Ok(len);
                    recorder.received(meta, now, batches.copied(ticket));
                    return Poll::Ready(Ok(batch));
                }
                Err(error) => {
                    recorder.discarded(ticket);
                    return Poll::Ready(Err(error));
                }
            }
        }
    }

    /// The next slot is held. A call that blocks has waited for it as long as it may; the others are told to come
    /// back until the same time is over.
    fn slot_held(&mut self, waiting: Waiting<'_, '_>, error: Error) -> Poll<Result<Raw<B>, Error>> {
        if !matches!(waiting, Waiting::Block) {
            let since = *self.held_since.get_or_insert_with(Instant::now);
            if since.elapsed() < self.held_timeout {
                if let Waiting::Poll(cx) = waiting {
                    cx.waker().wake_by_ref();
                }
                return Poll::Pending;
            }
        }
        Poll::Ready(Err(error))
    }

    /// Ends the thread, and returns the error that the caller has not been told of, if there is one.
    pub(crate) fn close(self) -> Result<(), Error> {
        let Self { running, generation, .. } = self;
        let Some(Running { mut batches, feed, recorder, trace }) = running.into_inner() else {
            return Ok(());
        };
        let mut unheard = Ok(());
        if let Feed::Thread(thread) = &feed {
            thread.gate.close();
            // Up to the end of the ring, or to a batch that the caller has leaked.
            loop {
                let mut batch = match batches.receive(&mut Waiting::Drain, Duration::ZERO) {
                    Received::Batch(batch) => batch,
                    Received::Failed(source) => {
                        unheard = Err(Error::Device(source));
                        break;
                    }
                    _ => break,
                };
                let meta = B::Batches::meta(&mut batch);
                if meta.ticket.generation == generation && meta.result.is_err() {
                    unheard = mem::replace(&mut meta.result, Ok(0)).map(drop);
                    break;
                }
            }
        }
        drop(batches);
        drop(feed);
        // The last of the tracks: now everything is written, or was refused.
        drop(recorder);
        unheard.and(trace.map_or(Ok(()), |trace| trace.close().map_err(Error::trace)))
    }
}
