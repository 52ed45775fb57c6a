//! How close an epoch comes to the longer of its load and its compute, over batch size, depth, ratio and cache.

use std::fmt::Write as _;
use std::hint::spin_loop;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use twinbuf::{BoxError, Plan, Records};

use crate::cell::{CACHES, Cell, DEPTHS, RATIOS, Sample};
use crate::load::{self, Pool};
use twinbuf_bench_harness::data::{self, MIB, RECORD};
use twinbuf_bench_harness::measure::Effort;
use twinbuf_bench_harness::report::{goal, quartiles};
use twinbuf_bench_harness::sys;

/// A batch's bytes, the minimum number of batches of an epoch, and the MiB of the file that they are read from. 16
/// batches, but fewer of the largest ones: an epoch must take seconds, not minutes.
const BATCHES: [(u64, u64, u64); 7] = [
    (4 << 10, 16, 128),
    (32 << 10, 16, 128),
    (256 << 10, 16, 128),
    (2 << 20, 16, 128),
    (16 << 20, 16, 256),
    (64 << 20, 8, 512),
    (256 << 20, 4, 1024),
];
/// The target seconds of the longer of load and compute in an epoch, if the file has enough batches.
const EPOCH: f64 = 0.2;
/// The maximum seconds of it. Rather than take longer, an epoch has fewer than the minimum number of batches, but at
/// least two.
const LONGEST: f64 = 1.0;
/// The maximum number of batches of an epoch: enough for a mean.
const MOST: u64 = 2048;
/// The targets for the ratio of wall time to ideal: the median and the worst of all cells that count.
const WANTED: (f64, f64) = (1.01, 1.10);

/// The common parameters of the grid's rows.
struct Group {
    cache: &'static str,
    batch: u64,
    records: Arc<Records>,
    /// The slots of this round.
    slots: Pool,
    /// The minimum and maximum number of batches of an epoch.
    batches: (u64, u64),
    /// The number of batches of an epoch for each ratio, chosen in the first round.
    chosen: [Option<u64>; RATIOS.len()],
}

pub fn run(folder: &Path, out: &Path, head: &str, effort: Effort) -> Result<(), BoxError> {
    let mut groups = Vec::new();
    for (batch, least, mib) in BATCHES {
        let path = data::random(folder, mib)?;
        for cache in CACHES {
            let records = data::open(&path)?;
            let batches = (least, (mib * MIB / batch).min(MOST));
            groups.push(Group {
                cache,
                batch,
                records,
                slots: Pool::default(),
                batches,
                chosen: [None; RATIOS.len()],
            });
        }
    }
    let mut cells = Vec::new();
    for &Group { cache, batch, .. } in &groups {
        for ratio in RATIOS {
            cells.extend(DEPTHS.map(|depth| Cell { cache, batch, depth, ratio, samples: Vec::new() }));
        }
    }
    let (begun, others, mut rounds) = (Instant::now(), sys::others(), 0);
    while effort.allows(rounds, begun) {
        let mut order: Vec<usize> = (0..groups.len()).collect();
        fastrand::shuffle(&mut order);
        for g in order {
            let cells = &mut cells[g * RATIOS.len() * DEPTHS.len()..][..RATIOS.len() * DEPTHS.len()];
            round(&mut groups[g], cells)?;
        }
        rounds += 1;
    }
    let others = (sys::others() - others) / begun.elapsed().as_secs_f64();
    let head = format!("{head}; {rounds} rounds; others took {others:.2} processors meanwhile");
    println!(
        "\n{rounds} rounds; others, the kernel's own threads among them, took {others:.2} processors meanwhile"
    );
    goals(&cells);
    std::fs::write(out.join("scaling.csv"), csv(&cells, &head))?;
    Ok(())
}

/// All ratios and depths of one batch size, once.
fn round(group: &mut Group, cells: &mut [Cell]) -> Result<(), BoxError> {
    if group.cache == "warm" {
        data::make_warm(&group.records)?;
    }
    // The load time of a batch in this round, measured by an epoch of a quarter of the most batches, or of the least.
    let probe = epoch(group, group.batches.0.max(group.batches.1 / 4), None, Duration::ZERO)?;
    let load = probe.loads.iter().sum::<f64>() / probe.loads.len() as f64;
    let mut order: Vec<usize> = (0..RATIOS.len()).collect();
    fastrand::shuffle(&mut order);
    for r in order {
        let compute = RATIOS[r] * load;
        let (least, most) = group.batches;
        let so_many = |seconds: f64| (seconds / load.max(compute)) as u64;
        let least = least.min(so_many(LONGEST)).max(2);
        let batches = *group.chosen[r].get_or_insert(so_many(EPOCH).clamp(least, most));
        let of_depth = &mut cells[r * DEPTHS.len()..][..DEPTHS.len()];
        neighbours(group, batches, Duration::from_secs_f64(compute), of_depth)?;
    }
    // Up to 1 GiB.
    group.slots = Pool::default();
    Ok(())
}

/// One epoch at each depth, in a new order. The load alone is measured before and after them.
fn neighbours(group: &Group, batches: u64, compute: Duration, cells: &mut [Cell]) -> Result<(), BoxError> {
    let mut depths = DEPTHS;
    fastrand::shuffle(&mut depths);
    let before = epoch(group, batches, None, Duration::ZERO)?;
    let ran = depths.map(|depth| Ok((depth, epoch(group, batches, Some(depth), compute)?)));
    let ran = ran.into_iter().collect::<Result<Vec<_>, BoxError>>()?;
    let after = epoch(group, batches, None, Duration::ZERO)?;
    let compute = compute.as_secs_f64();
    let mean = |of: &dyn Fn(&[f64]) -> f64| f64::midpoint(of(&before.loads), of(&after.loads));
    let load = mean(&|loads| loads.iter().sum());
    let first = mean(&|loads| loads[0]);
    for (depth, Ran { wall, .. }) in ran {
        let steps = batches as f64;
        let Some(cell) = cells.iter_mut().find(|cell| cell.depth == depth) else {
            unreachable!("all depths")
        };
        cell.samples.push(Sample { batches, load, compute, wall, ideal: ideal(load, first, compute, steps) });
    }
    Ok(())
}

/// The minimum time of an epoch: the last compute comes after all loads, and all compute after the first load.
fn ideal(load: f64, first: f64, compute: f64, steps: f64) -> f64 {
    (load + compute).max(first + steps * compute)
}

/// The figures of an epoch, in seconds.
struct Ran {
    wall: f64,
    /// The caller's wait for each batch; without overlap that is its load.
    loads: Vec<f64>,
}

/// This many batches from the start of the file, with a new loader: with overlap and this many slots, or without. The clock
/// starts after it was built.
fn epoch(group: &Group, batches: u64, depth: Option<usize>, compute: Duration) -> Result<Ran, BoxError> {
    let each = group.batch / RECORD as u64;
    let plan = Plan::builder(batches * each).batch(each).build()?;
    let builder = load::builder(group.records.clone(), plan.clone());
    let mut loader = group.slots.build(match depth {
        None => builder.overlap(false),
        Some(depth) => builder.depth(depth),
    })?;
    if group.cache == "cold" {
        data::make_cold(&group.records)?;
    }
    let mut loads = Vec::with_capacity(usize::try_from(batches)?);
    let begun = Instant::now();
    let mut asked = begun;
    for batch in loader.epoch(0) {
        let batch = batch?;
        let received = Instant::now();
        loads.push((received - asked).as_secs_f64());
        let end = received + compute;
        while Instant::now() < end {
            spin_loop();
        }
        drop(batch);
        asked = Instant::now();
    }
    let wall = begun.elapsed().as_secs_f64();
    let report = loader.report();
    loader.close()?;
    load::check(&report, &plan)?;
    Ok(Ran { wall, loads })
}

fn goals(cells: &[Cell]) {
    let counted = || cells.iter().filter(|cell| cell.counts());
    let what = "scaling, load and compute >= 1 ms: wall / ideal";
    let all = quartiles(counted().map(|cell| cell.over_ideal()[1]));
    goal(&format!("{what}, {} cells", counted().count()), false, WANTED.0, all);
    if let Some(worst) = counted().max_by(|a, b| a.over_ideal()[1].total_cmp(&b.over_ideal()[1])) {
        goal(&format!("{what}, worst cell ({})", worst.name()), false, WANTED.1, worst.over_ideal());
    }
}

/// For programs: one line per cell, medians of the rounds.
fn csv(cells: &[Cell], head: &str) -> String {
    let mut out = format!(
        "# {head}\n\
         # load_ms and compute_ms are of a batch, the other times of an epoch; counts: both are at least 1 ms\n\
         cache,batch_bytes,depth,ratio,batches,rounds,load_ms,compute_ms,wall_ms,ideal_ms,\
         over_ideal_lower,over_ideal,over_ideal_upper,counts\n"
    );
    for cell in cells {
        let Cell { cache, batch, depth, ratio, samples } = cell;
        let [lower, over, upper] = cell.over_ideal();
        let _ = write!(out, "{cache},{batch},{depth},{ratio},{},{}", samples[0].batches, samples.len());
        for figure in [
            1e3 * cell.load(),
            1e3 * cell.median(|s| s.compute),
            1e3 * cell.median(|s| s.wall),
            1e3 * cell.median(|s| s.ideal),
            lower,
            over,
            upper,
        ] {
            let _ = write!(out, ",{figure:.6}");
        }
        let _ = writeln!(out, ",{}", cell.counts());
    }
    out
}
