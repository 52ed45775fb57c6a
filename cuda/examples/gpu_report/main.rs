//! Measures uploads on the machine's own GPU and prints the figures as JSON.
//!
//! `cargo run --release -p twinbuf-cuda --example gpu_report > gpu.json`; `-- --quick` for a short one. It needs an
//! NVIDIA driver and nothing else: no toolkit, no compiler for the device. In place of training it copies within device
//! memory, in place of loading it sleeps. What cannot be measured has an `error` in place of its figures. Without a driver it prints one line and exits with 2.
#![allow(clippy::cast_possible_truncation)] // of figures: sizes and counts that were made from times

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};
use twinbuf_cuda::context;
use twinbuf_cuda::cudarc::driver::sys;

mod calls;
mod chunks;
mod copies;
mod depths;
mod measure;
mod pipeline;
mod work;

use copies::copies;
#[allow(unused_imports, reason = "by the report's test")]
pub(crate) use copies::uploads;
pub(crate) use pipeline::pipeline;
pub(crate) use work::Work;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How much to measure.
#[derive(Clone)]
pub(crate) struct Extent {
    /// Sizes of copies, in bytes.
    pub(crate) sizes: Vec<usize>,
    /// Each figure is the median of this many.
    rounds: usize,
    /// Bytes a round copies, if that takes no more than [`Self::MOST`] copies: so much that its time is long beside
    /// what threads take to wake up at its ends, which an uploader does and a plain copy does not.
    round_bytes: usize,
    /// Sizes of uploads by depth.
    depth_sizes: Vec<usize>,
    /// One large batch, and the sizes of its chunks.
    large: usize,
    chunks: Vec<usize>,
    /// The three-stage runs' longest stage.
    stage: Duration,
    /// How long that stage is to take for all batches: long beside the other two for one batch.
    epoch: Duration,
}

impl Extent {
    const MOST: usize = 1 << 14;

    pub(crate) fn full() -> Self {
        let sizes = (16..=30).step_by(2).map(|power| 1 << power).collect(); // 64 KiB to 1 GiB
        let (stage, epoch) = (Duration::from_millis(350), Duration::from_secs(10));
        let depth_sizes = vec![256 << 10, 1 << 20, 4 << 20, 64 << 20];
        let (large, chunks) = (256 << 20, vec![4 << 20, 8 << 20, 16 << 20]);
        Self { sizes, rounds: 7, round_bytes: 4 << 30, depth_sizes, large, chunks, stage, epoch }
    }

    pub(crate) fn quick() -> Self {
        let sizes = vec![64 << 10, 1 << 20];
        let (stage, epoch) = (Duration::from_millis(7), Duration::from_millis(42));
        let (depth_sizes, large, chunks) = (vec![64 << 10], 1 << 20, vec![256 << 10]);
        Self { sizes, rounds: 3, round_bytes: 4 << 20, depth_sizes, large, chunks, stage, epoch }
    }

    /// How many copies of this size a round has.
    pub(crate) fn count(&self, size: usize) -> usize {
        (self.round_bytes / size).clamp(2, Self::MOST)
    }
}

fn main() -> ExitCode {
    let quick = std::env::args().any(|arg| arg == "--quick");
    match run(&if quick { Extent::quick() } else { Extent::full() }) {
        Ok(report) => {
            println!("{report:#}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// Everything, measured on device 0.
pub(crate) fn run(extent: &Extent) -> Result<Value> {
    let ctx = context(0)?;
    let mut version = 0;
    // SAFETY: the pointer is valid for the call.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    let (free, _) = ctx.mem_get_info()?;
    let (sizes, too_large): (Vec<_>, Vec<_>) = extent.sizes.iter().partition(|&&size| size <= free / 4);
    let extent = &Extent { sizes, ..extent.clone() };
    let mut by_size: Vec<Value> =
        extent.sizes.iter().map(|&size| entry("bytes", size, copies(&ctx, extent, size))).collect();
    by_size.extend(too_large.into_iter().map(|size| {
        entry(
            "bytes",
            size,
            Err(format!("wanted at most a quarter of the {free} bytes of free device memory").into()),
        )
    }));
    let by_depth: Vec<Value> = extent
        .depth_sizes
        .iter()
        .map(|&size| entry("bytes", size, depths::depths(&ctx, extent, size)))
        .collect();
    let work = Work::new(&ctx)?;
    let shapes =
        [("load 1.5 : copy 0.2 : train 7", [1.5, 0.2, 7.0]), ("load 1 : copy 1 : train 1", [1.0, 1.0, 1.0])];
    let pipelines = shapes.map(|(shape, parts)| entry("shape", shape, pipeline(&ctx, extent, &work, parts)));
    let engines = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT;
    Ok(json!({
        "device": ctx.name()?,
        "compute_capability": ctx.compute_capability()?,
        "copy_engines": ctx.attribute(engines)?,
        "device_bytes": ctx.total_mem()?,
        "driver_version": version,
        "host": cpu(),
        "units": {
            "gb_s": "10^9 bytes a second, medians of rounds; host memory is written once, before all copies from it",
            "uploader_over_plain": "the median of the rounds' ratios; plain and uploader take turns",
            "times": "seconds; gaps are from the end of a copy to the start of the next, by events around each",
            "hidden": "1: the shorter of copy and work costs nothing beside the longer; 0: one after the other",
            "stage_seconds": "what a stage takes by itself",
            "longest": "the longest stage for every batch: no wall is shorter",
            "calls_per_batch": "one thread, one stream, batches of 4 KiB; calls are counted on the software driver only",
            "over_one_stream": "the median of the rounds' ratios to cudarc's safe copies from two page-locked buffers",
            "whole_over_this": "from the first byte filled to the last one copied, whole batch over chunks",
            "work_over_alone": "work on the user's own stream beside an uploader, over the same without",
            "enqueue_over_alone": "the host's time for one memcpy_dtod of the user's, over the same without",
        },
        "work_bytes": work.bytes,
        "calls_per_batch": or_error(calls::calls(&ctx, extent)),
        "copies": by_size,
        "depths": by_depth,
        "chunked": or_error(chunks::chunks(&ctx, extent)),
        "neighbour": or_error(work::neighbour(&ctx, extent, &work)),
        "overlap": or_error(work::overlap(&ctx, extent, &work)),
        "pipelines": pipelines,
    }))
}

/// Figures, or why there are none.
fn or_error(figures: Result<Value>) -> Value {
    figures.unwrap_or_else(|error| json!({ "error": error.to_string() }))
}

/// The same, and what they are of.
fn entry(key: &str, value: impl Into<Value>, figures: Result<Value>) -> Value {
    let mut entry = or_error(figures);
    entry[key] = value.into();
    entry
}

fn cpu() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}
