//! What an uploader costs the host: calls and time a batch, the copy thread's processor, and page-locking.

use std::ffi::{CString, c_char};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use twinbuf_cuda::cudarc::driver::{CudaContext, sys};
use twinbuf_cuda::{DeviceBatches, HostSlots, Uploader};

use super::measure::{Source, median, seconds, upload};
use super::{Extent, Line, Result, entry};

/// The calls that a batch consists of.
const NAMES: [&str; 7] = [
    "cuMemcpyHtoDAsync_v2",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuCtxGetCurrent",
];

/// Calls since the start: of one name, or of all (null).
type Calls = unsafe extern "C" fn(*const c_char) -> u64;

/// Small batches on one thread, to measure the host's time.
pub(crate) fn calls(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    const BYTES: usize = 4096;
    let stream = ctx.new_stream()?;
    // SAFETY: the driver has been loaded.
    let driver = unsafe { sys::culib() };
    // Only the software driver counts.
    // SAFETY: the type is that of the software driver's function.
    let counter = unsafe { driver.get::<Calls>("twinbuf_sim_calls") }.ok().map(|counter| *counter);
    let count = |name: Option<&str>| -> Option<u64> {
        let name = name.and_then(|name| CString::new(name).ok());
        // SAFETY: null, or a string that is valid for the call.
        counter
            .map(|counter| unsafe { counter(name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr())) })
    };
    let depth = 8;
    let uploader = Uploader::new(ctx, BYTES).host_depth(depth).device_depth(depth);
    let (mut slots, mut batches) = uploader.overlap(false).build::<()>()?;
    // As many batches as there are slots: then the host never has to wait for one.
    let round = |slots: &mut HostSlots<()>, batches: &mut DeviceBatches<()>| -> Result<f64> {
        let took = seconds(|| {
            for _ in 0..depth {
                slots.acquire()?.commit(BYTES, ())?;
                batches.recv()?.ok_or("a short round")?.on::<u8>(&stream)?;
            }
            Ok(())
        })?;
        stream.synchronize()?;
        Ok(took)
    };
    round(&mut slots, &mut batches)?; // not counted: the first use of each slot makes its event
    let before = (NAMES.map(|name| count(Some(name))), count(None));
    let rounds = 8 * extent.rounds;
    let times = (0..rounds).map(|_| round(&mut slots, &mut batches)).collect::<Result<Vec<_>>>()?;
    let all = (depth * rounds) as f64;
    let each = |before: Option<u64>, now: Option<u64>| Some((now? - before?) as f64 / all);
    let by_name: serde_json::Map<String, Value> = NAMES
        .into_iter()
        .zip(before.0)
        .map(|(name, before)| (name.to_string(), json!(each(before, count(Some(name))))))
        .collect();
    Ok(json!({
        "counted": counter.is_some(),
        "calls": each(before.1, count(None)),
        "by_name": by_name,
        "host_seconds": median(times) / depth as f64,
    }))
}

/// The copy thread's time on a processor so far.
fn on_cpu() -> Result<Duration> {
    for task in std::fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        if std::fs::read_to_string(task.join("comm"))?.trim_end() == "twinbuf-copy" {
            let times = std::fs::read_to_string(task.join("schedstat"))?;
            let nanoseconds = times.split(' ').next().ok_or("an empty schedstat")?;
            return Ok(Duration::from_nanos(nanoseconds.parse()?));
        }
    }
    Err("no thread named twinbuf-copy".into())
}

pub(crate) fn cpu(ctx: &Arc<CudaContext>, extent: &Extent) -> Result<Value> {
    let size = extent.at_most(64 << 20)?;
    let mut sides = Uploader::new(ctx, size).build()?;
    upload(&mut sides, size, 2)?; // not counted: first touches
    let (began, before) = (Instant::now(), on_cpu()?);
    let count = extent.rounds * extent.count(size);
    upload(&mut sides, size, count)?;
    let (wall, cpu) = (began.elapsed().as_secs_f64(), (on_cpu()? - before).as_secs_f64());
    let before = on_cpu()?;
    std::thread::sleep(extent.epoch / 5);
    let idle = (on_cpu()? - before).as_secs_f64();
    Ok(json!({
        "batch_bytes": size,
        "batches": count,
        "cpu_share": cpu / wall,
        "cpu_seconds_a_batch": cpu / count as f64,
        "cpu_share_idle": idle / (extent.epoch / 5).as_secs_f64(),
    }))
}

pub(crate) fn pinning(ctx: &Arc<CudaContext>, extent: &Extent, line: Line<'_>) {
    for &size in extent.sizes.iter().filter(|&&size| size >= 1 << 20) {
        line(entry("bytes", size, allocated(ctx, size)));
    }
}

/// One allocation that is touched, and one uploader with two host slots and one device slot.
fn allocated(ctx: &Arc<CudaContext>, size: usize) -> Result<Value> {
    let mut source = None;
    let pinned = seconds(|| {
        source = Some(Source::pinned(size, 0)?);
        Ok(())
    })?;
    let freed = seconds(|| {
        source = None;
        Ok(())
    })?;
    let mut sides = None;
    let built = seconds(|| {
        sides = Some(Uploader::new(ctx, size).device_depth(1).build::<()>()?);
        Ok(())
    })?;
    Ok(json!({ "page_locked": pinned, "freed": freed, "built_with_two_host_slots": built }))
}
