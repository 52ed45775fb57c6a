//! A device as the destination of batches: the Rust part. The rest is in `twinbuf/_device.py`.

use std::alloc::Layout;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;

use pyo3::prelude::*;
use twinbuf::mmap::Buffer;

/// The object that sends batches there. `None` for host memory.
pub(crate) fn sender<'py>(
    device: &Bound<'py, PyAny>,
    depth: usize,
    name: Option<&str>,
    trace: Option<&Path>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let module = device.py().import("twinbuf._device")?;
    let sender = module.call_method1("sender", (device, depth, name.unwrap_or_default(), trace))?;
    Ok(Some(sender).filter(|sender| !sender.is_none()))
}

/// This many slots in page-locked memory of torch: a copy to the device reads them directly, without staging. `None` if
/// torch has no such memory.
pub(crate) fn slots(
    sender: &Bound<'_, PyAny>,
    (count, slot): (usize, Layout),
) -> PyResult<Option<Vec<Buffer>>> {
    let bytes = slot.size();
    let lent = |_| {
        // A tensor of zero bytes.
        let tensor = sender.call_method1("slot", (bytes,))?;
        let start = NonNull::new(tensor.call_method0("data_ptr")?.extract::<usize>()? as *mut u8);
        let fits = tensor.call_method0("numel")?.extract::<usize>()? == bytes;
        Ok(start.filter(|start| fits && start.addr().get() % slot.align() == 0).map(|start| {
            // SAFETY: the tensor has this many initialized bytes. The sender also reads them, but only those that are filled.
            // `sends_chunks` waits for these reads before the slot is filled again, and `Upload.lend` before the tensor is
            // freed.
            unsafe { Buffer::lent(start, bytes, tensor.unbind()) }
        }))
    };
    (0..count).map(lent).collect()
}

/// Sends chunks of a slot, on the thread that fills it.
pub(crate) fn sends_chunks(
    sender: &Bound<'_, PyAny>,
) -> PyResult<impl Fn(usize, Range<usize>) + Send + Sync + use<>> {
    let filled = sender.getattr("filled")?.unbind();
    Ok(move |start, Range { start: first, end }: Range<usize>| {
        // Nothing sends a batch when the interpreter is about to exit. An error is met again when the batch is sent.
        let _ = Python::try_attach(|py| filled.call1(py, (start, first, end)).map(drop));
    })
}
