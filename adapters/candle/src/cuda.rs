//! Batches of the loader's upload stage, which are in device memory already.

use candle_core::cuda_backend::{CudaDType, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType as To, Device, Storage, Tensor};
use half::{bf16, f16};
use twinbuf::Error;
use twinbuf::cuda::Element;
use twinbuf::loader::{At, DeviceBatch};

use crate::{TensorError, shape_of};

/// A batch in device memory as a tensor of shape `[records, shape..]`, where `shape` is that of one record.
///
/// The bytes are **copied once, on the device**, into memory that candle owns: a tensor cannot borrow. The copy is
/// enqueued on candle's own stream, behind the upload; the host waits for nothing, and the batch's slot is uploaded to
/// again once the copy is done. The loader's context must be that of `device`:
/// `Loader::builder(..).cuda(device.as_cuda_device()?.cuda_stream().context().clone())`.
///
/// candle's usual stream is the per-thread default stream, and each thread has a different one: make the tensor, use it
/// and drop it on one thread, as for any of candle's tensors, or take `Device::new_cuda_with_stream`.
///
/// # Errors
///
/// Those of [`tensor`](crate::tensor); [`TensorError::Device`] if the batch is in another context, or the driver fails.
pub fn device_tensor(batch: DeviceBatch, device: &Device) -> Result<Tensor, TensorError> {
    if batch.field_count() != 1 {
        let at = At { loader: None, epoch: batch.epoch(), step: Some(batch.step()) };
        let (wanted, found) = ("a batch of one field".to_string(), "several".to_string());
        return Err(TensorError::Batch(Error::Field { at, field: 0, wanted, found }));
    }
    let of = batch.field_type(0).map_err(TensorError::Batch)?;
    let (to, whole) = shape_of(of, batch.plan().len())?;
    match to {
        To::U8 => owned::<u8>(batch, whole, device),
        To::I16 => owned::<i16>(batch, whole, device),
        To::U32 => owned::<u32>(batch, whole, device),
        To::I32 => owned::<i32>(batch, whole, device),
        To::I64 => owned::<i64>(batch, whole, device),
        To::F16 => owned::<f16>(batch, whole, device),
        To::BF16 => owned::<bf16>(batch, whole, device),
        To::F32 => owned::<f32>(batch, whole, device),
        To::F64 => owned::<f64>(batch, whole, device),
        // `candle_dtype` returns only the types above.
        _ => unreachable!("{to:?} is not made of a record's type"),
    }
}

fn owned<T: CudaDType + Element>(
    batch: DeviceBatch,
    shape: Vec<usize>,
    device: &Device,
) -> Result<Tensor, TensorError> {
    let device = device.as_cuda_device().map_err(TensorError::Candle)?;
    let numbers = batch.into_lease().into_owned::<T>(&device.cuda_stream()).map_err(TensorError::Device)?;
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(numbers, device.clone()));
    Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
}
