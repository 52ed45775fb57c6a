//! The copy thread's use of a processor: while it uploads, and while nothing is committed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use twinbuf_cuda::Uploader;
use twinbuf_cuda::cudarc::driver::CudaContext;

use super::measure::upload;
use super::{Extent, Result};

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
