//! A pipe without a front end of its own: its builder, and its items.

use std::time::Instant;

use super::items::{Course, Front, Items, Next};
use super::memory::check_memory;
use super::options::{Options, common};
use super::ring::{Ring, Slot, Slots};
use super::turn::Source;
use super::{AnySource, Pipe, Place, Running, Setup, Stopped};
use crate::error::Error;
use crate::observe::recorder::LoopRecorder;
use crate::observe::report::Kind;

/// Builds a [`Pipe`] with host slots. [`builder`] returns it.
#[must_use = "a builder does nothing until `build`"]
pub struct Builder<T: Send + 'static, U: Send + 'static> {
    slots: Vec<T>,
    sources: Vec<AnySource<Slots<T, U>>>,
    driven: usize,
    helper: Option<AnySource<Slots<T, U>>>,
    rounds: bool,
    pub(crate) options: Options,
}

/// Returns a builder for a pipe with these slots. Each worker fills one slot at a time: with overlap, one slot more than
/// workers lets all of them fill while the caller uses an item, and more slots absorb bursts.
pub fn builder<T: Send + 'static, U: Send + 'static>(slots: Vec<T>) -> Builder<T, U> {
    Builder {
        slots,
        sources: Vec::new(),
        driven: 0,
        helper: None,
        rounds: false,
        options: Options::default(),
    }
}

impl<T: Send + 'static, U: Send + 'static> Builder<T, U> {
    /// Adds a worker: a thread that fills slots with this source. Without overlap the caller fills them, with the
    /// first source.
    pub fn worker(mut self, source: impl Source<T, Unit = U>) -> Self {
        self.sources.push(Box::new(source));
        self
    }

    /// Adds a worker without a thread: [`Pipe::driven`] hands it out, and whoever has it fills slots.
    ///
    /// Without overlap driven workers exist only in a pipe that has no other [`worker`](Self::worker). A driver on the
    /// caller's own thread can then fill a slot ([`Driven::try_next`](super::Driven::try_next)) after
    /// [`Items::try_next`](super::Items::try_next) returned `Pending`.
    pub fn driven(mut self) -> Self {
        self.driven += 1;
        self
    }

    /// Gives the caller a source of its own: `next` and `next_timeout`, while they wait, may fill slots as one more
    /// worker, if its [`Source::pays`] returns `true` and the last fill was short enough for the wait. Workers for
    /// which no processor is left then rest for 1 ms after each fill that takes less, if their `pays` is `true`.
    /// Default: none. Without overlap it is not used.
    pub fn helper(mut self, source: impl Source<T, Unit = U>) -> Self {
        self.helper = Some(Box::new(source));
        self
    }

    /// Names units by their number alone, as rounds, and not by epoch and step. Default: by epoch and step.
    pub fn rounds(mut self) -> Self {
        self.rounds = true;
        self
    }

    common!();

    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// - [`Error::Option`]: there is no slot, or no worker, or the memory of the machine has no room for so many slots,
    ///   or there are more than 2^31.
    /// - [`Error::Trace`]: the trace file could not be created.
    /// - [`Error::Spawn`]: the system could not start a thread.
    pub fn build(self) -> Result<Pipe<Slots<T, U>>, Error> {
        let Self { slots, sources, driven, helper, rounds, mut options } = self;
        for (option, found) in [("slots", slots.len()), ("worker", sources.len() + driven)] {
            if found == 0 {
                return Err(Error::option(option, "at least one", "none"));
            }
        }
        let place = size_of::<Slot<T, U>>();
        check_memory("slots", slots.len(), place, &format_args!("{} slots", slots.len()))?;
        let trace = options.open(0, 1)?;
        let depth = slots.len();
        Pipe::start(Setup {
            sides: Slots::ring(slots),
            sources,
            driven,
            helper,
            options,
            trace,
            kind: if rounds { Kind::Rounds } else { Kind::Items },
            depth,
            locate: Box::new(|_, _| None),
            add_reads: Box::new(|report| report),
        })
    }
}

debug!([T: Send + 'static, U: Send + 'static] Builder[T, U], |builder|
    slots: builder.slots.len(), workers: builder.sources.len() + builder.driven, options: builder.options);

/// The current call of a pipe that no loader, generator or stream is built on.
#[derive(Debug, Default)]
pub(super) struct Begun {
    /// The name of the first unit.
    first: Place,
    /// The number of units, if the iterator of units gives its exact length.
    length: Option<u64>,
    /// How many units may be started.
    granted: u64,
    /// The length is 0, and there is a unit.
    miscounted: bool,
}

impl<R: Ring> Pipe<R> {
    /// Begins with these units, named as steps of the epoch `first`, or as rounds from `first` on. At most `granted` of
    /// them are started before [`grant`](Self::grant). What was filled for an earlier call is discarded.
    ///
    /// Iterate with [`Items::lent`] or [`Items::owned`]; [`items`](Self::items) begins and iterates. If `units` gives
    /// its exact length ([`Iterator::size_hint`]), the end takes no slot; a wrong length is an [`Error::Load`].
    pub fn begin<I>(&mut self, first: u64, units: I, granted: u64)
    where
        I: IntoIterator<Item = R::Unit>,
        I::IntoIter: Send + 'static,
    {
        let (mut units, rounds) = (units.into_iter(), self.running.shared.naming.rounds);
        let length = match units.size_hint() {
            (least, Some(most)) if least == most => Some(least as u64),
            _ => None,
        };
        let ordinal = if rounds { self.recorder().report.batches } else { self.call };
        let place = Place { ordinal, epoch: first, step: 0 };
        let miscounted = length == Some(0) && units.next().is_some();
        self.begun = Begun { first: place, length, granted, miscounted };
        let order = (0..).zip(units).map(move |(seq, unit)| (nth(place, rounds, seq), unit));
        self.post(Box::new(order), length.unwrap_or(u64::MAX), granted);
        if !rounds {
            self.recorder().began(place, Instant::now());
        }
    }

    /// Lets `granted` units of the present call be started in all.
    pub fn grant(&mut self, granted: u64) {
        (self.begun.granted, self.stopped) = (granted, self.stopped.filter(|why| *why != Stopped::Left));
        let since = self.running.recorder.last_call().unwrap_or_else(Instant::now);
        self.grant_since(granted, since);
    }

    /// Iterates over these units: [`begin`](Self::begin) with all of them. `first` is the number of earlier calls.
    pub fn items<I>(&mut self, units: I) -> Items<'_, Self>
    where
        I: IntoIterator<Item = R::Unit>,
        I::IntoIter: Send + 'static,
    {
        self.begin(self.call, units, u64::MAX);
        Items::lent(self)
    }

    /// Returns a recorder for the loop over what another thread receives from this pipe and [sends](Builder::sends) to a
    /// device. It writes to the same trace, which is complete when both are closed or dropped.
    #[must_use]
    pub fn loop_recorder(&self) -> LoopRecorder {
        LoopRecorder::of(self.running.trace.clone(), false, true)
    }

    /// The error of a call that no unit can answer.
    fn refused(&self, why: &'static str) -> Next<R::Item> {
        Next::Failed(Error::Load { at: self.at(self.place()), source: why.into() })
    }
}

impl<R: Ring> Items<'_, Pipe<R>> {
    /// Lets `granted` units of the call be started in all, and after an error passes over the unit that failed.
    pub fn resume(&mut self, granted: u64) {
        self.ended = false;
        let pipe = self.front_mut();
        pipe.pass_over();
        pipe.grant(granted);
    }
}

/// The name of unit `seq` of a call, whose first unit has the name `first`.
fn nth(first: Place, rounds: bool, seq: u64) -> Place {
    let Place { ordinal, epoch, .. } = first;
    if rounds {
        Place { ordinal: ordinal.saturating_add(seq), epoch: epoch.saturating_add(seq), step: 0 }
    } else {
        Place { step: seq, ..first }
    }
}

impl<R: Ring> Front for Pipe<R> {
    type Item = R::Item;
}

impl<R: Ring> Course<R::Item> for Pipe<R> {
    type Ring = R;

    fn pipe(&self) -> &Self {
        self
    }

    fn pipe_mut(&mut self) -> &mut Self {
        self
    }

    fn place(&self) -> Place {
        nth(self.begun.first, self.running.shared.naming.rounds, self.received)
    }

    fn next(&mut self) -> Next<R::Item> {
        let Running { driven, threads, .. } = &*self.running;
        if self.begun.miscounted {
            self.refused("wanted no unit, as the order's `size_hint` says, found more")
        } else if self.begun.length == Some(self.received) {
            Next::End
        } else if self.call == 0 {
            self.refused("wanted `begin` before the first item")
        } else if !driven.is_empty() && threads.is_empty() {
            self.refused("wanted a driver, found all workers still in the pipe: call `Pipe::driven`")
        } else if self.stopped.is_some() {
            Next::End
        } else if self.received >= self.begun.granted {
            self.refused("wanted more units granted, found that all that were have come")
        } else {
            Next::Slot
        }
    }

    fn item(&mut self, slot: R::Item) -> R::Item {
        slot
    }

    fn ended(&mut self, _: Option<&Error>) {
        self.stopped.get_or_insert(Stopped::Left);
        self.retract();
    }

    fn left(&self) -> (usize, Option<usize>) {
        let length = if self.stopped.is_some() { Some(self.received) } else { self.begun.length };
        let left = length.and_then(|length| usize::try_from(length.saturating_sub(self.received)).ok());
        (left.unwrap_or(0).min(1), left)
    }
}

debug!([R: Ring] Pipe[R], |pipe|
    name: pipe.running.shared.naming.loader, overlap: pipe.running.overlap,
    trace: pipe.running.trace.is_some());
