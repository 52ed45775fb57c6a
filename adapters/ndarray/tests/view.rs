//! Batches as arrays: in place, of the right numbers and shape.

use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use ndarray::{Ix2, array};
use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::{Cut, DType};
use twinbuf::transform::{Transform, per_record};
use twinbuf::{Batch, BoxError, LastBatch, Loader, Plan, Records};
use twinbuf_ndarray::{ViewError, field_view, view, view_mut};

fn open(bytes: &[u8], dtype: DType, columns: usize) -> Result<Arc<Records>, BoxError> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("numbers.bin");
    std::fs::write(&path, bytes)?;
    // Rows without overlap; the file stays open when its name is gone.
    let cut = Cut::Windows { rows: columns, stride: columns };
    Ok(Arc::new(Records::open_headerless([&path], dtype, cut)?))
}

/// A loader of `bytes` as rows of `columns` numbers, `batch` rows a batch, the rest as a smaller one.
fn loader(bytes: &[u8], dtype: DType, columns: usize, batch: u64) -> Result<LoaderBuilder, BoxError> {
    let data = open(bytes, dtype, columns)?;
    let plan = Plan::builder(data.len()).batch(batch).last_batch(LastBatch::Keep).build()?;
    Ok(Loader::builder(data, plan))
}

fn first(loader: LoaderBuilder) -> Result<Batch, BoxError> {
    Ok(loader.build()?.epoch(0).next().ok_or("a batch")??)
}

/// Three rows of two of these numbers, two rows a batch.
fn in_place<T>(dtype: DType, numbers: [T; 6]) -> Result<(), BoxError>
where
    T: AnyBitPattern + NoUninit + PartialEq + std::fmt::Debug,
{
    let mut loader = loader(bytemuck::cast_slice(&numbers), dtype, 2, 2)?.build()?;
    let mut epoch = loader.epoch(0);
    for wanted in [&numbers[..4], &numbers[4..]] {
        let batch = epoch.next().expect("a batch")?;
        let found = view::<T>(&batch)?;
        assert_eq!(found.shape(), [wanted.len() / 2, 2], "{dtype}");
        assert_eq!(found.as_slice(), Some(wanted), "{dtype}");
        assert_eq!(found.as_ptr().cast::<u8>(), batch.as_ptr(), "copied");
    }
    Ok(())
}

#[test]
fn every_number_in_place() -> Result<(), BoxError> {
    in_place(DType::U8, [0_u8, 1, 2, 3, 4, 255])?;
    in_place(DType::I8, [0_i8, 1, -2, 3, 4, -128])?;
    in_place(DType::U16, [0_u16, 1, 2, 3, 4, u16::MAX])?;
    in_place(DType::I16, [0_i16, 1, 2, 3, 4, i16::MIN])?;
    in_place(DType::U32, [0_u32, 1, 2, 3, 4, u32::MAX])?;
    in_place(DType::I32, [0_i32, 1, 2, 3, 4, i32::MIN])?;
    in_place(DType::U64, [0_u64, 1, 2, 3, 4, u64::MAX])?;
    in_place(DType::I64, [0_i64, 1, 2, 3, 4, i64::MIN])?;
    in_place(DType::F32, [0.0_f32, 0.5, 1.5, -2.0, f32::MAX, f32::MIN_POSITIVE])?;
    in_place(DType::F64, [0.0_f64, 0.5, 1.5, -2.0, f64::MAX, f64::MIN_POSITIVE])?;
    Ok(())
}

#[test]
fn axes_are_those_of_a_record_in_c_order() -> Result<(), BoxError> {
    let cube = |record: &[u8], out: &mut [u8], _| {
        out.copy_from_slice(record);
        Ok(())
    };
    let bytes: Vec<u8> = (0..24).collect();
    let cubes = per_record(12, cube).of(DType::U8, [3, 4]);
    let batch = first(loader(&bytes, DType::U8, 12, 2)?.transform(cubes))?;
    let cube = view::<u8>(&batch)?;
    assert_eq!(cube.shape(), [2, 3, 4]);
    assert_eq!((cube[[1, 2, 3]], cube[[1, 0, 2]]), (23, 14));
    Ok(())
}

#[test]
fn records_of_one_number_have_one_element() -> Result<(), BoxError> {
    let data = Records::open_headerless([&file(&[1, 2, 3])?.1], DType::U8, Cut::Rows)?;
    let plan = Plan::builder(3).batch(3).build()?;
    assert_eq!(view::<u8>(&first(Loader::builder(data, plan))?)?, array![1, 2, 3].into_dyn());
    Ok(())
}

fn file(bytes: &[u8]) -> Result<(tempfile::TempDir, std::path::PathBuf), BoxError> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("numbers.bin");
    std::fs::write(&path, bytes)?;
    Ok((folder, path))
}

#[test]
fn what_a_transform_made_is_changed_in_place() -> Result<(), BoxError> {
    let widen = Transform::new(DType::U8, 1)?;
    let mut batch = first(loader(&[0, 2, 4, 6], DType::U8, 2, 2)?.transform(widen))?;
    let mut rows = view_mut::<f32>(&mut batch)?.into_dimensionality::<Ix2>()?;
    rows -= &array![1.0, 2.0];
    assert_eq!(batch.cast::<f32>()?, [-1.0, 0.0, 3.0, 4.0]);
    Ok(())
}

#[test]
fn fields_by_number() -> Result<(), BoxError> {
    let labels: Vec<u8> = [5_i64, -6].iter().flat_map(|label| label.to_le_bytes()).collect();
    let data = (open(&[1, 2, 3, 4, 5, 6], DType::U8, 3)?, open(&labels, DType::I64, 1)?);
    let batch = first(Loader::builder(data, Plan::builder(2).batch(2).build()?))?;
    assert_eq!(field_view::<u8>(&batch, 0)?, array![[1, 2, 3], [4, 5, 6]].into_dyn());
    assert_eq!(field_view::<i64>(&batch, 1)?, array![[5], [-6]].into_dyn());
    let refused = [
        (view::<u8>(&batch).map(drop), "epoch 0, step 0: field 0: wanted types for 2 fields, found 1"),
        (field_view::<f64>(&batch, 1).map(drop), "epoch 0, step 0: field 1: wanted i64 [1], found f64"),
        (field_view::<u8>(&batch, 2).map(drop), "epoch 0, step 0: field 2: wanted a field below 2, found 2"),
    ];
    for (found, wanted) in refused {
        let error = found.unwrap_err();
        assert!(matches!(error, ViewError::Batch(_)));
        assert_eq!(error.to_string(), wanted);
    }
    Ok(())
}

#[test]
fn values_that_are_not_elements_are_refused() -> Result<(), BoxError> {
    let mut batch = first(loader(&[0; 32], DType::F32, 4, 2)?)?;
    for error in [
        view::<[f32; 2]>(&batch).map(drop).unwrap_err(),
        view::<u8>(&batch).map(drop).unwrap_err(),
        view_mut::<[f32; 2]>(&mut batch).map(drop).unwrap_err(),
    ] {
        assert!(matches!(&error, ViewError::Shape { wanted, .. } if *wanted == [2, 4]), "{error}");
    }
    assert!(matches!(view::<f64>(&batch), Err(ViewError::Batch(_))));
    // Bytes without a type.
    let data = Records::open([&file(&[0; 32])?.1], 16)?;
    let batch = first(Loader::builder(data, Plan::builder(2).batch(2).build()?))?;
    assert_eq!(view::<f32>(&batch)?.shape(), [2, 4]);
    assert_eq!(view::<u8>(&batch)?.shape(), [2, 16]);
    Ok(())
}
