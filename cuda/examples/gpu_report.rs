//! Measures uploads on the machine's own GPU and prints the figures as JSON.
//!
//! `cargo run --release -p twinbuf-cuda --example gpu_report > gpu.json`; `-- --quick` for a short one. It needs an
//! NVIDIA driver and nothing else: no toolkit, no compiler for the device. What stands for training is work that the
//! driver can do by itself, copies within device memory; what stands for loading is sleep. What cannot be measured
//! has an `error` in the place of its figures. Without a driver it prints one line and exits with 2.
#![allow(clippy::cast_possible_truncation)] // of figures: sizes and counts that were made from times

use std::error::Error;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use twinbuf_cuda::cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, result, sys,
};
use twinbuf_cuda::{Copied, DeviceBatches, Uploader, context};

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
        Self { sizes, rounds: 7, round_bytes: 4 << 30, stage, epoch }
    }

    pub(crate) fn quick() -> Self {
        let sizes = vec![64 << 10, 1 << 20];
        let (stage, epoch) = (Duration::from_millis(7), Duration::from_millis(42));
        Self { sizes, rounds: 3, round_bytes: 4 << 20, stage, epoch }
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
        },
        "work_bytes": work.bytes,
        "copies": by_size,
        "overlap": or_error(overlap(&ctx, extent, &work)),
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

/// Host memory to copy from, page-locked or not.
enum Source {
    Pinned(*mut u8, usize),
    Pageable(Vec<u8>),
}

impl Source {
    fn pinned(bytes: usize, flags: u32) -> Result<Self> {
        // SAFETY: set below, and freed by `drop`.
        let start = unsafe { result::malloc_host(bytes, flags) }?.cast::<u8>();
        // SAFETY: that many bytes were allocated.
        unsafe { start.write_bytes(1, bytes) };
        Ok(Self::Pinned(start, bytes))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: allocated and set by `pinned`.
            Self::Pinned(start, bytes) => unsafe { std::slice::from_raw_parts(*start, *bytes) },
            Self::Pageable(bytes) => bytes,
        }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Self::Pinned(start, _) = self {
            // After an error there may be copies from it that nobody has waited for.
            let _ = result::ctx::synchronize();
            // SAFETY: allocated by `pinned`, and used by nothing any more.
            let _ = unsafe { result::free_host(start.cast()) };
        }
    }
}

/// One size: plain copies from three kinds of memory, and the same bytes through an uploader.
fn copies(ctx: &Arc<CudaContext>, extent: &Extent, size: usize) -> Result<Value> {
    let stream = ctx.new_stream()?;
    let mut target = stream.alloc_zeros::<u8>(size)?;
    let count = extent.count(size);
    let mut plain = |source: &Source| fill(&mut target, source, &stream, count);
    let mut beside = |write_combined: bool| -> Result<Value> {
        let flags = if write_combined { sys::CU_MEMHOSTALLOC_WRITECOMBINED } else { 0 };
        let source = Source::pinned(size, flags)?;
        let uploader = Uploader::new(ctx, size).write_combined(write_combined);
        uploads(uploader, extent, size, count, || plain(&source))
    };
    let (pinned, write_combined) = (beside(false)?, beside(true)?);
    let source = Source::Pageable(vec![1; size]);
    plain(&source)?; // not counted: first touches
    let pageable = (0..extent.rounds).map(|_| seconds(|| plain(&source))).collect::<Result<_>>()?;
    Ok(json!({
        "pinned": pinned,
        "write_combined": write_combined,
        "pageable": { "plain": rates(size * count, pageable) },
        "plain_gaps": or_error(plain_gaps(&stream, &mut target, size, count)),
    }))
}

/// Copies to the target so many times, enqueued at once, and waits for that.
fn fill(target: &mut CudaSlice<u8>, source: &Source, stream: &Arc<CudaStream>, times: usize) -> Result<()> {
    let bytes = &source.bytes()[..target.len()];
    let (address, _record) = target.device_ptr_mut(stream);
    for _ in 0..times {
        // SAFETY: both are as long, and are there until the stream has been waited for.
        unsafe { result::memcpy_htod_async(address, bytes, stream.cu_stream()) }?;
    }
    Ok(stream.synchronize()?)
}

fn seconds(round: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    round()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Rounds of `bytes` in so many seconds each, as GB/s: median, least, most.
fn rates(bytes: usize, seconds: Vec<f64>) -> Value {
    let mut rates: Vec<f64> = seconds.into_iter().map(|seconds| bytes as f64 / 1e9 / seconds).collect();
    rates.sort_by(f64::total_cmp);
    json!({ "gb_s": rates[rates.len() / 2], "min": rates[0], "max": rates[rates.len() - 1] })
}

/// The gaps between copies that are enqueued at once, with the events that an uploader records around each: what is
/// left of the uploader's own gaps is its share.
fn plain_gaps(
    stream: &Arc<CudaStream>,
    target: &mut CudaSlice<u8>,
    size: usize,
    count: usize,
) -> Result<Value> {
    type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
    // The first version of this function, which every driver has: `CudaEvent::elapsed_ms`, built for CUDA 13, calls
    // the second and panics with drivers before 12.8.
    // SAFETY: the driver has been loaded.
    let driver = unsafe { sys::culib() };
    // SAFETY: the type is that of the function of this name in cuda.h.
    let elapsed = unsafe { driver.get::<ElapsedTime>("cuEventElapsedTime") }?;
    let source = Source::pinned(size, 0)?;
    let (address, _record) = target.device_ptr_mut(stream);
    let event = |flags| Ok::<_, Box<dyn Error>>(stream.context().new_event(Some(flags))?);
    let mut events = Vec::new();
    for _ in 0..count.clamp(2, 512) {
        let start = event(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        events.push((start, event(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC)?));
    }
    for (start, copied) in &events {
        start.record(stream)?;
        // SAFETY: both are `size` bytes long, and are there until the stream has been waited for.
        unsafe { result::memcpy_htod_async(address, source.bytes(), stream.cu_stream()) }?;
        copied.record(stream)?;
    }
    stream.synchronize()?;
    let gap = |pair: &[(CudaEvent, CudaEvent)]| {
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is valid for the call; both events exist, are for timing, and were recorded.
        unsafe { elapsed(&raw mut milliseconds, pair[0].1.cu_event(), pair[1].0.cu_event()) }.result()?;
        Ok(f64::from(milliseconds) / 1e3)
    };
    Ok(quantiles(events.windows(2).map(gap).collect::<Result<_>>()?))
}

/// Of the gaps between copies, at least one.
fn quantiles(mut gaps: Vec<f64>) -> Value {
    gaps.sort_by(f64::total_cmp);
    let gap = |part: f64| gaps.get(((gaps.len() as f64 * part) as usize).min(gaps.len().saturating_sub(1)));
    json!({ "gap_median": gap(0.5), "gap_p99": gap(0.99) })
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Rounds of `plain` and of the same bytes through the ring, in turn: host slots committed as they are, leases
/// dropped at once. With the gaps between the ring's copies.
pub(crate) fn uploads(
    uploader: Uploader,
    extent: &Extent,
    size: usize,
    count: usize,
    mut plain: impl FnMut() -> Result<()>,
) -> Result<Value> {
    let log = Arc::new(Mutex::new(Vec::<Copied>::new()));
    let copied = log.clone();
    let log_copy = move |copy| copied.lock().unwrap_or_else(PoisonError::into_inner).push(copy);
    let (mut slots, batches) = uploader.on_copied(log_copy).build::<()>()?;
    let (mut plains, mut rings) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| -> Result<()> {
        // Both dropped in here, before the scope waits: without them the reader ends, whatever fails.
        let mut batches = batches;
        let (go, rounds) = mpsc::channel::<()>();
        scope.spawn(move || {
            // A round at a time, so that none of its copies runs beside the plain ones.
            for () in rounds {
                (0..count).try_for_each(|_| slots.acquire()?.commit(size, ()))?;
            }
            slots.finish();
            Ok::<(), twinbuf_cuda::Error>(())
        });
        let mut ring = || {
            go.send(()).map_err(|_| "the reader has ended")?;
            for _ in 1..count {
                batches.recv()?.ok_or("a short round")?;
            }
            // The round is over when its last copy is.
            batches.recv()?.ok_or("a short round")?.wait_copied()?;
            Ok(())
        };
        plain()?; // not counted: first touches
        seconds(&mut ring)?;
        for _ in 0..extent.rounds {
            plains.push(seconds(&mut plain)?);
            rings.push(seconds(&mut ring)?);
        }
        Ok(())
    })?;
    let log = log.lock().unwrap_or_else(PoisonError::into_inner);
    let within_a_round = log.windows(2).filter(|pair| pair[1].seq % count as u64 != 0);
    let gaps = within_a_round
        .map(|pair| pair[1].time.start.saturating_duration_since(pair[0].time.start + pair[0].time.took))
        .map(|gap| gap.as_secs_f64())
        .collect();
    let mut figures = quantiles(gaps);
    figures["uploader_over_plain"] =
        median(plains.iter().zip(&rings).map(|(plain, ring)| plain / ring).collect()).into();
    figures["plain"] = rates(size * count, plains);
    figures["uploader"] = rates(size * count, rings);
    Ok(figures)
}

/// What stands for training: a device-to-device copy, repeated.
pub(crate) struct Work {
    /// One for all of it, so that what an error has left there runs before what comes next.
    stream: Arc<CudaStream>,
    /// Both halves of each copy.
    from: CudaSlice<u8>,
    bytes: usize,
    seconds: f64,
}

impl Work {
    /// Shorter copies would measure the launches, run within the cache, and overflow the launch queue.
    const LEAST: f64 = 0.5e-3;

    /// Copies that take that long each, or that take an eighth of the free memory.
    pub(crate) fn new(ctx: &Arc<CudaContext>) -> Result<Self> {
        const COPIES: u32 = 8;
        let (stream, (free, _)) = (ctx.new_stream()?, ctx.mem_get_info()?);
        let mut bytes = 1 << 20;
        loop {
            let from = stream.alloc_zeros::<u8>(2 * bytes)?;
            let mut work = Self { stream: stream.clone(), from, bytes, seconds: 0.0 };
            work.enqueue(COPIES)?;
            stream.synchronize()?;
            let start = Instant::now();
            work.enqueue(COPIES)?;
            stream.synchronize()?;
            work.seconds = start.elapsed().as_secs_f64() / f64::from(COPIES);
            if work.seconds >= Self::LEAST || 2 * 2 * bytes > free / 8 {
                return Ok(work);
            }
            bytes *= 2;
        }
    }

    fn copies(&self, seconds: f64) -> u32 {
        (seconds / self.seconds).round().clamp(1.0, 1e6) as u32
    }

    fn enqueue(&self, copies: u32) -> Result<()> {
        let (from, _record) = self.from.device_ptr(&self.stream);
        for _ in 0..copies {
            let to = from + self.bytes as u64;
            // SAFETY: both halves are that long, and are there until the stream has been waited for.
            unsafe { result::memcpy_dtod_async(to, from, self.bytes, self.stream.cu_stream()) }?;
        }
        Ok(())
    }
}

/// Copies and work at the same time, on two streams, against each alone.
fn overlap(ctx: &Arc<CudaContext>, extent: &Extent, work: &Work) -> Result<Value> {
    let copying = ctx.new_stream()?;
    let size = extent.sizes.iter().copied().max().ok_or("no sizes")?;
    let source = Source::pinned(size, 0)?;
    let mut target = copying.alloc_zeros::<u8>(size)?;
    let (address, _record) = target.device_ptr_mut(&copying);
    let taken = |copy: bool, copies: u32| -> Result<f64> {
        let round = || {
            if copy {
                // SAFETY: both are `size` bytes long, and are there until the stream has been waited for.
                unsafe { result::memcpy_htod_async(address, source.bytes(), copying.cu_stream()) }?;
            }
            work.enqueue(copies)?;
            copying.synchronize()?;
            Ok(work.stream.synchronize()?)
        };
        Ok(median((0..extent.rounds).map(|_| seconds(round)).collect::<Result<_>>()?))
    };
    let copy = taken(true, 0)?;
    let copies = work.copies(copy);
    let (work, both) = (taken(false, copies)?, taken(true, copies)?);
    Ok(json!({
        "bytes": size,
        "copy_alone": copy,
        "work_alone": work,
        "both": both,
        "hidden": (copy + work - both) / copy.min(work),
    }))
}

/// The most that a copy takes in a three-stage run, in seconds: at 50 GB/s that is half a gigabyte a slot.
const LONGEST_COPY: f64 = 0.01;

/// Each pipeline runs this often, both ways in turn.
const EPOCHS: usize = 3;

/// Load (sleep), copy, train (device copies), in this proportion: one after the other, and overlapped.
pub(crate) fn pipeline(
    ctx: &Arc<CudaContext>,
    extent: &Extent,
    work: &Work,
    parts: [f64; 3],
) -> Result<Value> {
    let longest = parts.iter().copied().fold(0.0, f64::max);
    let scale = (extent.stage.as_secs_f64() / longest).min(LONGEST_COPY / parts[1]);
    let [load, copy, train] = parts.map(|part| part * scale);
    let count = (extent.epoch.as_secs_f64() / (longest * scale)).ceil() as usize;
    // As many bytes as take that long at the rate of one large copy.
    let size = bytes_in(ctx, extent, copy)?;
    let (load, copies, stream) = (Duration::from_secs_f64(load), work.copies(train), &work.stream);
    let mut train = Train { work, copies, weights: stream.alloc_zeros::<u8>(size)? };
    let alone = alone(ctx, size, load, |batch| {
        train.step(batch)?;
        Ok(stream.synchronize()?)
    })?;
    let mut epoch = |overlap: bool| -> Result<f64> {
        let (mut slots, mut batches) = Uploader::new(ctx, size).overlap(overlap).build::<()>()?;
        let start = Instant::now();
        let mut step = |batches: &mut DeviceBatches<()>| -> Result<()> {
            let batch = batches.recv()?.ok_or("a short epoch")?;
            train.step(&batch.on::<u8>(stream)?)?;
            drop(batch);
            Ok(stream.synchronize()?) // a training loop reads its loss back
        };
        let mut read = move || {
            let slot = slots.acquire()?;
            std::thread::sleep(load);
            slot.commit(size, ())
        };
        // Each wall ends before any slot is given back, which takes long for page-locked memory.
        let wall = if overlap {
            std::thread::scope(|scope| -> Result<Duration> {
                // Dropped in here, before the scope waits: without it the reader ends, whatever fails.
                let mut batches = batches;
                let reader = scope.spawn(move || (0..count).try_for_each(|_| read()).map(|()| read));
                for _ in 0..count {
                    step(&mut batches)?;
                }
                let wall = start.elapsed();
                drop(reader.join().map_err(|_| "the reader panicked")??);
                Ok(wall)
            })?
        } else {
            for _ in 0..count {
                read()?;
                step(&mut batches)?;
            }
            start.elapsed()
        };
        Ok(wall.as_secs_f64())
    };
    let (mut serial, mut overlapped) = (Vec::new(), Vec::new());
    for _ in 0..EPOCHS {
        serial.push(epoch(false)?);
        overlapped.push(epoch(true)?);
    }
    let longest = count as f64 * alone.iter().copied().fold(0.0, f64::max);
    let (serial, overlapped) = (median(serial), median(overlapped));
    Ok(json!({
        "batches": count,
        "batch_bytes": size,
        "stage_seconds": { "load": alone[0], "copy": alone[1], "train": alone[2] },
        "serial": serial,
        "overlapped": overlapped,
        "longest": longest,
        "overlapped_over_longest": overlapped / longest,
    }))
}

/// In place of a training step: the batch is read, then work is done on the device.
struct Train<'w> {
    work: &'w Work,
    copies: u32,
    weights: CudaSlice<u8>,
}

impl Train<'_> {
    fn step(&mut self, batch: &impl DevicePtr<u8>) -> Result<()> {
        self.work.stream.memcpy_dtod(batch, &mut self.weights)?;
        self.work.enqueue(self.copies)
    }
}

/// Load, copy and train, each by itself: what was asked for is only about that.
fn alone(
    ctx: &Arc<CudaContext>,
    size: usize,
    load: Duration,
    mut train: impl FnMut(&CudaSlice<u8>) -> Result<()>,
) -> Result<[f64; 3]> {
    let stream = ctx.new_stream()?;
    let source = Source::pinned(size, 0)?;
    let mut batch = stream.alloc_zeros::<u8>(size)?;
    let mut times = [const { Vec::new() }; 3];
    for _ in 0..EPOCHS {
        times[0].push(seconds(|| {
            std::thread::sleep(load);
            Ok(())
        })?);
        times[1].push(seconds(|| fill(&mut batch, &source, &stream, 1))?);
        times[2].push(seconds(|| train(&batch))?);
    }
    Ok(times.map(median))
}

/// How many bytes a copy moves that takes `long` seconds.
fn bytes_in(ctx: &Arc<CudaContext>, extent: &Extent, long: f64) -> Result<usize> {
    let stream = ctx.new_stream()?;
    let size = extent.sizes.iter().copied().filter(|&size| size <= 64 << 20).max().ok_or("no sizes")?;
    let source = Source::pinned(size, 0)?;
    let mut target = stream.alloc_zeros::<u8>(size)?;
    let mut best = f64::INFINITY;
    for _ in 0..extent.rounds {
        best = best.min(seconds(|| fill(&mut target, &source, &stream, 1))?);
    }
    Ok((size as f64 * long / best).max(1.0) as usize)
}
