//! A device as the destination of batches: the Rust part. The rest is in `twinbuf/_device.py`.

use std::alloc::Layout;
use std::path::Path;
use std::ptr::NonNull;

use pyo3::prelude::*;
use twinbuf::mmap::Buffer;

use crate::recorder::Recorder;

/// Makes the object that sends batches to `device`: a `twinbuf._device.Sender`. `None` if that is host memory.
pub(crate) fn sender<'py>(
    device: Option<&Bound<'py, PyAny>>,
    depth: usize,
    name: Option<&str>,
    trace: Option<&Path>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let Some(device) = device else { return Ok(None) };
    let module = device.py().import("twinbuf._device")?;
    let sender = module.call_method1("sender", (device, depth, name.unwrap_or_default(), trace))?;
    Ok(Some(sender).filter(|sender| !sender.is_none()))
}

/// Returns the report of a loop. With a sender it is made of two: that of the `sender`, which measures the loop, and
/// `reads`, that of the loader or stream.
pub(crate) fn report(
    py: Python<'_>,
    sender: Option<&Py<PyAny>>,
    reads: twinbuf::Report,
) -> PyResult<twinbuf::Report> {
    let Some(sender) = sender.map(|sender| sender.bind(py)) else { return Ok(reads) };
    let recorder = sender.getattr("recorder")?;
    let measured = recorder.cast::<Recorder>()?.get().lock().report();
    Ok(measured.on_device(reads))
}

/// Allocates `count` slots of the layout `slot` in page-locked memory, by torch. A copy to the device reads them
/// directly, without a bounce buffer. `None` if what torch returns does not fit that layout.
pub(crate) fn slots(
    sender: &Bound<'_, PyAny>,
    (count, slot): (usize, Layout),
) -> PyResult<Option<Vec<Buffer>>> {
    let bytes = slot.size();
    let lent = |_| {
        // A tensor of `bytes` bytes, each of them 0.
        let tensor = sender.call_method1("slot", (bytes,))?;
        let start = NonNull::new(tensor.call_method0("data_ptr")?.extract::<usize>()? as *mut u8);
        let fits = tensor.call_method0("numel")?.extract::<usize>()? == bytes;
        Ok(start.filter(|start| fits && start.addr().get() % slot.align() == 0).map(|start| {
            // SAFETY: the tensor has this many initialized bytes. The sender also reads them, but only those of a batch
            // that it holds: it waits for a copy out of the slot before it lets go of the batch.
            unsafe { Buffer::lent(start, bytes, tensor.unbind()) }
        }))
    };
    (0..count).map(lent).collect()
}
