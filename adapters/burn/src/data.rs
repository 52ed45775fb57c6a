//! A batch as burn's tensor data, without a copy.

use burn_core::tensor::{AllocationProperty, Bytes, DType, DataError, Shape, TensorData};
use twinbuf::Batch;

/// Turns a batch into tensor data of this shape and type **without a copy**: burn uses the bytes in the batch's slot.
///
/// The data holds the slot until it is dropped. burn's CPU backend `flex` keeps using the slot, so a tensor made of the
/// data holds it too: drop tensors after their step, or raise [`depth`](twinbuf::loader::LoaderBuilder::depth). If the
/// loader waits for a held slot for longer than [`held_timeout`](twinbuf::loader::LoaderBuilder::held_timeout), the
/// epoch ends with an error.
///
/// On CUDA, call [`Device::staging`](burn_core::tensor::Device::staging) on the data first: it makes the one copy on
/// the host, into burn's page-locked memory, and releases the slot. The device then copies from that memory.
///
/// No values are converted or checked: in a `bool`, every byte must be 0 or 1.
///
/// # Errors
///
/// [`DataError`] unless the batch has exactly the bytes of that shape and type. Quantized types are not checked.
///
/// # Examples
///
/// ```
/// use burn_core::tensor::{DType, Device, Tensor};
/// use twinbuf::{Batch, BoxError};
/// use twinbuf_burn::tensor_data;
///
/// /// Rows of 64 `f32`; for [`BurnLoader::builder`](twinbuf_burn::BurnLoader::builder).
/// fn rows(batch: Batch, device: &Device) -> Result<Tensor<2>, BoxError> {
///     let shape = [batch.len() / (64 * 4), 64];
///     let mut data = tensor_data(batch, shape, DType::F32)?;
///     device.staging([&mut data].into_iter()); // does nothing on the CPU
///     Ok(Tensor::from_data(data, device))
/// }
/// ```
pub fn tensor_data(batch: Batch, shape: impl Into<Shape>, dtype: DType) -> Result<TensorData, DataError> {
    let bytes = bytes::Bytes::from_owner(Owner(batch));
    TensorData::try_from_bytes(Bytes::from_shared(bytes, AllocationProperty::Native), shape, dtype)
}

/// The owner of the bytes: holds the slot.
struct Owner(Batch);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
