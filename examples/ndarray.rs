//! Batches as views of `ndarray`: in place, in the shape of the records.
//!
//! ```sh
//! cargo run --release --example ndarray
//! ```

use bytemuck::{AnyBitPattern, cast_slice};
use ndarray::{ArrayViewD, Axis};
use twinbuf::mmap::{Cut, DType};
use twinbuf::{Batch, BoxError, Loader, Plan, Records};

/// A field of a batch as `[records, shape of a record..]`. A type that the field does not have is an error.
fn view<T: AnyBitPattern>(batch: &Batch, field: usize) -> Result<ArrayViewD<'_, T>, BoxError> {
    let mut shape = vec![usize::try_from(batch.plan().len())?];
    shape.extend(batch.field_type(field)?.shape());
    let numbers = batch.field::<T>(field)?;
    // ndarray would show the front of a longer slice: bytes of numbers, for example.
    if numbers.len() != shape.iter().product::<usize>() {
        return Err(format!("wanted {shape:?}, found {} values", numbers.len()).into());
    }
    Ok(ArrayViewD::from_shape(shape, numbers)?)
}

pub(crate) fn main() -> Result<(), BoxError> {
    let folder = tempfile::tempdir()?;
    let (points, classes) = (folder.path().join("points.bin"), folder.path().join("classes.bin"));
    std::fs::write(&points, cast_slice(&[0.0_f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]))?;
    std::fs::write(&classes, cast_slice(&[7_i64, 8, 9, 10]))?;
    let points = Records::open_headerless([points], DType::F32, Cut::Windows { rows: 2, stride: 2 })?;
    let classes = Records::open_headerless([classes], DType::I64, Cut::Rows)?;
    let plan = Plan::builder(points.len()).batch(2).build()?;
    let mut loader = Loader::builder((points, classes), plan).build()?;
    for batch in loader.epoch(0) {
        let batch = batch?;
        let (points, classes) = (view::<f32>(&batch, 0)?, view::<i64>(&batch, 1)?);
        assert_eq!(points.as_ptr().cast(), batch.as_ptr(), "nothing is copied");
        assert_eq!((points.shape(), classes.shape()), (&[2, 2][..], &[2][..]));
        let step = u8::try_from(batch.step())?;
        assert_eq!(points[[1, 0]], f32::from(4 * step + 2));
        assert_eq!(classes[1], i64::from(2 * step + 8));
        println!("{classes}: {}", points.mean_axis(Axis(0)).ok_or("no points")?);
        assert!(view::<f64>(&batch, 0).is_err() && view::<u8>(&batch, 0).is_err(), "another type");
    }
    Ok(())
}
