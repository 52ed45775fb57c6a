//! Simulates the last batches once more: with other settings, or with a stage that is faster.
//!
//! The replay follows the rules of the loader. The slots come round in turn: the thread that is free first takes the
//! next batch when the next slot is free. The caller receives the batches in order and uses each for its measured time.
//! A slot is free when its batch is dropped. What the threads share (the processors, a disk, a lock) sets a lower limit
//! on the whole time.
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

/// The measured times of one batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Unit {
    /// For the first batch of an iteration: how long before the caller's request for it the threads could load. `None`
    /// for the others.
    pub(super) lead: Option<f64>,
    pub(super) read: f64,
    /// Whether a waiting caller loads too. It does so only beside a single worker.
    pub(super) helps: bool,
    pub(super) transform: f64,
    pub(super) transfer: f64,
    /// From receiving the batch to asking for the next one, without `paused`.
    pub(super) train: f64,
    /// The time between these two that the caller spent on something else. The result does not count it.
    pub(super) paused: f64,
    pub(super) hold: Hold,
}

/// How long a batch holds its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum Hold {
    /// Until the caller asks for the next batch.
    #[default]
    Use,
    /// Until the caller has used the batch `later` positions after this one for the time `used`.
    Kept { later: usize, used: f64 },
    /// Until another thread has used it for the time `service`. That thread uses its batches one after the other.
    Lent { thread: usize, service: f64 },
}

/// The machine and the loader that the batches are replayed on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Machine {
    pub(super) processors: f64,
    /// The part of a load that takes a processor.
    pub(super) load_cpu: f64,
    /// The part of a use that takes a processor.
    pub(super) train_cpu: f64,
    /// The part of a load during which no other load makes progress.
    pub(super) serial: f64,
    /// The number of slots on the device; 0 without a device.
    pub(super) device_depth: usize,
    /// Whether a round starts only after the caller has received the round before it.
    pub(super) lockstep: bool,
    /// The time that a sleeping caller needs to wake up when its batch is ready.
    pub(super) wake: f64,
    /// The time that a sleeping thread needs to wake up when a slot is free.
    pub(super) start: f64,
}

/// A factor for the measured time of each stage: read, transform, transfer, the caller's use, and the use by other
/// threads.
pub(super) type Scale = [f64; 5];

pub(super) const MEASURED: Scale = [1.0; 5];

/// The result of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    /// The time from the first request of each iteration to its end, summed over all iterations.
    pub(super) wall: f64,
    /// The same, but until other threads have used the batches that were lent to them.
    pub(super) end: f64,
    /// The part of `wall` that the caller waited.
    pub(super) waiting: f64,
}

/// Replays `units` with `settings`. Returns `None` if the caller would wait for a slot that it keeps itself.
pub(super) fn replay(units: &[Unit], machine: &Machine, settings: Settings, scale: Scale) -> Option<Outcome> {
    let [read, transform, transfer, train, by_others] = scale;
    // Workers beyond the number of batches would never load, so limit their number. Allow one more than the batches, so
    // that several workers never become one: a single worker is a special case, because the caller helps it.
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

/// Returns, for each batch, which batches the caller drops while it uses that batch, and after how much of the use.
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
