//! Measures uploads on the machine's GPU. Each entry is a line of JSON, printed as soon as it is measured: the lines before
//! a stop are complete.
//!
//! `cargo run --release -p twinbuf-cuda --example gpu_report`; `-- --quick` for a short one; `-- SECTION...` for a part.
//! `-- promises FOLDER` compares the figures in that folder with what the crate promises.
//! It needs an NVIDIA driver and no toolkit. In place of training it launches two small kernels (`cuda/kernels`): one takes
//! time, one adds up every byte of a batch. In place of loading it sleeps. What cannot be measured has an `error` in place
//! of its figures. Without a driver it prints one line and exits with 2.
#![allow(clippy::cast_possible_truncation)] // of figures: sizes and counts that were made from times

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use twinbuf_cuda::context;
use twinbuf_cuda::cudarc::driver::{CudaContext, sys};

mod copies;
mod costs;
#[path = "../../kernels/mod.rs"]
mod kernels;
mod measure;
mod promises;
mod stager;
mod unknowns;
mod work;

#[allow(unused_imports, reason = "by the report's test")]
pub(crate) use copies::uploads;
#[allow(unused_imports, reason = "by the report's test")]
pub(crate) use promises::Run;
pub(crate) use work::{Work, pipeline};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How much to measure.
pub(crate) struct Extent {
    /// Sizes of copies, in bytes.
    pub(crate) sizes: Vec<usize>,
    /// The number of rounds of a measurement; most figures are medians over them.
    rounds: usize,
    /// Bytes that a round copies, within [`Self::MOST`] copies. A round must be much longer than the wake-ups of
    /// threads at its ends, which an uploader has and a plain copy does not.
    round_bytes: usize,
    /// Sizes of uploads by depth.
    depth_sizes: Vec<usize>,
    /// One large batch.
    large: usize,
    /// Bytes of a stager's slot.
    slot: usize,
    /// The longest stage of a three-stage run, at most.
    stage: Duration,
    /// The target duration of that stage for all batches: long compared with one batch's time in the other two.
    epoch: Duration,
}

impl Extent {
    const MOST: usize = 1 << 14;

    pub(crate) fn full() -> Self {
        let sizes = (16..=30).step_by(2).map(|power| 1 << power).collect(); // 64 KiB to 1 GiB
        let (stage, epoch) = (Duration::from_millis(350), Duration::from_secs(5));
        let depth_sizes = vec![256 << 10, 1 << 20, 4 << 20, 64 << 20];
        let (large, slot) = (256 << 20, 8 << 20);
        Self { sizes, rounds: 7, round_bytes: 4 << 30, depth_sizes, large, slot, stage, epoch }
    }

    pub(crate) fn quick() -> Self {
        let sizes = vec![64 << 10, 1 << 20];
        // The software driver adds up every byte of a stage slowly.
        let (stage, epoch) = (Duration::from_millis(1), Duration::from_millis(6));
        let (depth_sizes, large, slot) = (vec![64 << 10], 1 << 20, 64 << 10);
        Self { sizes, rounds: 3, round_bytes: 4 << 20, depth_sizes, large, slot, stage, epoch }
    }

    /// How many copies of this size a round has.
    pub(crate) fn count(&self, size: usize) -> usize {
        (self.round_bytes / size).clamp(2, Self::MOST)
    }

    /// The largest size of copies that is at most this.
    fn at_most(&self, most: usize) -> Result<usize> {
        Ok(self.sizes.iter().copied().filter(|&size| size <= most).max().ok_or("no sizes")?)
    }
}

/// One line of the report.
type Line<'a> = &'a mut dyn FnMut(Result<Value>);
type Section = fn(&Arc<CudaContext>, &Extent, Line<'_>);

/// The sections, in the order of a whole run.
pub(crate) const SECTIONS: [(&str, Section); 13] = [
    ("machine", |ctx, _, line| line(machine(ctx))),
    ("captures", |ctx, _, line| unknowns::captures(ctx, line)),
    ("copies", |ctx, extent, line| {
        let free = ctx.mem_get_info().map_or(0, |(free, _)| free);
        for &size in &extent.sizes {
            let figures = if size <= free / 4 {
                copies::copies(ctx, extent, size)
            } else {
                Err(format!("wanted at most a quarter of the {free} bytes of free device memory").into())
            };
            line(entry("bytes", size, figures));
        }
    }),
    ("pipelines", |ctx, extent, line| {
        for (shape, parts) in [
            ("load 1.5 : copy 0.2 : train 7", [1.5, 0.2, 7.0]),
            ("load 1 : copy 1 : train 1", [1.0, 1.0, 1.0]),
        ] {
            let run = Work::new(ctx).and_then(|work| pipeline(ctx, extent, &work, parts));
            line(entry("shape", shape, run));
        }
    }),
    ("stager", |ctx, extent, line| line(stager::stager(ctx, extent))),
    ("latency", copies::latency),
    ("cpu", |ctx, extent, line| line(costs::cpu(ctx, extent))),
    ("calls", |ctx, extent, line| line(costs::calls(ctx, extent))),
    ("overlap", |ctx, extent, line| line(work::overlap(ctx, extent))),
    ("neighbour", |ctx, extent, line| line(work::neighbour(ctx, extent))),
    ("depths", |ctx, extent, line| {
        for &size in &extent.depth_sizes {
            line(entry("bytes", size, copies::depths(ctx, extent, size)));
        }
    }),
    ("pinning", costs::pinning),
    ("unknowns", |ctx, _, line| unknowns::unknowns(ctx, line)),
];

fn main() -> ExitCode {
    let mut sections: Vec<String> = std::env::args().skip(1).collect();
    let quick = sections.iter().any(|name| name == "--quick");
    sections.retain(|name| name != "--quick");
    if let [mode, folder] = &sections[..]
        && mode == "promises"
    {
        let (lines, well) = promises::of_folder(folder.as_ref());
        print!("{lines}");
        return if well { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let print = |line: Value| {
        // A line at a time, and out at once.
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    };
    match run(&if quick { Extent::quick() } else { Extent::full() }, &sections, print) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// Measures these sections, or all, on device 0.
pub(crate) fn run(extent: &Extent, sections: &[String], mut print: impl FnMut(Value)) -> Result<()> {
    if let Some(unknown) = sections.iter().find(|name| !SECTIONS.iter().any(|(known, _)| known == name)) {
        let known: Vec<_> = SECTIONS.iter().map(|(name, _)| *name).collect();
        return Err(format!("section: wanted one of {known:?}, found `{unknown}`").into());
    }
    let ctx = context(0)?;
    ctx.bind_to_thread()?;
    for (name, section) in SECTIONS {
        if sections.is_empty() || sections.iter().any(|wanted| wanted == name) {
            section(&ctx, extent, &mut |figures| print(entry_or_error("section", name, figures)));
        }
    }
    Ok(())
}

/// What the figures depend on, and what they mean.
fn machine(ctx: &Arc<CudaContext>) -> Result<Value> {
    let mut version = 0;
    // SAFETY: the pointer is valid for the call.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    let engines = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT;
    Ok(json!({
        "device": ctx.name()?,
        "compute_capability": ctx.compute_capability()?,
        "copy_engines": ctx.attribute(engines)?,
        "device_bytes": ctx.total_mem()?,
        "driver_version": version,
        "host": processor(),
        "units": {
            "gb_s": "10^9 bytes a second, medians of rounds; host memory is written once, before all copies from it",
            "uploader_over_plain": "the median of the rounds' ratios; plain and uploader take turns",
            "times": "seconds; gaps are from the end of a copy to the start of the next, by events around each",
            "hidden": "1: the shorter of copy and work costs nothing beside the longer; 0: one after the other",
            "stage_seconds": "what a stage takes by itself",
            "longest": "the longest stage for every batch: no wall is shorter",
            "calls": "one thread, one stream, batches of 4 KiB; calls are counted on the software driver only",
            "over_one_stream": "the median of the rounds' ratios to cudarc's safe copies from two page-locked buffers",
            "work_over_alone": "work on the user's own stream beside an uploader, over the same without",
            "enqueue_over_alone": "the host's time for one memcpy_dtod of the user's, over the same without",
            "plain_4k": "from the call to the end of one copy of 4 KiB on a stream of the user's, waited for",
            "uploader_4k": "from `commit` of 4 KiB to the end of its copy, waited for",
            "pageable_over_upload": "cudarc's memcpy_htod from pageable memory, over a stager with that many threads",
            "cpu_share": "of one processor, by the copy thread",
            "codes": "CUresult of each call on a captured stream; 0 is success",
        },
    }))
}

/// Figures, or why there are none, with what they are of.
fn entry_or_error(key: &str, value: impl Into<Value>, figures: Result<Value>) -> Value {
    let mut line = figures.unwrap_or_else(|error| json!({ "error": error.to_string() }));
    line[key] = value.into();
    line
}

fn entry(key: &str, value: impl Into<Value>, figures: Result<Value>) -> Result<Value> {
    Ok(entry_or_error(key, value, figures))
}

fn processor() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}
