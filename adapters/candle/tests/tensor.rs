//! Batches as tensors: every type, the shapes, and what is refused.

use std::sync::Arc;

use candle_core::{Device, Tensor, WithDType};
use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::{Cut, DType};
use twinbuf::transform::{Convert, Transform, per_record};
use twinbuf::{BoxError, LastBatch, Loader, Plan, Records};
use twinbuf_candle::{TensorError, field_tensor, tensor};

/// A loader of `bytes` as rows of `columns` numbers, `batch` rows a batch, the rest as a smaller one.
fn loader(bytes: &[u8], dtype: DType, columns: usize, batch: u64) -> Result<LoaderBuilder, BoxError> {
    let data = open(bytes, dtype, columns)?;
    let plan = Plan::builder(data.len()).batch(batch).last_batch(LastBatch::Keep).build()?;
    Ok(Loader::builder(data, plan))
}

fn open(bytes: &[u8], dtype: DType, columns: usize) -> Result<Arc<Records>, BoxError> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("numbers.bin");
    std::fs::write(&path, bytes)?;
    // Rows without overlap; the file stays open when its name is gone.
    let cut = Cut::Windows { rows: columns, stride: columns };
    Ok(Arc::new(Records::open_headerless([&path], dtype, cut)?))
}

/// All tensors of an epoch, made while no batch is kept.
fn tensors(loader: LoaderBuilder) -> Result<Vec<Tensor>, BoxError> {
    let mut loader = loader.overlap(false).depth(1).build()?;
    loader.epoch(0).map(|batch| Ok(tensor(&batch?, &Device::Cpu)?)).collect()
}

/// Five rows of two of these numbers, two rows a batch: their bytes become tensors that hold them again.
fn round_trip<T: WithDType + std::fmt::Debug>(
    dtype: DType,
    numbers: [T; 10],
    bytes: &[u8],
) -> Result<(), BoxError> {
    let found = tensors(loader(bytes, dtype, 2, 2)?)?;
    let wanted: [&[T]; 3] = [&numbers[..4], &numbers[4..8], &numbers[8..]];
    assert_eq!(found.len(), wanted.len(), "{dtype}");
    // All of them at the end: a tensor that still looked into the one slot would show the last batch.
    for (tensor, wanted) in found.iter().zip(wanted) {
        assert_eq!(tensor.dtype(), T::DTYPE, "{dtype}");
        assert_eq!(tensor.dims(), [wanted.len() / 2, 2], "{dtype}");
        assert_eq!(tensor.flatten_all()?.to_vec1::<T>()?, wanted, "{dtype}");
    }
    Ok(())
}

macro_rules! round_trips {
    ($($dtype:ident: $number:ty = $values:expr;)*) => {$({
        let values: [$number; 10] = $values;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        round_trip(DType::$dtype, values, &bytes)?;
    })*};
}

#[test]
fn every_type_comes_back() -> Result<(), BoxError> {
    use half::{bf16, f16};
    round_trips! {
        U8: u8 = [0, 1, 2, 3, 255, 254, 128, 127, 9, 10];
        I16: i16 = [0, -1, i16::MIN, i16::MAX, 256, 255, -256, 7, 8, 9];
        U32: u32 = [0, 1, u32::MAX, 1 << 31, 256, 65_536, 3, 4, 5, 6];
        I32: i32 = [0, -1, i32::MIN, i32::MAX, 256, 65_536, -3, 4, 5, 6];
        I64: i64 = [0, -1, i64::MIN, i64::MAX, 1 << 40, -(1 << 40), 3, 4, 5, 6];
        F16: f16 = std::array::from_fn(|i| f16::from_f32(i as f32 - 4.5));
        Bf16: bf16 = std::array::from_fn(|i| bf16::from_f32(i as f32 - 4.5));
        F32: f32 = std::array::from_fn(|i| i as f32 / 3.0 - 1.0);
        F64: f64 = std::array::from_fn(|i| i as f64 / 3.0 - 1.0);
    }
    Ok(())
}

#[test]
fn a_record_has_the_shape_that_the_loader_declares() -> Result<(), BoxError> {
    let bytes: Vec<u8> = (0..24).collect();
    let copy = |record: &[u8], out: &mut [u8], _| {
        out.copy_from_slice(record);
        Ok(())
    };
    for (shape, wanted) in [(&[12][..], &[2, 12][..]), (&[2, 3, 2], &[2, 2, 3, 2]), (&[12, 1], &[2, 12, 1])] {
        let shaped = per_record(12, copy).of(DType::U8, shape);
        let found = tensors(loader(&bytes, DType::U8, 12, 2)?.transform(shaped))?;
        assert_eq!(found[0].dims(), wanted);
        assert_eq!(found[0].flatten_all()?.to_vec1::<u8>()?, bytes);
    }
    // Records that are one number each: no axis but that of the records. Without a type: bytes.
    let single = per_record(1, copy).of(DType::U8, []);
    assert_eq!(tensors(loader(&bytes, DType::U8, 1, 24)?.transform(single))?[0].dims(), [24]);
    let untyped = loader(&[0; 24], DType::F32, 3, 2)?.transform(per_record(12, copy));
    assert_eq!(tensors(untyped)?[0].dims(), [2, 12]);
    Ok(())
}

#[test]
fn what_a_transform_makes() -> Result<(), BoxError> {
    let normalise = Transform::new(DType::U8, 1)?.normalise(&[0.5], &[-1.0])?;
    let found = tensors(loader(&[0, 2, 4, 6], DType::U8, 2, 2)?.transform(normalise))?;
    assert_eq!(found[0].to_vec2::<f32>()?, [[-1.0, 0.0], [1.0, 2.0]]);

    let tokens = loader(&[1, 0, 0xff, 0xff], DType::U16, 2, 1)?.transform(Convert::U16ToU32);
    assert_eq!(tensors(tokens)?[0].to_vec2::<u32>()?, [[1, 65_535]]);
    Ok(())
}

#[test]
fn fields_do_not_mix() -> Result<(), BoxError> {
    // Four bytes and four numbers a record: together as large as eight of either.
    let labels: Vec<u8> = (0..8_u32).flat_map(u32::to_le_bytes).collect();
    let data = (open(&[1, 2, 3, 4, 5, 6, 7, 8], DType::U8, 4)?, open(&labels, DType::U32, 4)?);
    let mut loader = Loader::builder(data, Plan::builder(2).batch(2).build()?).build()?;
    let batch = loader.epoch(0).next().expect("a batch")?;
    let of = |field| field_tensor(&batch, field, &Device::Cpu);
    assert_eq!(of(0)?.to_vec2::<u8>()?, [[1, 2, 3, 4], [5, 6, 7, 8]]);
    assert_eq!(of(1)?.to_vec2::<u32>()?, [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(of(2).unwrap_err().to_string(), "epoch 0, step 0: field 2: wanted a field below 2, found 2");
    let error = tensor(&batch, &Device::Cpu).unwrap_err();
    assert_eq!(error.to_string(), "epoch 0, step 0: field 0: wanted types for 2 fields, found 1");
    Ok(())
}

#[test]
fn types_that_candle_has_not_are_refused() -> Result<(), BoxError> {
    for dtype in [DType::Bool, DType::I8, DType::U16, DType::U64, DType::C64, DType::C128] {
        let error = tensors(loader(&[0; 64], dtype, 2, 2)?).unwrap_err();
        assert!(
            matches!(error.downcast_ref(), Some(TensorError::DType { found }) if *found == dtype),
            "{error}"
        );
        assert_eq!(error.to_string().contains("U16ToU32"), dtype == DType::U16, "{error}");
    }
    Ok(())
}
