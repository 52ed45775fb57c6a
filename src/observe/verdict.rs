//! The verdict and the advice, from sums of what was measured. Each number in them was measured, or is a bound: "at
//! most". There are no forecasts.

use std::time::Duration;

use super::display::{count, percent, time};
use super::report::{Kind, Report, Settings, Verdict};

/// The least number of batches that allow a verdict.
const LEAST: u64 = 8;

/// A caller that waits for less than this part of the time gains nothing from a faster loader.
const SMALL: f64 = 0.05;

/// A stage that is busy for this part of the time, or a loop that is, decides.
const FULL: f64 = 0.9;

/// Of two stages that run in turn, the longer one decides if it takes at least this many times as long as the other.
const LONGER: f64 = 1.25;

/// Why the loop takes as long as it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// Too few batches.
    Few,
    /// The caller's use.
    Use,
    /// Loads and uses alternate, because overlap is off.
    InTurn,
    /// The workers load nearly all the time, or all the time in which they get a processor.
    Loads,
    Copies,
    /// The workers load nearly all the time, and the caller uses batches nearly all the time.
    Both,
    /// Slots were kept.
    Held,
    /// Work on a device kept the slots.
    Device,
    /// Loads take longer than the use, but the workers also wait for slots.
    Longer,
    /// Loads take less time than the use, but come late now and then.
    Late,
}

/// The sums, in seconds.
struct Sums {
    /// The waits for the first batch of each iteration, if they are most of all waits; 0 otherwise. The other sums are
    /// without them, and without the loads in them.
    start: f64,
    /// The time of the loop: `used` and `waits`.
    wall: f64,
    used: f64,
    waits: f64,
    /// The loads of one worker, on average.
    loads: f64,
    copies: f64,
    /// The waits in which a slot was kept that a load waited for.
    held: f64,
    /// How long one worker waited for slots to be freed, on average.
    full: f64,
}

impl Sums {
    fn of(report: &Report) -> Self {
        let Report { parts, train, transfer, settings, .. } = report;
        let [used, waits] = [train.busy, train.waiting].map(|time| time.as_secs_f64());
        let most = parts.start_waits > train.waiting / 2;
        let [start, start_loads] =
            [parts.start_waits, parts.start_loads].map(|time| if most { time.as_secs_f64() } else { 0.0 });
        let loads = report.loads().saturating_sub(parts.helped + parts.outside).as_secs_f64();
        let waits = (waits - start).max(0.0);
        let wall = (used + waits).max(1e-12);
        Self {
            start,
            wall,
            used,
            waits,
            // Pauses may cover more of the loads and copies than was found.
            loads: ((loads - start_loads).max(0.0) / settings.workers.max(1) as f64).min(wall),
            copies: transfer.as_secs_f64().min(wall),
            held: parts.held.as_secs_f64(),
            full: parts.full.as_secs_f64() / settings.workers.max(1) as f64,
        }
    }

    fn cause(&self, report: &Report) -> Cause {
        let Self { wall, used, waits, loads, copies, .. } = *self;
        match () {
            () if report.batches < LEAST => Cause::Few,
            () if waits <= SMALL * wall => Cause::Use,
            () if !report.settings.overlap => Cause::InTurn,
            () if loads.max(copies) >= FULL * wall && used >= FULL * wall => Cause::Both,
            () if copies >= FULL * wall && copies >= loads => Cause::Copies,
            () if loads >= FULL * wall => Cause::Loads,
            () if self.held > waits / 2.0 => Cause::Held,
            () if copies >= wall / 2.0 && copies > loads.max(used) => Cause::Copies,
            () if report.waits_for_device() => Cause::Device,
            // What makes the items ahead is not seen: only its waits are known.
            () if report.kind == Kind::Ahead => Cause::Loads,
            () if copies > loads.max(used) => Cause::Copies,
            () if loads <= used => Cause::Late,
            // When slots of a device are freed is not known.
            () if self.full > SMALL * wall || report.transfer_bytes > 0 => Cause::Longer,
            () => Cause::Loads,
        }
    }

    /// The seconds that are saved if loads that take `loads` seconds in all go on beside copies and the use, and nothing
    /// waits.
    fn saves(&self, loads: f64) -> f64 {
        (self.wall - loads.max(self.copies).max(self.used)).max(0.0)
    }

    /// A part of the time as text.
    fn part(&self, seconds: f64) -> String {
        percent(seconds / self.wall)
    }
}

/// What to try: a change, the way to make it without a change of the program, and the seconds that it saves at most.
struct Try {
    change: String,
    settings: Settings,
    variable: Option<String>,
    saves: f64,
    /// The condition of the saving.
    only: &'static str,
}

impl Report {
    /// Returns the bottleneck: what takes the time of the loop, by the sums of the measured times.
    ///
    /// | measured | verdict |
    /// | --- | --- |
    /// | fewer than 8 batches | [`Unmeasured`](Verdict::Unmeasured) |
    /// | the caller waits for less than 5 % of the time | [`ComputeBound`](Verdict::ComputeBound) |
    /// | overlap is off | the longer of load and use; [`Balanced`](Verdict::Balanced) if it is less than 1.25 times as long |
    /// | copies to the device take 90 % of the time, or more than loads and use | [`TransferBound`](Verdict::TransferBound) |
    /// | each worker loads for 90 % of the time, or for more time than the use takes and does not wait for slots | the largest part of loads: [`DiskBound`](Verdict::DiskBound), [`LoadBound`](Verdict::LoadBound), [`TransformBound`](Verdict::TransformBound) or [`GenerationBound`](Verdict::GenerationBound); `Balanced` if the use takes 90 % too |
    /// | in half of the waits, a slot was kept for which a load waited | [`HeldBound`](Verdict::HeldBound) |
    /// | on a device, neither loads nor copies take as long as the caller waits, and loads wait for slots | `ComputeBound`: by work that the caller enqueued |
    /// | loads take more time than the use | the largest part of loads |
    /// | none of these | `Balanced`: loads come late now and then |
    ///
    /// If the waits for the first batch of each iteration are more than half of all waits, the verdict is that of the
    /// time without them.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict_of(&Sums::of(self))
    }

    fn verdict_of(&self, sums: &Sums) -> Verdict {
        match sums.cause(self) {
            Cause::Few => Verdict::Unmeasured,
            Cause::Use | Cause::Device => Verdict::ComputeBound,
            Cause::Both | Cause::Late => Verdict::Balanced,
            Cause::Copies => Verdict::TransferBound,
            Cause::Held => Verdict::HeldBound,
            Cause::Loads | Cause::Longer => self.load_verdict(),
            Cause::InTurn => {
                let Sums { used, waits, copies, .. } = *sums;
                match () {
                    () if used >= LONGER * waits => Verdict::ComputeBound,
                    () if waits < LONGER * used => Verdict::Balanced,
                    () if copies > waits / 2.0 => Verdict::TransferBound,
                    () => self.load_verdict(),
                }
            }
        }
    }

    /// The verdict if loads decide: their largest part.
    fn load_verdict(&self) -> Verdict {
        match self.kind {
            _ if self.transform > self.read.busy => Verdict::TransformBound,
            Kind::Rounds => Verdict::GenerationBound,
            Kind::Batches | Kind::Groups if self.reading.disk > self.reading.bytes / 2 => Verdict::DiskBound,
            _ => Verdict::LoadBound,
        }
    }

    /// The time of all loads, summed over all workers.
    pub(super) fn loads(&self) -> Duration {
        self.read.busy + self.transform
    }

    /// Returns the verdict in words and what to try, as one to four lines: what the loop waits for, one change with what
    /// it saves at most, and how to measure it.
    ///
    /// Each number was measured, or is a bound. A bound assumes that loads and uses take as long as they did. Other
    /// programs, a lock or a disk that loads share can make the saving smaller.
    #[must_use]
    pub fn advice(&self) -> String {
        if self.batches == 0 {
            return "Nothing was measured.".to_string();
        }
        let sums = Sums::of(self);
        let (cause, mut text) = (sums.cause(self), self.in_words(&sums));
        if sums.start > 0.0 && cause != Cause::Few {
            let starts = count(self.parts.starts, "iteration", "iterations");
            text += &format!(
                "\nThe start took {} of all time ({}): the wait for the first batch of {starts}.",
                percent(sums.start / (sums.wall + sums.start)),
                time(self.parts.start_waits)
            );
        }
        let Some(Try { change, variable, saves, only, .. }) = self.option(&sums, cause) else {
            return if sums.start > 0.0 && cause == Cause::Use { text + " Keep the settings." } else { text };
        };
        let variable = variable.map_or_else(String::new, |variable| format!(" ({variable})"));
        text + &format!(
            "\nTry: {change}{variable}. It saves at most {} of the time{only}.\nTo measure what it saves, run the \
             program with it and without it, in turn{}.",
            percent(saves / (sums.wall + sums.start)),
            if self.choices.is_empty() { "" } else { ", or `twinbuf probe` on the files" }
        )
    }

    /// Returns the settings that the [advice](Self::advice) says to try, and the part of the time that they save at most,
    /// from 0 to 1. `None` if it names no option, or one that is no setting.
    #[must_use]
    pub fn to_try(&self) -> Option<(Settings, f64)> {
        let sums = Sums::of(self);
        let Try { settings, saves, .. } = self.option(&sums, sums.cause(self))?;
        (settings != self.settings).then_some((settings, saves / (sums.wall + sums.start)))
    }

    /// The verdict in words: one or two lines.
    fn in_words(&self, sums: &Sums) -> String {
        let (verdict, cause) = (self.verdict_of(sums), sums.cause(self));
        let Sums { start, used, loads, copies, .. } = *sums;
        let each = |seconds: f64| time(Duration::from_secs_f64(seconds / self.batches as f64));
        let [use_part, wait_part, load_part, copy_part] =
            [used, sums.waits, loads, copies].map(|time| sums.part(time));
        let names = [(Kind::Rounds, "rounds"), (Kind::Groups, "groups")];
        let units = names.iter().find(|(kind, _)| *kind == self.kind).map_or("batches", |(_, name)| name);
        let busy = match self.settings.workers {
            1 => format!("The loading thread is busy for {load_part} of the time"),
            workers => {
                format!("Each of {workers} loading threads is busy for {load_part} of the time, on average")
            }
        };
        let waits = format!("the loop waits for {units} for {wait_part} of the time.");
        let without = if start > 0.0 { "without the start, " } else { "" };
        // On a device, the caller may only enqueue work.
        let only = if self.transfer_bytes > 0 { ", without work it only enqueued" } else { "" };
        let use_part = use_part + only;
        let uses =
            format!("the loop waits for {units} for {wait_part} of the time, and uses them for {use_part}.");
        let why = match cause {
            Cause::Few => {
                let found = count(self.batches, "batch is", "batches are");
                return format!("{verdict}: {found} too few for a verdict. It takes {LEAST}.");
            }
            Cause::Use if start > 0.0 => uses,
            Cause::Use => format!("{uses}\nA faster loader saves at most {wait_part}: keep the settings."),
            Cause::InTurn => format!("{uses} Overlap is off: it does one after the other."),
            Cause::Loads => {
                let part = match (verdict, self.kind) {
                    (Verdict::DiskBound, _) => ", and most bytes came from a disk",
                    (Verdict::TransformBound, _) => ", most of it with the transform",
                    _ => "",
                };
                let mut busy = format!(" {busy}{part}.");
                if loads < FULL * sums.wall {
                    let full = sums.part(sums.full);
                    busy += &format!(
                        " Waits for free slots take {full}: in the rest, other programs may have the processor."
                    );
                }
                let cheaper = match self.kind {
                    Kind::Batches => return format!("{verdict}: {without}{waits}{busy}"),
                    Kind::Ahead => {
                        "The workers of the iterable make them: start more, or make loading cheaper"
                    }
                    Kind::Rounds => "Make the closure faster",
                    Kind::Items | Kind::Groups => "Make loading cheaper",
                };
                let busy = if self.kind == Kind::Ahead { "" } else { &*busy };
                format!("{waits}{busy}\n{cheaper}: that saves at most {wait_part} of the time.")
            }
            Cause::Copies => {
                let rest = if copies < FULL * sums.waits && self.waits_for_device() {
                    " The rest may be work on the device, which is not measured."
                } else {
                    ""
                };
                format!(
                    "{waits} Copies to the device take {copy_part}, and loads {load_part}.{rest}\n\
                     Send fewer bytes, such as a smaller type: that saves at most {} of the time.",
                    sums.part(copies.min(sums.waits))
                )
            }
            Cause::Both => format!(
                "{waits} Loads or copies take {}, and the use {use_part}.\n\
                 Only both faster saves more than {wait_part}: keep the settings.",
                sums.part(loads.max(copies))
            ),
            Cause::Held => format!(
                "{waits} Loads take {load_part}. For {} a load could not start, because an earlier batch was kept \
                 after the loop had asked for the next, and its slot was not free.",
                sums.part(sums.held)
            ),
            Cause::Device => format!(
                "{waits} Copies take {copy_part}, and loads {load_part}; loads wait too, for slots that work on the \
                 device still uses, or batches that are kept.\n\
                 That work is not measured: the loop only enqueues it. To measure it, synchronize the stream at the end \
                 of each step, in one run. It then counts as use."
            ),
            Cause::Longer => format!(
                "{waits} On average a load takes {} and a use {}, but the \
                 loading threads also wait for free slots.",
                each(self.loads().as_secs_f64()),
                each(used)
            ),
            Cause::Late => {
                format!("{waits} Loads take {load_part}, less than the use ({use_part}), but some come late.")
            }
        };
        format!("{verdict}: {without}{why}")
    }

    /// One option to try.
    fn option(&self, sums: &Sums, cause: Cause) -> Option<Try> {
        let now = self.settings;
        let variable = |name: &str, value: usize| {
            // Only a loader has the variables.
            let switch = format!("`TWINBUF_{name}={value}` if the builder calls `from_env`");
            (self.kind == Kind::Batches).then_some(switch)
        };
        // Slots that are full at the start of an epoch shorten later waits too.
        let again = sums.start + sums.waits - self.first.waiting.as_secs_f64();
        let helper = usize::from(!self.parts.helped.is_zero());
        let loads = sums.loads * now.workers as f64 + self.parts.helped.as_secs_f64();
        let shared = |workers: usize| loads / (workers + helper) as f64;
        let restarts = self.kind == Kind::Batches && now.overlap && self.parts.starts > 1;
        Some(match cause {
            _ if restarts && sums.start > 0.0 && again > SMALL * (sums.wall + sums.start) => {
                let change = "one call of `epochs(..)` for all epochs, in place of one for each".to_string();
                Try { change, settings: now, variable: None, saves: again, only: "" }
            }
            Cause::InTurn => {
                let loads = sums.waits - sums.copies;
                // With files, a caller that waits loads too.
                let loads = if self.choices.is_empty() { loads } else { (loads + sums.used) / 2.0 };
                let (change, variable) = match self.by_breakdown {
                    true => ("turn off the breakdown, which turns overlap off", None),
                    false => ("`overlap(true)`, to load while the loop uses", variable("OVERLAP", 1)),
                };
                let settings = Settings { overlap: true, ..now };
                Try { change: change.to_string(), settings, variable, saves: sums.saves(loads), only: "" }
            }
            Cause::Loads if self.kind == Kind::Batches => {
                let workers = now.workers + 1;
                let settings = Settings { workers, depth: now.depth.max(workers + 1), ..now };
                Try {
                    change: format!("`workers({workers})`, one more loading thread"),
                    settings,
                    variable: variable("WORKERS", workers),
                    saves: sums.saves(shared(workers)),
                    only: ", and only if a processor is idle and loads do not wait for each other, as for a lock or a disk",
                }
            }
            Cause::Held => {
                let change = "drop each batch before asking for the next, or copy what is kept".to_string();
                Try { change, settings: now, variable: None, saves: sums.held, only: "" }
            }
            Cause::Longer | Cause::Late if self.kind != Kind::Rounds => {
                let depth = now.depth + 2;
                let change = format!("`depth({depth})` in place of {}, to load further ahead", now.depth);
                let variable = variable("DEPTH", depth);
                let settings = Settings { depth, ..now };
                Try { change, settings, variable, saves: sums.saves(shared(now.workers.max(1))), only: "" }
            }
            _ => return None,
        })
    }
}
