//! The verdict and the advice, from sums of what was measured. Each time and part in them was measured, or is a bound:
//! "at most". There are no forecasts.

use std::time::Duration;

use super::display::{at_most, count, percent, time};
use super::log::StageTimes;
use super::report::{Kind, Report, Settings, Verdict};
use crate::thread::MAX_WORKERS;

/// The least number of batches that allow a verdict.
const LEAST: u64 = 8;

/// A caller that waits for no more than this part of the time gains little from a faster loader.
const SMALL: f64 = 0.05;

/// A stage that is busy for this part of the time, or a loop that is, decides.
const FULL: f64 = 0.9;

/// Of two stages that run in turn, the longer one decides if it takes at least this many times as long as the other.
const LONGER: f64 = 1.25;

/// The sums of a report without its first step, in seconds.
struct Sums<'r> {
    report: &'r Report,
    /// The time of the first step.
    first: f64,
    /// The waits for the first batch of each later iteration, if they are most of all waits and overlap is on; 0
    /// otherwise. The other sums are without them, and without the loads in them.
    start: f64,
    /// The number of these iterations, and of all batches but that of the first step.
    starts: u64,
    batches: u64,
    /// The time of the loop: `used` and `waits`.
    wall: f64,
    used: f64,
    waits: f64,
    /// The loads of one worker, on average.
    loads: f64,
    /// The loads of a caller that helps.
    helped: f64,
    copies: f64,
    /// The waits in which a slot was kept that a load waited for.
    held: f64,
    /// How long one worker waited for slots to be freed, on average.
    full: f64,
}

impl<'r> Sums<'r> {
    fn of(report: &'r Report) -> Self {
        let Report { parts, train, first, first_step, transfer, settings, .. } = report;
        let without = |all: Duration, first: Duration| all.saturating_sub(first).as_secs_f64();
        let (used, waits) = (without(train.busy, first.busy), without(train.waiting, first.waiting));
        let first_steps = u64::from(*first != StageTimes::default());
        let start_waits = without(parts.start_waits, first.waiting);
        // Without overlap every batch is loaded when it is asked for.
        let most = settings.overlap && start_waits > waits / 2.0;
        let start_loads = without(parts.start_loads, first_step.start_loads);
        let start_helped = without(parts.start_helped, first_step.helped);
        let [start, start_loads, start_helped] =
            [start_waits, start_loads, start_helped].map(|time| if most { time } else { 0.0 });
        let helped = parts.helped.saturating_sub(first_step.helped);
        let others = helped + parts.outside + first_step.loads;
        let loads = without(report.loads(), others);
        let waits = (waits - start).max(0.0);
        let wall = (used + waits).max(1e-12);
        Self {
            report,
            first: (first.busy + first.waiting).as_secs_f64(),
            start,
            // `parts` counts a start when its wait ends. A first wait that still lasts is one start.
            starts: parts.starts.saturating_sub(first_steps).max(1),
            batches: report.batches.saturating_sub(first_steps),
            wall,
            used,
            waits,
            // A load at the start of an epoch may also be in `outside`, which is subtracted above.
            loads: ((loads - start_loads).max(0.0) / settings.workers.max(1) as f64).min(wall),
            helped: (helped.as_secs_f64() - start_helped).max(0.0),
            copies: without(*transfer, first_step.copies).min(wall),
            held: parts.held.as_secs_f64(),
            // When slots of a device are freed is not known.
            full: match report.transfer_bytes {
                0 => without(parts.full, first_step.full) / settings.workers.max(1) as f64,
                _ => report.slot_waits().as_secs_f64(),
            },
        }
    }

    /// A part of the time as text.
    fn part(&self, seconds: f64) -> String {
        percent(seconds / self.wall)
    }

    /// A part of the time as text, for a bound.
    fn bound(&self, seconds: f64) -> String {
        at_most(seconds / self.wall)
    }
}

/// What to try: a change, the settings that it leads to, and the seconds that it saves at most.
struct Try {
    change: String,
    /// `None` if it is no setting.
    settings: Option<Settings>,
    saves: f64,
}

/// The verdict, its reason in words, and what to try.
type Judged = (Verdict, String, Option<Try>);

impl Report {
    /// Returns the bottleneck: what takes the time of the loop, by the sums of the measured times.
    ///
    /// | measured | verdict |
    /// | --- | --- |
    /// | fewer than 8 batches | [`Unmeasured`](Verdict::Unmeasured) |
    /// | the caller waits for at most 5 % of the time | [`ComputeBound`](Verdict::ComputeBound) |
    /// | overlap is off | `ComputeBound` if the use takes 1.25 times as long as the waits; [`Balanced`](Verdict::Balanced) if neither takes 1.25 times as long; otherwise the largest part of the waits |
    /// | the use takes 90 % of the time, and loads or copies do too | `Balanced` |
    /// | copies to the device take 90 % of the time, and as long as loads | [`TransferBound`](Verdict::TransferBound) |
    /// | a worker loads for 90 % of the time, on average | the largest part of loads: [`DiskBound`](Verdict::DiskBound), [`LoadBound`](Verdict::LoadBound), [`TransformBound`](Verdict::TransformBound) or [`GenerationBound`](Verdict::GenerationBound) |
    /// | in more than half of the waits, a slot was kept for which a load waited | [`HeldBound`](Verdict::HeldBound) |
    /// | copies take half of the time, and more than loads and use | `TransferBound` |
    /// | on a device, the caller waits more than 1.25 times as long as loads or copies take, and loads wait for slots for half of the difference | `ComputeBound`: by work that the caller enqueued |
    /// | the source makes its items ahead of the loop | the largest part of loads |
    /// | copies take more time than loads and use | `TransferBound` |
    /// | loads take more time than the use | the largest part of loads |
    /// | none of these | `Balanced`: loads come late now and then |
    ///
    /// Times are without the first step, in which programs compile, import and allocate. If overlap is on, and the
    /// waits for the first batch of each later iteration are more than half of the waits, they are left out too.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        Sums::of(self).judge().0
    }

    /// Returns the verdict in words and what to try, as one to five lines: what the loop waits for, at most one change
    /// to try with what it saves at most, and how to measure it.
    ///
    /// Each time and part was measured, or is a bound. A bound assumes that loads and uses take as long as they did.
    /// Other programs, a lock or a disk that loads share can make the saving smaller.
    #[must_use]
    pub fn advice(&self) -> String {
        if self.batches == 0 {
            return "Nothing was measured.".to_string();
        }
        let sums = Sums::of(self);
        let (verdict, why, option) = sums.judge();
        let (all, judged) = (sums.wall + sums.start, verdict != Verdict::Unmeasured);
        let (first, starts) = (sums.first / (all + sums.first), judged && sums.start > 0.0);
        let mut text = format!("{verdict}: ");
        // Tell of a first step that takes more than twice the mean of all steps.
        if judged && first * self.batches as f64 > 2.0 {
            let (part, took) = (percent(first), time(self.first.busy + self.first.waiting));
            text += &format!("without the first step ({part} of all time, {took}), ");
        }
        text += if starts { "without later starts, " } else { "" };
        text += &why;
        if starts {
            let iterations = count(sums.starts, "iteration", "iterations");
            let (part, took) = (percent(sums.start / all), time(Duration::from_secs_f64(sums.start)));
            text += &format!(
                "\nLater starts took {part} of the time ({took}): the waits for the first batch of {iterations}."
            );
        }
        match option {
            Some(Try { change, settings, saves }) => {
                let more = settings.is_some_and(|settings| settings.workers > self.settings.workers);
                let condition = ", and only if a processor is idle and loads do not wait for each other, as for a lock or a disk";
                let only = if more { condition } else { "" };
                let probe = if self.choices.is_empty() { "" } else { ", or `twinbuf probe` on the files" };
                text + &format!(
                    "\nTry: {change}. It saves at most {} of the time{only}.\nTo measure what it saves, run the \
                     program with it and without it, in turn{probe}.",
                    at_most(saves / all)
                )
            }
            None if starts && sums.start + sums.waits <= SMALL * all => text + " Keep the settings.",
            None => text,
        }
    }

    /// Returns the settings that the [advice](Self::advice) says to try, and the part of the time that they save at most,
    /// from 0 to 1, of the time without the first step. `None` if it names no option, or one that is no setting.
    #[must_use]
    pub fn to_try(&self) -> Option<(Settings, f64)> {
        let sums = Sums::of(self);
        let Try { settings, saves, .. } = sums.judge().2?;
        Some((settings?, saves / (sums.wall + sums.start)))
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
}

impl Sums<'_> {
    /// Decides, by the table of [`Report::verdict`].
    fn judge(&self) -> Judged {
        let Self { report, start, wall, used, waits, loads, helped, copies, held, full, .. } = *self;
        let [wait_part, use_part, load_part, copy_part] =
            [waits, used, loads, copies].map(|seconds| self.part(seconds));
        let (unit, units) = match report.kind {
            Kind::Rounds => ("round", "rounds"),
            Kind::Groups => ("group", "groups"),
            _ => ("batch", "batches"),
        };
        let waiting = format!("the loop waits for {units} for {wait_part} of the time");
        // On a device, the caller may only enqueue work.
        let only = if report.transfer_bytes > 0 { ", without work it only enqueued" } else { "" };
        let uses = format!("{waiting}, and uses them for {use_part}{only}.");
        let by_copies = || {
            let rest = if copies < FULL * waits && report.waits_for_device() {
                " The rest may be work on the device, which is not measured."
            } else {
                ""
            };
            let most = self.bound(copies.min(waits));
            let why = format!(
                "{waiting}. Copies to the device take {copy_part}, and loads {load_part}.{rest}\n\
                 Send fewer bytes, such as a smaller type: that saves at most {most} of the time."
            );
            (Verdict::TransferBound, why, None)
        };
        if report.batches < LEAST {
            let found = count(report.batches, &format!("{unit} is"), &format!("{units} are"));
            return (Verdict::Unmeasured, format!("{found} too few for a verdict. It takes {LEAST}."), None);
        }
        let (verdict, why, option) = match () {
            () if waits <= SMALL * wall && start > 0.0 => (Verdict::ComputeBound, uses, None),
            () if waits <= SMALL * wall => {
                let keep = format!("A faster loader saves at most {}: keep the settings.", self.bound(waits));
                (Verdict::ComputeBound, format!("{uses}\n{keep}"), None)
            }
            () if !report.settings.overlap => self.in_turn(&uses),
            () if loads.max(copies) >= FULL * wall && used >= FULL * wall => {
                let before = loads.max(copies);
                // Loads that take no time leave the use, and a use that takes none leaves the loads outside of pauses.
                let left = (before - report.parts.pauses.as_secs_f64()).max(0.0);
                let most = self.bound(waits.max(wall - left));
                let why = format!(
                    "{waiting}. Loads or copies take {}, and the use {use_part}{only}.\n\
                     Only both faster saves more than {most}: keep the settings.",
                    self.part(before)
                );
                (Verdict::Balanced, why, None)
            }
            () if copies >= FULL * wall && copies >= loads => by_copies(),
            () if loads >= FULL * wall => self.by_loads(&waiting),
            () if held > waits / 2.0 => {
                let part = self.part(held);
                let why = format!(
                    "{waiting}. Loads take {load_part}. For {part} a load could not start, because an earlier batch \
                     was kept after the loop had asked for the next, and its slot was not free."
                );
                let change = "drop each batch before asking for the next, or copy what is kept".to_string();
                // More than `held`: a load that starts sooner also lets the loads after it start sooner.
                let saves = self.saves(report.settings);
                (Verdict::HeldBound, why, Some(Try { change, settings: None, saves }))
            }
            () if copies >= wall / 2.0 && copies > loads.max(used) => by_copies(),
            () if report.waits_for_device() => {
                let why = format!(
                    "{waiting}. Copies take {copy_part}, and loads {load_part}; loads wait too, for slots that work on \
                     the device still uses, or batches that are kept.\n\
                     That work is not measured: the loop only enqueues it. To measure it, synchronize the stream at \
                     the end of each step, in one run. It then counts as use."
                );
                (Verdict::ComputeBound, why, None)
            }
            // What makes the items ahead is not seen: only its waits are known.
            () if report.kind == Kind::Ahead => self.by_loads(&waiting),
            () if copies > loads.max(used) => by_copies(),
            () if loads + helped <= used => {
                let why = format!(
                    "{waiting}. Loads take {load_part}{}, less than the use ({use_part}{only}), but some come late.",
                    self.by_caller()
                );
                (Verdict::Balanced, why, self.deeper())
            }
            () if full > SMALL * wall => {
                let each = |seconds: f64, many| time(Duration::from_secs_f64(seconds / many as f64));
                let (load, one_use) =
                    (each(report.loads().as_secs_f64(), report.batches), each(used, self.batches));
                let why = format!(
                    "{waiting}. On average a load takes {load} and a use {one_use}, but loads also wait \
                     for free slots."
                );
                (report.load_verdict(), why, self.deeper())
            }
            () => self.by_loads(&waiting),
        };
        // Slots that are full at the start of an epoch shorten later waits too.
        let again = start + waits;
        if report.kind == Kind::Batches && start > 0.0 && again > SMALL * (wall + start) {
            let change = "one call of `epochs(..)` for all epochs, in place of one for each".to_string();
            return (verdict, why, Some(Try { change, settings: None, saves: again }));
        }
        (verdict, why, option)
    }

    /// Without overlap.
    fn in_turn(&self, uses: &str) -> Judged {
        let Self { report, used, waits, copies, .. } = *self;
        let verdict = match () {
            () if used >= LONGER * waits => Verdict::ComputeBound,
            () if waits < LONGER * used => Verdict::Balanced,
            () if copies > waits / 2.0 => Verdict::TransferBound,
            () => report.load_verdict(),
        };
        let workers = report.workers_with_overlap;
        let settings = Settings { overlap: true, workers, depth: report.settings.depth.max(workers + 1) };
        let option = self.set(settings, ", to load while the loop uses");
        (verdict, format!("{uses} Overlap is off: it does one after the other."), Some(option))
    }

    /// The workers load nearly all the time, or all the time in which they get a processor.
    fn by_loads(&self, waiting: &str) -> Judged {
        let Self { report, wall, waits, loads, full, .. } = *self;
        let (verdict, now, load_part) = (report.load_verdict(), report.settings, self.part(loads));
        let mut busy = match now.workers {
            1 => format!(" The loading thread is busy for {load_part} of the time"),
            workers => {
                format!(" Each of {workers} loading threads is busy for {load_part} of the time, on average")
            }
        };
        busy += &self.by_caller();
        busy += match verdict {
            Verdict::DiskBound => ", and most bytes came from a disk.",
            Verdict::TransformBound => ", most of it with the transform.",
            _ => ".",
        };
        if loads < FULL * wall {
            let rounds = if report.kind == Kind::Rounds { "no round may start, or " } else { "" };
            let rest = format!("In what is left, {rounds}other programs may have the processor.");
            busy += &format!(" Waits for free slots take {}. {rest}", self.part(full));
        }
        let cheaper = match report.kind {
            Kind::Batches if now.workers < MAX_WORKERS => {
                let workers = now.workers + 1;
                let settings = Settings { workers, depth: now.depth.max(workers + 1), ..now };
                let option = self.set(settings, ", one more loading thread");
                return (verdict, format!("{waiting}.{busy}"), Some(option));
            }
            Kind::Ahead => {
                busy.clear();
                "The workers of the iterable make them: start more, or make loading cheaper"
            }
            Kind::Rounds => "Make the closure faster",
            Kind::Batches | Kind::Items | Kind::Groups => "Make loading cheaper",
        };
        let most = self.bound(waits);
        (verdict, format!("{waiting}.{busy}\n{cheaper}: that saves at most {most} of the time."), None)
    }

    /// The loads of a caller that helps, in words, if they matter.
    fn by_caller(&self) -> String {
        let part = (self.helped > SMALL * self.wall).then(|| self.part(self.helped));
        part.map_or(String::new(), |part| format!(", and loads by the waiting caller {part}"))
    }

    /// More slots. A generator has no option for them.
    fn deeper(&self) -> Option<Try> {
        let now = self.report.settings;
        let settings = Settings { depth: now.deeper(), ..now };
        let option = self.set(settings, &format!(" in place of {}, to load further ahead", now.depth));
        (self.report.kind != Kind::Rounds).then_some(option)
    }

    /// Returns the seconds that a loop with such settings saves at most: all loads are shared by the workers, and with a
    /// caller that helps, go on beside copies, the use and pauses, and nothing waits. In the first step, all slots are filled.
    fn saves(&self, Settings { workers, depth, .. }: Settings) -> f64 {
        let Self { report, first, batches, wall, used, loads, helped, copies, .. } = *self;
        let Report { settings, parts, .. } = report;
        // A caller that waits may load too: both in turn take the time that they took.
        let helps = !parts.helped.is_zero() || !settings.overlap && report.helps;
        let all = loads * settings.workers.max(1) as f64 + helped + if helps { used } else { 0.0 };
        let longest = copies.max(all / (workers.max(1) + usize::from(helps)) as f64);
        // What came since an earlier report may begin with full slots.
        let room = if report.first_step.is_earlier { wall } else { first };
        // As long as the mean, or if they are known, as long as they took.
        let ahead = room.min(longest * depth as f64 / batches as f64).max(parts.early.as_secs_f64());
        // Without overlap, no slot of a device is filled when an iteration begins.
        let filled = if settings.overlap { 0 } else { parts.starts * report.device_slots as u64 };
        let outside = parts.pauses.as_secs_f64() + ahead + longest * filled as f64 / batches as f64;
        (wall - used.max(longest - outside)).max(0.0)
    }

    /// A change of the settings, its purpose, and for a loader the variables that make it.
    fn set(&self, settings: Settings, purpose: &str) -> Try {
        let Report { settings: now, kind, by_breakdown, overlap_off, needs_clones, limited, .. } =
            *self.report;
        let Settings { overlap, depth, workers } = settings;
        // With overlap, the builder has its number of workers.
        let starts = overlap != now.overlap;
        let (more, deeper) = (!starts && workers != now.workers, depth != now.depth);
        let switched = starts && (!by_breakdown || overlap_off);
        // Only a loader and a stream have an option for the slots.
        let slots = match kind {
            Kind::Batches | Kind::Groups => format!("`depth({depth})`"),
            Kind::Rounds | Kind::Items | Kind::Ahead => format!("{depth} slots"),
        };
        let changes = [
            (switched, "`overlap(true)`".to_string(), "OVERLAP=1".to_string()),
            (more, format!("`workers({workers})`"), format!("WORKERS={workers}")),
            (deeper, slots, format!("DEPTH={depth}")),
        ];
        let changes = changes.into_iter().filter(|(is_new, ..)| *is_new);
        let (calls, variables): (Vec<_>, Vec<_>) =
            changes.map(|(_, call, variable)| (call, format!("TWINBUF_{variable}"))).unzip();
        let (mut change, variables) = (calls.join(" and "), variables.join(" "));
        if by_breakdown {
            let set = if calls.is_empty() { "" } else { ", and set " };
            change = format!("turn off the breakdown, which turns overlap off{set}{change}");
        } else {
            change += purpose;
        }
        // Only a loader has the variables. None turns a breakdown off.
        if kind == Kind::Batches && !by_breakdown {
            change += &format!(" (`{variables}` if the builder calls `from_env`)");
        }
        if needs_clones && workers > 1 {
            change += ", if the data set and all transforms have `try_clone`";
        }
        if limited {
            change += ", if `memory_limit` allows it";
        }
        Try { change, settings: Some(settings), saves: self.saves(settings) }
    }
}
