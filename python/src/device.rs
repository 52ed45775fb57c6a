//! A device as the loader's place for batches: what is not in `twinbuf/_device.py`.

use std::alloc::Layout;
use std::ptr::NonNull;

use pyo3::prelude::*;
use twinbuf::mmap::Buffer;

/// What sends batches there. `None` for host memory.
pub(crate) fn sender<'py>(device: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let sender = device.py().import("twinbuf._device")?.call_method1("sender", (device,))?;
    Ok(Some(sender).filter(|sender| !sender.is_none()))
}

/// So many slots in page-locked memory of torch, so that a copy to the device reads them and nothing is copied before.
/// `None` where torch does not have such memory.
pub(crate) fn slots(
    sender: &Bound<'_, PyAny>,
    (count, slot): (usize, Layout),
) -> PyResult<Option<Vec<Buffer>>> {
    let bytes = slot.size();
    let lent = |_| {
        // A tensor of bytes that are zeros.
        let tensor = sender.call_method1("slot", (bytes,))?;
        let start = NonNull::new(tensor.call_method0("data_ptr")?.extract::<usize>()? as *mut u8);
        let fits = tensor.call_method0("numel")?.extract::<usize>()? == bytes;
        Ok(start.filter(|start| fits && start.addr().get() % slot.align() == 0).map(|start| {
            // SAFETY: the tensor has this many bytes, which were written, and nothing else has the tensor.
            unsafe { Buffer::lent(start, bytes, tensor.unbind()) }
        }))
    };
    (0..count).map(lent).collect()
}
