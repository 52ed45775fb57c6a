//! Batches as arrays: in place, of the right numbers and shape.

use std::sync::Arc;

use ndarray::{Ix2, array};
use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::{Cut, DType};
use twinbuf::transform::Transform;
use twinbuf::{BatchPlan, BoxError, Dataset, Loader, Plan, Records, Tail};
use twinbuf_ndarray::{Number, ViewError, view, view_mut};

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

/// Three rows of two of these numbers, two rows a batch.
fn in_place<T: Number + PartialEq + std::fmt::Debug>(numbers: [T; 6]) -> Result<(), BoxError> {
    let mut loader = loader(bytemuck::cast_slice(&numbers), T::DTYPE, 2, 2)?.build()?;
    let mut epoch = loader.epoch(0);
    for wanted in [&numbers[..4], &numbers[4..]] {
        let batch = epoch.next().expect("a batch")?;
        let found = view::<T>(&batch, T::DTYPE, &[2])?;
        assert_eq!(found.shape(), [wanted.len() / 2, 2], "{}", T::DTYPE);
        assert_eq!(found.as_slice(), Some(wanted), "{}", T::DTYPE);
        assert_eq!(found.as_ptr().cast::<u8>(), batch.as_ptr(), "copied");
    }
    Ok(())
}

#[test]
fn every_number_in_place() -> Result<(), BoxError> {
    in_place([0_u8, 1, 2, 3, 4, 255])?;
    in_place([0_i8, 1, -2, 3, 4, -128])?;
    in_place([0_u16, 1, 2, 3, 4, u16::MAX])?;
    in_place([0_i16, 1, 2, 3, 4, i16::MIN])?;
    in_place([0_u32, 1, 2, 3, 4, u32::MAX])?;
    in_place([0_i32, 1, 2, 3, 4, i32::MIN])?;
    in_place([0_u64, 1, 2, 3, 4, u64::MAX])?;
    in_place([0_i64, 1, 2, 3, 4, i64::MIN])?;
    in_place([0.0_f32, 0.5, 1.5, -2.0, f32::MAX, f32::MIN_POSITIVE])?;
    in_place([0.0_f64, 0.5, 1.5, -2.0, f64::MAX, f64::MIN_POSITIVE])?;
    Ok(())
}

#[test]
fn axes_are_in_c_order() -> Result<(), BoxError> {
    let bytes: Vec<u8> = (0..24).collect();
    let mut loader = loader(&bytes, DType::U8, 12, 2)?.build()?;
    let batch = loader.epoch(0).next().expect("a batch")?;
    let cube = view::<u8>(&batch, DType::U8, &[3, 4])?;
    assert_eq!(cube.shape(), [2, 3, 4]);
    assert_eq!(cube[[1, 2, 3]], 23);
    assert_eq!(cube[[1, 0, 2]], 14);
    Ok(())
}

#[test]
fn records_of_one_number_have_no_axis() -> Result<(), BoxError> {
    let mut loader = loader(&[1, 2, 3], DType::U8, 1, 3)?.build()?;
    let batch = loader.epoch(0).next().expect("a batch")?;
    assert_eq!(view::<u8>(&batch, DType::U8, &[])?, array![1, 2, 3].into_dyn());
    Ok(())
}

#[test]
fn what_a_transform_made_is_changed_in_place() -> Result<(), BoxError> {
    let widen = Transform::new(DType::U8, 1)?;
    let mut loader = loader(&[0, 2, 4, 6], DType::U8, 2, 2)?.transform(widen).build()?;
    let mut batch = loader.epoch(0).next().expect("a batch")?;
    let mut rows = view_mut::<f32>(&mut batch, DType::F32, &[2])?.into_dimensionality::<Ix2>()?;
    rows -= &array![1.0, 2.0];
    assert_eq!(batch.cast::<f32>()?, [-1.0, 0.0, 3.0, 4.0]);
    Ok(())
}

#[test]
fn other_numbers_and_other_shapes_are_refused() -> Result<(), BoxError> {
    let mut loader = loader(&[0; 48], DType::U8, 12, 2)?.build()?;
    let mut batch = loader.epoch(3).nth(1).expect("a second batch")?;
    for shape in [&[11][..], &[13], &[24], &[2, 12], &[], &[12, 0], &[usize::MAX, 2]] {
        let wanted = (DType::U8, shape.to_vec());
        let error = ViewError::Record { epoch: 3, step: 1, wanted, found: 12 };
        assert_eq!(view::<u8>(&batch, DType::U8, shape).unwrap_err(), error);
        assert_eq!(view_mut::<u8>(&mut batch, DType::U8, shape).unwrap_err(), error);
    }
    assert_eq!(
        view::<f64>(&batch, DType::F64, &[1]).unwrap_err().to_string(),
        "epoch 3, step 1: wanted records of f64 in the shape [1], found 12 bytes a record"
    );
    // Of the right size, and still another type.
    let error = view::<f32>(&batch, DType::U8, &[3]).unwrap_err();
    assert_eq!(error, ViewError::DType { wanted: DType::F32, found: DType::U8 });
    assert_eq!(error.to_string(), "wanted a view of f32, found records of u8");
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
    let mut batch = loader.epoch(0).next().expect("a batch")?;
    assert_eq!(view::<f32>(&batch, DType::F32, &[3, 0])?.shape(), [2, 3, 0]);
    assert_eq!(view_mut::<f32>(&mut batch, DType::F32, &[3, 0])?.shape(), [2, 3, 0]);
    for shape in [&[0, usize::MAX, 2][..], &[usize::MAX, 0], &[0, isize::MAX.unsigned_abs()]] {
        let error = ViewError::Record { epoch: 0, step: 0, wanted: (DType::U8, shape.to_vec()), found: 0 };
        assert_eq!(view::<u8>(&batch, DType::U8, shape).unwrap_err(), error);
        assert_eq!(view_mut::<u8>(&mut batch, DType::U8, shape).unwrap_err(), error);
    }
    Ok(())
}
