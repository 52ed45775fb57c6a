//! Batches as tensors: every type, the shapes, and what is refused.

use std::sync::Arc;

use candle_core::{Device, Tensor, WithDType};
use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::{Cut, DType};
use twinbuf::transform::{Convert, Transform};
use twinbuf::{BatchPlan, BoxError, Dataset, Loader, Plan, Records, Tail};
use twinbuf_candle::{TensorError, tensor};

/// A loader of `bytes` as rows of `columns` numbers, `batch` rows a batch, the rest as a smaller one.
fn loader(bytes: &[u8], dtype: DType, columns: usize, batch: u64) -> Result<LoaderBuilder, BoxError> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("numbers.bin");
    std::fs::write(&path, bytes)?;
    // Rows without overlap; the file stays open when its name is gone.
    let data = Records::open_headerless([&path], dtype, Cut::Windows { rows: columns, stride: columns })?;
    let plan = Plan::builder(data.len()).batch(batch).tail(Tail::Keep).build()?;
    Ok(Loader::builder(Arc::new(data), plan))
}

/// All tensors of an epoch, made while no batch is kept.
fn tensors(loader: LoaderBuilder, dtype: DType, shape: &[usize]) -> Result<Vec<Tensor>, BoxError> {
    let mut loader = loader.host_depth(1).build()?;
    loader.epoch(0).map(|batch| Ok(tensor(&batch?, dtype, shape, &Device::Cpu)?)).collect()
}

/// Five rows of two of these numbers, two rows a batch: their bytes become tensors that hold them again.
fn round_trip<T: WithDType + std::fmt::Debug>(
    dtype: DType,
    numbers: [T; 10],
    bytes: &[u8],
) -> Result<(), BoxError> {
    let found = tensors(loader(bytes, dtype, 2, 2)?, dtype, &[2])?;
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
fn a_record_has_the_shape_that_is_asked_for() -> Result<(), BoxError> {
    let bytes: Vec<u8> = (0..24).collect();
    for (shape, wanted) in [
        (&[12][..], &[2, 12][..]),
        (&[2, 6], &[2, 2, 6]),
        (&[2, 3, 2], &[2, 2, 3, 2]),
        (&[12, 1], &[2, 12, 1]),
    ] {
        let found = tensors(loader(&bytes, DType::U8, 12, 2)?, DType::U8, shape)?;
        assert_eq!(found[0].dims(), wanted);
        assert_eq!(found[0].flatten_all()?.to_vec1::<u8>()?, bytes);
    }
    // Records that are one number each: no axis but that of the records.
    let found = tensors(loader(&bytes, DType::U8, 1, 24)?, DType::U8, &[])?;
    assert_eq!(found[0].dims(), [24]);
    Ok(())
}

#[test]
fn what_a_transform_makes() -> Result<(), BoxError> {
    let normalise = Transform::new(DType::U8, 1)?.normalise(&[0.5], &[-1.0])?;
    let found = tensors(loader(&[0, 2, 4, 6], DType::U8, 2, 2)?.transform(normalise), DType::F32, &[2])?;
    assert_eq!(found[0].to_vec2::<f32>()?, [[-1.0, 0.0], [1.0, 2.0]]);

    let tokens = loader(&[1, 0, 0xff, 0xff], DType::U16, 2, 1)?.transform(Convert::U16ToU32);
    assert_eq!(tensors(tokens, DType::U32, &[2])?[0].to_vec2::<u32>()?, [[1, 65_535]]);
    Ok(())
}

#[test]
fn a_shape_or_type_of_other_size_is_refused() -> Result<(), BoxError> {
    let mut loader = loader(&[0; 48], DType::U8, 12, 2)?.build()?;
    let batch = loader.epoch(3).nth(1).expect("a second batch")?;
    for (dtype, shape) in [
        (DType::U8, &[11][..]),
        (DType::U8, &[13]),
        (DType::U8, &[2, 12]),
        (DType::U8, &[24]),
        (DType::U8, &[]),
        (DType::U8, &[12, 0]),
        (DType::F32, &[12]),
        (DType::F32, &[2]),
        (DType::F64, &[1]),
        (DType::U8, &[usize::MAX, 2]),
        (DType::F32, &[usize::MAX / 4 + 4]),
    ] {
        let error = tensor(&batch, dtype, shape, &Device::Cpu).unwrap_err();
        let TensorError::Record { epoch, step, wanted, found } = &error else { panic!("{error}") };
        assert_eq!((*epoch, *step, *found), (3, 1, 12));
        assert_eq!(*wanted, (dtype, shape.to_vec()));
    }
    assert_eq!(
        tensor(&batch, DType::F32, &[2, 2], &Device::Cpu).unwrap_err().to_string(),
        "epoch 3, step 1: wanted records of f32 in the shape [2, 2], found 12 bytes a record"
    );
    Ok(())
}

#[test]
fn types_that_candle_has_not_are_refused() -> Result<(), BoxError> {
    let mut loader = loader(&[0; 64], DType::U8, 16, 2)?.build()?;
    let batch = loader.epoch(0).next().expect("a batch")?;
    for dtype in [DType::Bool, DType::I8, DType::U16, DType::U64, DType::C64, DType::C128] {
        let error = tensor(&batch, dtype, &[16 / dtype.size()], &Device::Cpu).unwrap_err();
        assert!(matches!(error, TensorError::DType { found } if found == dtype), "{error}");
    }
    let error = tensor(&batch, DType::U16, &[8], &Device::Cpu).unwrap_err();
    assert!(error.to_string().contains("U16ToU32"), "{error}");
    Ok(())
}

/// Records of no bytes.
struct Empty;

impl Dataset for Empty {
    fn records(&self) -> u64 {
        2
    }

    fn record_bytes(&self) -> usize {
        0
    }

    fn read(&mut self, _: &BatchPlan, out: &mut [u8]) -> Result<usize, BoxError> {
        Ok(out.len())
    }
}

#[test]
fn an_axis_of_nothing_hides_no_axes_that_are_too_long() -> Result<(), BoxError> {
    let mut loader = Loader::builder(Empty, Plan::builder(2).batch(2).build()?).build()?;
    let batch = loader.epoch(0).next().expect("a batch")?;
    assert_eq!(tensor(&batch, DType::F32, &[3, 0], &Device::Cpu)?.dims(), [2, 3, 0]);
    for shape in [&[0, usize::MAX, 2][..], &[usize::MAX, 0]] {
        let error = tensor(&batch, DType::U8, shape, &Device::Cpu).unwrap_err();
        assert!(matches!(error, TensorError::Record { found: 0, .. }), "{error}");
    }
    Ok(())
}
