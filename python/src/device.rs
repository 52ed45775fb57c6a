//! A device as the loader's place for batches: what is not in `twinbuf/_device.py`.

use std::ptr::NonNull;

use pyo3::prelude::*;
use twinbuf::mmap::Buffer;

/// Slots begin at multiples of it.
const ALIGN: usize = 64;

/// What sends batches there. `None` for host memory.
pub(crate) fn sender<'py>(device: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let sender = device.py().import("twinbuf._device")?.call_method1("sender", (device,))?;
    Ok(Some(sender).filter(|sender| !sender.is_none()))
}

/// Slots of so many bytes in page-locked memory of torch, so that a copy to the device reads them and nothing is copied
/// before.
pub(crate) fn slots(
    sender: &Bound<'_, PyAny>,
    bytes: usize,
    depth: usize,
    workers: usize,
) -> PyResult<Option<Vec<Buffer>>> {
    let slot = |_| {
        // A tensor of bytes that are zeros.
        let tensor = sender.call_method1("slot", (bytes,))?;
        let start = NonNull::new(tensor.call_method0("data_ptr")?.extract::<usize>()? as *mut u8);
        let fits = tensor.call_method0("numel")?.extract::<usize>()? == bytes;
        Ok(start.filter(|start| fits && start.addr().get() % ALIGN == 0).map(|start| {
            // SAFETY: the tensor has this many bytes, which were written, and nothing else has the tensor.
            unsafe { Buffer::lent(start, bytes, tensor.unbind()) }
        }))
    };
    // Those out of range are refused by the loader.
    let slots = (1..=8).contains(&depth) && (1..=64).contains(&workers);
    let count = if slots { depth * workers } else { 0 };
    (0..count)
        .map(slot)
        .collect::<PyResult<Option<Vec<_>>>>()
        .map(|slots| slots.filter(|slots| !slots.is_empty()))
}
