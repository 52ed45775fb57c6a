//! Weights: a checkpoint as tensors, and the matrices of a layer in the slot that they were read into.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::quantized::k_quants::{self, GgmlType};
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor, QuantizedType};
use candle_core::{CpuStorage, DType as To, Device, Tensor, bail};
use half::{bf16, f16};
use twinbuf::mmap::ReadMode;
use twinbuf::mmap::{self, Buffer, Reader};
use twinbuf::stream::{Group, Tensors, View};

use crate::{TensorError, candle_dtype};

/// Bytes of one read: the fewest that [`Reader::read_bytes`] lets the disk write straight to the caller's memory.
const PIECE: usize = 4 << 20;

/// The largest block of a disk that reads are aligned for. A read begins as far into a block of
/// memory as into a block of the file, so that the disk can write to its place.
const BLOCK: u64 = 4096;

/// Reads in flight.
const READS: usize = 4;

/// Reads a whole checkpoint: each tensor by its name, as `candle_core::safetensors::load` does.
///
/// On the CPU up to four threads read, and each byte is copied **once** (those of u16 and floats of 4 to 8 bits twice),
/// into the memory that its tensor owns: from the page cache if half of the files' pages or more are there, or the
/// system cannot tell. Otherwise they are read past it if the system can, in pieces of 4 MiB. A disk could write to the
/// tensor's own memory, but its requests are shorter where pages have 4 KiB, as those of a `Vec` do. For another device
/// each tensor is copied to it from a slot while the next one is read; no test here has run on one.
///
/// u16 becomes u32, as in candle's loader. Nothing else is converted.
///
/// # Errors
///
/// [`TensorError::Weight`] if candle lacks a type: see [`linear`] for the blocks of GGUF. [`TensorError::Batch`] if a file
/// cannot be read, [`TensorError::Candle`] if candle cannot make a tensor.
pub fn load(model: &Tensors, device: &Device) -> Result<HashMap<String, Tensor>, TensorError> {
    if !device.is_cpu() {
        return load_through_slots(model, device);
    }
    // In the order of the files.
    let groups = model.groups_by(|_| Some(())).map_err(file_error)?;
    let cold = model.residency().is_ok_and(|pages| pages.resident < pages.pages / 2);
    let reader = if cold { Reader::of_groups(groups.clone(), ReadMode::Direct, 0).ok() } else { None };
    let reader = match reader {
        Some(reader) => reader,
        None => Reader::of_groups(groups.clone(), ReadMode::Pread, 0).map_err(file_error)?,
    };
    let memory = |(tensor, _)| Ok((tensor, Memory::new(tensor)?));
    let mut tensors: Vec<(&mmap::Tensor, Memory)> =
        groups.tensors(0).map(memory).collect::<Result<_, TensorError>>()?;
    let pieces = tensors.iter_mut().flat_map(|(tensor, memory)| {
        let mmap::ByteRange { file, bytes } = tensor.range();
        let starts = (bytes.start..).step_by(PIECE);
        memory.bytes().chunks_mut(PIECE).zip(starts).map(|(out, start)| (*file, start, out))
    });
    let pieces = Mutex::new(pieces);
    let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
    let past = reader.choice().cached == 0;
    let read = || {
        let mut slot = if past { Buffer::untouched(BLOCK as usize + PIECE) } else { None };
        while let Some((file, start, out)) = next() {
            let read = match &mut slot {
                Some(slot) if out.len() == PIECE => {
                    let slot = &mut slot[(start % BLOCK) as usize..][..PIECE];
                    reader.read_bytes(file, start, slot).map(|()| out.copy_from_slice(slot))
                }
                _ => reader.read_bytes(file, start, out),
            };
            if let Err(error) = read {
                while next().is_some() {}
                return Err(file_error(error));
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        // Where no more threads can start, fewer read.
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, read).ok();
        let others: Vec<_> = (1..READS).filter_map(start).collect();
        let first = read();
        let join = |thread: std::thread::ScopedJoinHandle<_>| match thread.join() {
            Ok(read) => read,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        others.into_iter().map(join).fold(first, Result::and)
    })?;
    let made = tensors.into_iter().map(|(tensor, memory)| {
        Ok((tensor.name().to_owned(), memory.tensor(tensor.shape()).map_err(TensorError::Candle)?))
    });
    made.collect()
}

/// Loads a checkpoint as [`load`] does, but through the slots of a stream, one tensor at a time.
fn load_through_slots(model: &Tensors, device: &Device) -> Result<HashMap<String, Tensor>, TensorError> {
    let mut sorted: Vec<_> = model.all().iter().collect();
    sorted.sort_by_key(|tensor| (tensor.range().file, tensor.range().bytes.start));
    let groups = model.groups(sorted.iter().map(|tensor| [tensor.name()])).map_err(file_error)?;
    let mut tensors = HashMap::new();
    if groups.is_empty() {
        return Ok(tensors);
    }
    let mut stream = twinbuf::stream(groups).build().map_err(TensorError::Batch)?;
    for group in stream.pass() {
        for view in group.map_err(TensorError::Batch)?.tensors() {
            tensors.insert(view.name().to_owned(), weight(&view, device)?);
        }
    }
    Ok(tensors)
}

/// One tensor of a layer, copied **once** into memory that candle owns. The layer may be dropped right after. u16
/// becomes u32.
///
/// # Errors
///
/// [`TensorError::Weight`] if candle lacks the type, [`TensorError::Candle`] if candle cannot make the tensor.
pub fn weight(view: &View<'_>, device: &Device) -> Result<Tensor, TensorError> {
    let (to, shape) = (to_dtype(view.tensor())?, view.tensor().shape());
    let made = match to {
        To::U32 if view.tensor().dtype() == Some(mmap::DType::U16) => {
            Tensor::from_vec(wider(view.bytes()), shape, device)
        }
        // Candle makes one copy of memory that is aligned for its numbers, and a tensor in a slot is aligned.
        _ => Tensor::from_raw_buffer(view.bytes(), to, shape, device),
    };
    made.map_err(TensorError::Candle)
}

/// A matrix of a layer, multiplied **in the slot** that it was read into.
///
/// `linear(&layer, "mlp.up_proj.weight")?.forward(&x)` is `x` times the transposed matrix, by candle's own kernels for
/// f32, f16, bf16 and, of GGUF's blocks, Q4_0 to Q8_0 and Q2_K to Q8_K, on the CPU. They convert `x` to what the kernel
/// multiplies with, such as bf16 for a matrix of bf16, and return the type of `x`: f32, f16 or, from candle 0.11.1 on,
/// bf16.
///
/// candle's `Tensor` owns its memory, so it cannot borrow; its `QTensor` is behind a trait, and
/// can. The slot is read into again when the matrix, its clones and the [`Group`] are dropped.
/// When they are used, candle 0.11.1 repacks some matrices, and keeps that copy as long as the matrix: of Q4_0, Q4_K,
/// Q5_K, Q6_K and Q8_0 on AArch64, of Q4_K, Q6_K and Q8_0 on x86-64 with AVX2. Then keep the matrix while the layer is
/// used.
///
/// # Errors
///
/// [`TensorError::Batch`] if the layer has no such tensor; [`TensorError::Weight`] if candle has no
/// kernel for its type, or its bytes are not aligned or not its shape's; [`TensorError::Candle`] if it has no
/// axis, or a row is not a whole number of blocks.
pub fn linear(layer: &Arc<Group>, name: &str) -> Result<QMatMul, TensorError> {
    let found = layer.tensor(name).map_err(TensorError::Batch)?;
    let same = |view: View<'_>| std::ptr::eq(view.tensor(), found.tensor());
    let index = layer.tensors().position(same).unwrap_or(usize::MAX);
    macro_rules! borrowed {
        ($($format:literal: $block:ty,)*) => {
            match found.tensor().format_type() {
                $($format => Borrowed::<$block>::storage(layer, index, &found),)*
                _ => return Err(no_weight(found.tensor(), "")),
            }
        };
    }
    let storage = borrowed! {
        "F32": f32, "F16": f16, "BF16": bf16,
        "Q4_0": k_quants::BlockQ4_0, "Q4_1": k_quants::BlockQ4_1,
        "Q5_0": k_quants::BlockQ5_0, "Q5_1": k_quants::BlockQ5_1,
        "Q8_0": k_quants::BlockQ8_0, "Q8_1": k_quants::BlockQ8_1,
        "Q2_K": k_quants::BlockQ2K, "Q3_K": k_quants::BlockQ3K, "Q4_K": k_quants::BlockQ4K,
        "Q5_K": k_quants::BlockQ5K, "Q6_K": k_quants::BlockQ6K, "Q8_K": k_quants::BlockQ8K,
    };
    let wrong = " with bytes that are not aligned or not its shape's";
    let storage = storage.ok_or_else(|| no_weight(found.tensor(), wrong))?;
    let matrix = QTensor::new(QStorage::Cpu(storage), found.tensor().shape()).map_err(TensorError::Candle)?;
    // `QMatMul::from_qtensor` would make an f32 copy of f32, f16 and bf16.
    Ok(QMatMul::QTensor(Arc::new(matrix)))
}

/// Numbers or blocks in a slot.
struct Borrowed<T> {
    layer: Arc<Group>,
    index: usize,
    of: PhantomData<fn() -> T>,
}

impl<T: GgmlType + Send + Sync + 'static> Borrowed<T> {
    fn storage(layer: &Arc<Group>, index: usize, found: &View<'_>) -> Option<Box<dyn QuantizedType>> {
        let numbers: usize = found.tensor().shape().iter().product();
        let borrowed = Self { layer: layer.clone(), index, of: PhantomData };
        (borrowed.blocks().len().checked_mul(T::BLCK_SIZE) == Some(numbers))
            .then(|| Box::new(borrowed) as Box<_>)
    }

    /// Empty if the bytes are not aligned.
    #[allow(
        unsafe_code,
        reason = "candle's blocks are plain data, and it has no safe way to make one of bytes"
    )]
    fn blocks(&self) -> &[T] {
        let bytes = self.layer.tensors().nth(self.index).map_or(&[][..], |view| view.bytes());
        // SAFETY: `linear` lists all `T`: f32, f16, bf16, and blocks that are `repr(C)` structs of integers and those. They
        // have no padding that is read, and any bytes are a value of them.
        match unsafe { bytes.align_to::<T>() } {
            ([], blocks, []) => blocks,
            _ => &[],
        }
    }
}

impl<T: GgmlType + Send + Sync + 'static> QuantizedType for Borrowed<T> {
    fn dtype(&self) -> GgmlDType {
        T::DTYPE
    }

    fn matmul_t(&self, mkn: (usize, usize, usize), lhs: &[f32], dst: &mut [f32]) -> candle_core::Result<()> {
        k_quants::matmul(mkn, lhs, self.blocks(), dst)
    }

    fn matmul_t_f16(
        &self,
        mkn: (usize, usize, usize),
        lhs: &[f16],
        dst: &mut [f16],
    ) -> candle_core::Result<()> {
        k_quants::matmul_f16(mkn, lhs, self.blocks(), dst)
    }

    fn embedding(&self, ids: &[u32], rows: usize, hidden: usize) -> candle_core::Result<CpuStorage> {
        let row = hidden / T::BLCK_SIZE;
        if !hidden.is_multiple_of(T::BLCK_SIZE) || self.blocks().len() != rows * row {
            bail!("{} blocks are not {rows} rows of {hidden}", self.blocks().len());
        }
        let mut out = vec![0.0; ids.len() * hidden];
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(hidden)) {
            let id = id as usize;
            if id >= rows {
                bail!("wanted a row below {rows}, found {id}");
            }
            T::to_float(&self.blocks()[id * row..(id + 1) * row], out);
        }
        Ok(CpuStorage::F32(out))
    }

    fn dequantize(&self, elem_count: usize) -> candle_core::Result<CpuStorage> {
        let mut out = vec![0.0; elem_count];
        T::to_float(self.blocks(), &mut out);
        Ok(CpuStorage::F32(out))
    }

    fn storage_size_in_bytes(&self) -> usize {
        size_of_val(self.blocks())
    }

    fn as_ptr(&self) -> *const u8 {
        self.blocks().as_ptr().cast()
    }

    fn block_size(&self) -> usize {
        T::BLCK_SIZE
    }

    fn from_float(&mut self, _: &[f32]) {
        unreachable!("candle writes only to storage that it has just made");
    }

    fn from_float_imatrix(&mut self, _: &[f32], _: &[f32], _: usize) {
        unreachable!("candle writes only to storage that it has just made");
    }

    fn size(&self) -> usize {
        self.storage_size_in_bytes()
    }
}

macro_rules! memory {
    ($($to:ident: $number:ty,)*) => {
        /// The memory of a tensor on the CPU.
        enum Memory {
            $($to(Vec<$number>),)*
            U16(Vec<u16>),
            /// A type without arithmetic in candle, or whose crate gives no bytes.
            Other(To, Vec<u8>),
        }

        impl Memory {
            /// Allocates zeroed memory. The system provides its pages when something is read into them.
            fn new(tensor: &mmap::Tensor) -> Result<Self, TensorError> {
                let to = to_dtype(tensor)?;
                let bytes = usize::try_from(tensor.len()).unwrap_or(usize::MAX);
                Ok(match to {
                    To::U32 if tensor.dtype() == Some(mmap::DType::U16) => Self::U16(bytemuck::zeroed_vec(bytes / 2)),
                    $(To::$to => Self::$to(bytemuck::zeroed_vec(bytes / size_of::<$number>())),)*
                    _ => Self::Other(to, vec![0; bytes]),
                })
            }

            fn bytes(&mut self) -> &mut [u8] {
                match self {
                    $(Self::$to(numbers) => bytemuck::cast_slice_mut(numbers),)*
                    Self::U16(numbers) => bytemuck::cast_slice_mut(numbers),
                    Self::Other(_, bytes) => bytes,
                }
            }

            fn tensor(self, shape: &[usize]) -> candle_core::Result<Tensor> {
                match self {
                    $(Self::$to(numbers) => Tensor::from_vec(numbers, shape, &Device::Cpu),)*
                    Self::U16(numbers) => {
                        Tensor::from_vec(wider(bytemuck::cast_slice(&numbers)), shape, &Device::Cpu)
                    }
                    Self::Other(to, bytes) => Tensor::from_raw_buffer(&bytes, to, shape, &Device::Cpu),
                }
            }
        }
    };
}

memory! {
    U8: u8, I16: i16, U32: u32, I32: i32, I64: i64, F16: f16, BF16: bf16, F32: f32, F64: f64,
}

fn wider(numbers: &[u8]) -> Vec<u32> {
    numbers.chunks_exact(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]).into()).collect()
}

/// candle's name of a tensor's type.
fn to_dtype(tensor: &mmap::Tensor) -> Result<To, TensorError> {
    let to = match tensor.format_type() {
        "U16" => Some(To::U32),
        "F8_E4M3" => Some(To::F8E4M3),
        "F6_E2M3" => Some(To::F6E2M3),
        "F6_E3M2" => Some(To::F6E3M2),
        "F4" => Some(To::F4),
        "F8_E8M0" => Some(To::F8E8M0),
        _ => tensor.dtype().and_then(candle_dtype),
    };
    to.ok_or_else(|| no_weight(tensor, ""))
}

fn file_error(error: mmap::Error) -> TensorError {
    TensorError::Batch(twinbuf::Error::Open(error))
}

fn no_weight(tensor: &mmap::Tensor, with: &str) -> TensorError {
    TensorError::Weight { name: tensor.name().to_owned(), found: format!("{tensor}{with}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The way of tensors to another device, tested on the CPU.
    #[test]
    fn the_same_tensors_through_slots() -> Result<(), Box<dyn std::error::Error>> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.safetensors");
        let numbers =
            |layer: u8| Tensor::arange(f32::from(layer), 40.0 * f32::from(layer) + 1.0, &Device::Cpu);
        let tensors = (0..5).map(|layer| Ok((format!("{layer}.up"), numbers(layer)?)));
        let wanted: HashMap<_, _> = tensors.collect::<Result<_, candle_core::Error>>()?;
        candle_core::safetensors::save(&wanted, &path)?;
        let model = Tensors::open([&path])?;
        let (found, there) = (load_through_slots(&model, &Device::Cpu)?, load(&model, &Device::Cpu)?);
        assert_eq!((found.len(), there.len()), (5, 5));
        for (name, wanted) in wanted {
            assert_eq!(found[&name].to_vec1::<f32>()?, wanted.to_vec1::<f32>()?);
            assert_eq!(there[&name].to_vec1::<f32>()?, wanted.to_vec1::<f32>()?);
        }
        Ok(())
    }
}
