//! Runs the last batches again, on paper: with other settings, or with a stage that is faster.
//!
//! The replay is the loader without its data. Slots come round in turn: the thread that is free first takes the next batch
//! when the next slot is free. The caller receives the batches in order, uses each for as long as it did, and a slot is free
//! when its batch is dropped. What threads share (the processors, a disk, a lock) is a floor under the whole time.
//!
//! Times are nanoseconds as `f64`: whole numbers stay exact.

/// The loader options that [`Report::predict`](crate::Report::predict) can vary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    pub(super) read: f64,
    /// Whether a caller that waits loads too, beside the only thread.
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
    /// The part of a load during which no other load makes progress.
    pub(super) serial: f64,
    /// Slots on the device; 0 without one.
    pub(super) device_depth: usize,
    /// A round is started only when the caller has the one before.
    pub(super) lockstep: bool,
    /// From a batch being ready to a caller who sleeps having it.
    pub(super) wake: f64,
    /// From a slot being free to a thread that sleeps loading into it.
    pub(super) start: f64,
}

/// How much of its measured time each stage takes: read, transform, transfer, the caller's use, and that of other threads.
pub(super) type Scale = [f64; 5];

pub(super) const MEASURED: Scale = [1.0; 5];

/// What came of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    /// From asking for the first batch of each iteration to its end, added up.
    pub(super) wall: f64,
    /// The same, until the other threads are done with what they were lent.
    pub(super) end: f64,
    /// The part of `wall` that the caller waited.
    pub(super) waiting: f64,
}

/// Runs `units` under `settings`. `None` if the caller would wait for a slot that it keeps.
pub(super) fn replay(units: &[Unit], machine: &Machine, settings: Settings, scale: Scale) -> Option<Outcome> {
    let [read, transform, transfer, train, by_others] = scale;
    // More workers than batches would never load. The limit is one higher, because a single worker is a special case:
    // the caller helps it.
    let most = units.len() + 1;
    let workers = if settings.overlap { settings.workers.clamp(1, most) } else { 1 };
    let depth = settings.depth.clamp(1, most);
    let mut threads = vec![0.0_f64; workers];
    // When each batch is ready for the caller, and when its slot is free again.
    let (mut ready, mut freed) = (vec![f64::INFINITY; units.len()], vec![f64::INFINITY; units.len()]);
    let on_device = machine.device_depth > 0;
    let mut drops = drops(units);
    let (mut lent, mut copied): (Vec<f64>, f64) = (Vec::new(), 0.0);
    // When the iteration began, when the caller received the last batch, and when it had used that batch.
    let (mut began, mut received, mut now) = (0.0, 0.0, 0.0);
    let (mut found, mut computed, mut serial) = (Outcome::default(), 0.0, 0.0);
    for (at, unit) in units.iter().enumerate() {
        let asked = now + unit.lead.unwrap_or(0.0);
        if unit.lead.is_some() {
            (began, received) = (now, asked);
        }
        // The load starts when the caller's requests allow it, a thread is free, and a slot is free.
        let granted = match settings.overlap {
            false => asked,
            true if machine.lockstep => received,
            true => began,
        };
        // With a device, a host slot is free as soon as its batch has been copied.
        let left = if on_device { &ready } else { &freed };
        let slot = at.checked_sub(depth).map_or(0.0, |before| left[before]);
        let thread = threads.iter_mut().min_by(|a, b| a.total_cmp(b))?;
        let may = granted.max(slot);
        let sleeps = settings.overlap && may > *thread;
        let start = thread.max(may) + if sleeps { machine.start } else { 0.0 };
        let load = unit.read * read + unit.transform * transform;
        let mut end = start + load;
        let helps = settings.overlap && workers == 1 && unit.helps;
        if helps && asked < end {
            // From then on the caller helps: two threads share the rest of the load.
            let alone = asked.max(start);
            end = alone + (end - alone) / 2.0;
        }
        *thread = end;
        ready[at] = end;
        if on_device {
            // Copies run one at a time, in order, each into a free slot on the device.
            let slot = at.checked_sub(machine.device_depth).map_or(0.0, |before| freed[before]);
            copied = end.max(copied).max(slot) + unit.transfer * transfer;
            ready[at] = copied;
        }
        // A caller that loads or helps is awake, so it needs no time to wake up.
        let wake = if settings.overlap && !helps { machine.wake } else { 0.0 };
        received = if ready[at] > asked { ready[at] + wake } else { asked };
        if !received.is_finite() {
            return None;
        }
        let used = unit.train * train;
        now = received + used + unit.paused;
        if let Hold::Lent { thread, service } = unit.hold {
            if lent.len() <= thread {
                lent.resize(thread + 1, 0.0);
            }
            lent[thread] = lent[thread].max(received) + service * by_others;
            freed[at] = lent[thread];
        }
        for (after, dropped) in std::mem::take(&mut drops[at]) {
            freed[dropped] = (received + after * train).min(now);
        }
        found.wall += now - asked - unit.paused;
        found.waiting += received - asked;
        computed += load * machine.load_cpu + used * machine.train_cpu;
        serial += load * machine.serial;
    }
    let shared = serial.max(computed / machine.processors);
    found.waiting += (shared - found.wall).max(0.0);
    found.wall = found.wall.max(shared);
    found.end = found.wall + lent.iter().fold(0.0, |most: f64, until| most.max(until - now));
    Some(found)
}

/// For each batch, those that are dropped while it is used, after how much of its use.
fn drops(units: &[Unit]) -> Vec<Vec<(f64, usize)>> {
    let mut drops = vec![Vec::new(); units.len()];
    for (unit, Unit { hold, .. }) in units.iter().enumerate() {
        let (at, used) = match *hold {
            Hold::Use => (unit, f64::INFINITY),
            Hold::Kept { later, used } => (unit + later, used),
            Hold::Lent { .. } => continue,
        };
        if let Some(drops) = drops.get_mut(at) {
            drops.push((used, unit));
        }
    }
    drops
}

#[cfg(test)]
mod tests;
