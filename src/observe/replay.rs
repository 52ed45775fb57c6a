//! Runs the last batches again, in a simulation: with other settings, or with a stage that is faster.
//!
//! The simulation is the loader without its data. Slots come round in turn: a thread that is free takes the next batch when
//! the next slot is free. The caller receives the batches in order, uses each for as long as it did, and a slot is free
//! when its batch is dropped. Threads that compute share the processors.
//!
//! Times are nanoseconds as `f64`: whole numbers stay exact unless threads share a processor.

/// The loader options that [`Report::predict`](super::Report::predict) can vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Settings {
    /// Whether threads load ahead of the caller.
    pub overlap: bool,
    /// The number of host slots.
    pub depth: usize,
    /// The number of loading threads.
    pub workers: usize,
}

/// One batch as it was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Unit {
    /// The caller began to iterate with this batch: how long before it asked for it the threads could load. `None` if the
    /// batch before it belongs to the same iteration.
    pub(super) lead: Option<f64>,
    /// With the time that the caller took part in it.
    pub(super) read: f64,
    /// Whether a caller that waits takes part in the load of the only thread.
    pub(super) helps: bool,
    pub(super) transform: f64,
    pub(super) transfer: f64,
    /// From receiving it to asking for the next.
    pub(super) train: f64,
    /// Spent on something else during that time; the wall-clock time leaves it out.
    pub(super) paused: f64,
    pub(super) hold: Hold,
}

/// Until when a batch holds its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum Hold {
    /// Until the caller asks for the next batch.
    #[default]
    Use,
    /// Until the caller has used the batch `later` positions later for `used`.
    Kept { later: usize, used: f64 },
    /// Another thread has it: for `service`, after the batches that it had before.
    Lent { thread: usize, service: f64 },
}

/// What the batches ran on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Machine {
    pub(super) processors: f64,
    /// The part of a load, and of a use, that takes a processor.
    pub(super) load_cpu: f64,
    pub(super) train_cpu: f64,
    /// The rest of a load is reading from a disk that all threads share.
    pub(super) shared_disk: bool,
    /// Slots on the device; 0 without one.
    pub(super) device_depth: usize,
    /// A round is started only when the caller has the one before.
    pub(super) lockstep: bool,
    /// The time ends with the work on the device, not with the caller, who is ahead of it by as many batches as have slots.
    pub(super) drains: bool,
    /// From a batch being ready to a caller who sleeps having it.
    pub(super) wake: f64,
    /// From a slot being free to a thread that sleeps loading into it.
    pub(super) start: f64,
}

/// How much of its measured time each stage takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    pub(super) read: f64,
    pub(super) transform: f64,
    pub(super) transfer: f64,
    pub(super) train: f64,
    /// The use by other threads.
    pub(super) lent: f64,
}

impl Scale {
    pub(super) const MEASURED: Self =
        Self { read: 1.0, transform: 1.0, transfer: 1.0, train: 1.0, lent: 1.0 };
}

/// What came of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    /// From asking for the first batch of each iteration to its end, added up.
    pub(super) wall: f64,
    /// The part of it that the caller waited.
    pub(super) waiting: f64,
    /// How often it did.
    pub(super) waits: f64,
    /// How long the loading threads waited for slots, all together.
    pub(super) for_slots: f64,
}

/// What the caller does.
#[derive(Clone, Copy, Debug)]
enum Caller {
    /// It has begun to iterate, and asks for its first batch at this time.
    Preparing(f64),
    /// Since when.
    Asking(f64),
    /// The batch is there; the caller sleeps until this time, and has asked since the first.
    Waking(f64, f64),
    /// How much is done, since when it has asked.
    Using(f64, f64),
}

/// A loading thread.
#[derive(Clone, Debug, Default)]
struct Lane {
    /// The batch that it took last.
    unit: usize,
    /// What is left of the load.
    left: Option<f64>,
    /// It has nothing to load, or nothing to load into.
    sleeps: bool,
    /// When it is awake.
    awake: f64,
}

/// Less than this, in nanoseconds, is what rounding left over.
const NOTHING: f64 = 1e-3;

/// Runs `units` under `settings`. `None` if the caller would wait for a slot that it keeps.
pub(super) fn replay(units: &[Unit], machine: &Machine, settings: Settings, scale: Scale) -> Option<Outcome> {
    // One more than there are batches: the others would never load. One thread alone differs, because the caller helps it.
    let most = units.len() + 1;
    let workers = if settings.overlap { settings.workers.clamp(1, most) } else { 1 };
    let mut run = Run {
        units,
        machine,
        scale,
        depth: settings.depth.clamp(1, most),
        overlap: settings.overlap,
        now: 0.0,
        lanes: vec![Lane::default(); workers],
        next: 0,
        loaded: vec![false; units.len()],
        ready: vec![f64::INFINITY; units.len()],
        freed: vec![f64::INFINITY; units.len()],
        copied: 0,
        copying: f64::NEG_INFINITY,
        lent: Vec::new(),
        drops: drops(units),
        at: 0,
        end: 0,
        caller: Caller::Preparing(0.0),
        outcome: Outcome::default(),
    };
    run.begin();
    while run.at < units.len() {
        run.step()?;
    }
    if machine.drains {
        run.outcome.wall += run.lent.iter().fold(0.0, |left: f64, until| left.max(until - run.now));
    }
    Some(run.outcome)
}

/// For each batch, those whose slots are freed while it is used: how much of it is used by then.
fn drops(units: &[Unit]) -> Vec<Vec<(f64, usize)>> {
    let mut drops = vec![Vec::new(); units.len()];
    for (unit, Unit { hold, train, paused, .. }) in units.iter().enumerate() {
        let (at, used) = match *hold {
            Hold::Use => (unit, train + paused),
            Hold::Kept { later, used } => (unit + later, used),
            Hold::Lent { .. } => continue,
        };
        if let Some(drops) = drops.get_mut(at) {
            drops.push((used.min(units[at].train + units[at].paused), unit));
        }
    }
    drops.iter_mut().for_each(|drops| drops.sort_by(|a, b| a.0.total_cmp(&b.0)));
    drops
}

struct Run<'a> {
    units: &'a [Unit],
    machine: &'a Machine,
    scale: Scale,
    depth: usize,
    overlap: bool,
    now: f64,
    lanes: Vec<Lane>,
    /// The batch that is taken next.
    next: usize,
    loaded: Vec<bool>,
    /// When the caller can have a batch.
    ready: Vec<f64>,
    /// When the batch was dropped.
    freed: Vec<f64>,
    /// The batch that is copied to the device next.
    copied: usize,
    /// When the last copy ends: only one runs at a time.
    copying: f64,
    /// Until when each other thread has batches.
    lent: Vec<f64>,
    drops: Vec<Vec<(f64, usize)>>,
    /// The batch that the caller asks for, or uses.
    at: usize,
    /// The end of the iteration that it belongs to.
    end: usize,
    caller: Caller,
    outcome: Outcome,
}

impl Run<'_> {
    /// The caller comes to the next batch.
    fn begin(&mut self) {
        if let Some(unit) = self.units.get(self.at) {
            if self.at == self.end {
                let later = &self.units[self.at + 1..];
                self.end = self.at + 1 + later.iter().take_while(|unit| unit.lead.is_none()).count();
            }
            self.caller = match unit.lead {
                Some(lead) => Caller::Preparing(self.now + lead),
                None => Caller::Asking(self.now),
            };
        }
    }

    /// The number of batches that may be started by now.
    fn granted(&self) -> usize {
        let asking = !matches!(self.caller, Caller::Preparing(_));
        if !self.overlap {
            return self.at + usize::from(matches!(self.caller, Caller::Asking(_)));
        }
        if self.machine.lockstep {
            let next = usize::from(asking) + usize::from(matches!(self.caller, Caller::Using(..)));
            return self.end.min(self.at + next);
        }
        self.end
    }

    /// Whether the next slot is free.
    fn has_slot(&self) -> bool {
        let Some(unit) = self.next.checked_sub(self.depth) else { return true };
        // With a device the host slot is free after the copy.
        let free = if self.machine.device_depth > 0 { self.ready[unit] } else { self.freed[unit] };
        free <= self.now
    }

    /// Does all events of the current time, then advances to the time of the next event.
    fn step(&mut self) -> Option<()> {
        while self.act() {}
        if self.at == self.units.len() {
            return Some(());
        }
        let loading = self.lanes.iter().filter(|lane| lane.left.is_some()).count() as f64;
        let using = matches!(self.caller, Caller::Using(..));
        let Machine { processors, load_cpu, train_cpu, shared_disk, .. } = *self.machine;
        let helping = if self.is_helping() { 1.0 } else { 0.0 };
        let wanted = (loading + helping) * load_cpu + if using { train_cpu } else { 0.0 };
        let (cpu, wait) = ((wanted / processors).max(1.0), (loading * (1.0 - load_cpu)).max(1.0));
        let load = load_cpu * cpu + (1.0 - load_cpu) * if shared_disk { wait } else { 1.0 };
        let load = load / (1.0 + helping);
        let train = train_cpu * cpu + (1.0 - train_cpu);
        let mut step = f64::INFINITY;
        for left in self.lanes.iter().filter_map(|lane| lane.left) {
            step = step.min(left * load);
        }
        let mut until = |time: f64| {
            if time > self.now {
                step = step.min(time - self.now);
            }
        };
        match self.caller {
            Caller::Preparing(time) | Caller::Waking(time, _) => until(time),
            Caller::Asking(_) => {}
            Caller::Using(done, _) => until(self.now + (self.until(done) - done) * train),
        }
        self.lent.iter().copied().for_each(&mut until);
        // The last to be freed is not the only one that a thread may wait for.
        let slots = self.depth.max(self.machine.device_depth);
        (self.next.saturating_sub(slots)..self.next).for_each(|unit| until(finite(self.freed[unit])));
        until(self.copying);
        self.lanes.iter().filter(|lane| lane.left.is_none()).for_each(|lane| until(lane.awake));
        if !step.is_finite() {
            return None;
        }
        if loading < self.lanes.len() as f64 && self.overlap {
            let granted = self.next < self.granted();
            for lane in 0..self.lanes.len() {
                let starved = self.lanes[lane].left.is_none() && !(granted && self.has_slot());
                self.lanes[lane].sleeps |= starved;
                self.outcome.for_slots += if starved && granted { step } else { 0.0 };
            }
        }
        self.now += step;
        for left in self.lanes.iter_mut().filter_map(|lane| lane.left.as_mut()) {
            *left -= step / load;
        }
        if let Caller::Using(done, _) = &mut self.caller {
            *done += step / train;
        }
        Some(())
    }

    /// Whether the caller waits, and takes part in the load of the only thread.
    fn is_helping(&self) -> bool {
        let loads = |lane: &Lane| lane.left.is_some() && self.units[lane.unit].helps;
        self.overlap
            && self.lanes.len() == 1
            && matches!(self.caller, Caller::Asking(_))
            && loads(&self.lanes[0])
    }

    /// How much of the batch in use is used when something happens next.
    fn until(&self, done: f64) -> f64 {
        let drop = self.drops[self.at].first().map_or(f64::INFINITY, |&(at, _)| at * self.scale.train);
        drop.min(self.used()).max(done)
    }

    /// How long the batch in use is used.
    fn used(&self) -> f64 {
        let Unit { train, paused, .. } = &self.units[self.at];
        train * self.scale.train + paused
    }

    /// Does one thing that happens now.
    fn act(&mut self) -> bool {
        if self.at == self.units.len() {
            return false;
        }
        for lane in 0..self.lanes.len() {
            match self.lanes[lane].left {
                Some(left) if left <= NOTHING => {
                    self.lanes[lane].left = None;
                    let unit = self.lanes[lane].unit;
                    self.loaded[unit] = true;
                    if self.machine.device_depth == 0 {
                        self.ready[unit] = self.now;
                    }
                    return true;
                }
                None if self.next < self.granted() && self.has_slot() => {
                    if std::mem::take(&mut self.lanes[lane].sleeps) {
                        self.lanes[lane].awake = self.now + self.machine.start;
                        return true;
                    }
                    if self.lanes[lane].awake > self.now {
                        continue;
                    }
                    let Unit { read, transform, .. } = &self.units[self.next];
                    let load = read * self.scale.read + transform * self.scale.transform;
                    self.lanes[lane].unit = self.next;
                    self.lanes[lane].left = Some(load);
                    self.next += 1;
                    return true;
                }
                _ => {}
            }
        }
        self.copy() || self.call()
    }

    /// Starts a copy to the device, if one may start.
    fn copy(&mut self) -> bool {
        if self.copying > self.now {
            return false;
        }
        // In order: the next batch, once its slot on the device is free.
        let slot = self.copied.checked_sub(self.machine.device_depth);
        let free = slot.is_none_or(|slot| self.freed[slot] <= self.now);
        let unit = self.copied;
        if !(free && self.loaded.get(unit) == Some(&true)) || self.machine.device_depth == 0 {
            return false;
        }
        self.copied += 1;
        self.copying = self.now + self.units[unit].transfer * self.scale.transfer;
        self.ready[unit] = self.copying;
        true
    }

    /// What the caller does now.
    fn call(&mut self) -> bool {
        match self.caller {
            Caller::Preparing(time) if time <= self.now => self.caller = Caller::Asking(self.now),
            Caller::Asking(since) if self.ready[self.at] <= self.now => {
                if self.now > since {
                    self.outcome.waits += 1.0;
                    // A caller that loads, or takes part in it, is awake.
                    let sleeps = self.overlap && !(self.lanes.len() == 1 && self.units[self.at].helps);
                    let wake = if sleeps { self.machine.wake } else { 0.0 };
                    self.caller = Caller::Waking(self.now + wake, since);
                } else {
                    self.receive(since);
                }
            }
            Caller::Waking(time, since) if time <= self.now => self.receive(since),
            Caller::Using(done, since) => {
                let used = self.used();
                if let Some(&(at, unit)) = self.drops[self.at].first() {
                    if (at * self.scale.train).min(used) <= done + NOTHING {
                        self.drops[self.at].remove(0);
                        self.freed[unit] = self.now;
                        return true;
                    }
                }
                if used > done + NOTHING {
                    return false;
                }
                self.outcome.wall += (self.now - since - self.units[self.at].paused).max(0.0);
                self.at += 1;
                self.begin();
            }
            _ => return false,
        }
        true
    }

    fn receive(&mut self, since: f64) {
        self.outcome.waiting += self.now - since;
        self.caller = Caller::Using(0.0, since);
        if let Hold::Lent { thread, service } = self.units[self.at].hold {
            if self.lent.len() <= thread {
                self.lent.resize(thread + 1, 0.0);
            }
            self.lent[thread] = self.lent[thread].max(self.now) + service * self.scale.lent;
            self.freed[self.at] = self.lent[thread];
        }
    }
}

/// A time that has been decided.
fn finite(time: f64) -> f64 {
    if time.is_finite() { time } else { f64::NEG_INFINITY }
}

#[cfg(test)]
mod tests;
