//! The cost of a batch for the host: driver calls and time.

use std::ffi::{CString, c_char};
use std::sync::Arc;

use serde_json::{Value, json};
use twinbuf_cuda::cudarc::driver::{CudaContext, sys};
use twinbuf_cuda::{DeviceBatches, HostSlots, Uploader};

use super::measure::{median, seconds};
use super::{Extent, Result};

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
