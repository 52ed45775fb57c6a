//! Transforms as callers use them: lengths and errors. The unit tests have the numbers.

use twinbuf_mmap::transform::{Transform, TransformError, f32_to_bf16, f32_to_f16, u16_to_i64, u16_to_u32};
use twinbuf_mmap::{DType, Error, Records};

fn rgb() -> Transform {
    Transform::new(DType::U8, 3).unwrap().normalise(&[0.25, 0.5, 2.0], &[1.0, -1.0, 0.0]).unwrap()
}

#[test]
fn what_cannot_be_is_refused_when_the_transform_is_made() {
    let new = Transform::new;
    assert_eq!(new(DType::U8, 0), Err(TransformError::NoChannels));
    for found in [DType::Bool, DType::I8, DType::U32, DType::F32, DType::F64, DType::C64] {
        assert_eq!(new(found, 1), Err(TransformError::Source { found }));
    }
    let three = || new(DType::U8, 3).unwrap();
    let count = |name, found| Err(TransformError::ChannelCount { name, wanted: 3, found });
    assert_eq!(three().normalise(&[1.0; 4], &[1.0; 3]), count("scale", 4));
    assert_eq!(three().normalise(&[1.0; 3], &[]), count("shift", 0));
    let found = f32::INFINITY;
    let refused = three().normalise(&[1.0, 1.0, 1.0 / 0.0], &[0.0; 3]);
    assert_eq!(refused, Err(TransformError::NotFinite { name: "scale", channel: 2, found }));
    let refused = three().normalise(&[1.0; 3], &[0.0, f32::NAN, 0.0]).unwrap_err();
    assert!(
        matches!(refused, TransformError::NotFinite { name: "shift", channel: 1, found } if found.is_nan())
    );
    assert_eq!(three().planar(0), Err(TransformError::NoPixels));
    for pixels in [usize::MAX, usize::MAX / 3, isize::MAX as usize / 12 + 1] {
        assert_eq!(three().planar(pixels), Err(TransformError::PictureTooLarge { channels: 3, pixels }));
    }
    assert!(three().planar(isize::MAX as usize / 12 - 1).is_ok());
    assert!(new(DType::U16, usize::MAX).unwrap().planar(1).is_err());
}

#[test]
fn lengths_are_counted_in_whole_pixels_and_pictures() {
    assert_eq!(rgb().out_len(0), Ok(0));
    assert_eq!(rgb().out_len(12), Ok(12));
    assert_eq!(rgb().out_len(13), Err(TransformError::SourceLength { wanted: 3, found: 13 }));
    let planar = rgb().planar(4).unwrap();
    assert_eq!(planar.out_len(24), Ok(24));
    assert_eq!(planar.out_len(15), Err(TransformError::SourceLength { wanted: 12, found: 15 }));
    let wide = Transform::new(DType::I16, 2).unwrap();
    assert_eq!((wide.dtype(), wide.channels()), (DType::I16, 2));
    assert_eq!(wide.out_len(8), Ok(4));
    assert_eq!(wide.out_len(6), Err(TransformError::SourceLength { wanted: 4, found: 6 }));
    let absurd = Transform::new(DType::F16, usize::MAX).unwrap();
    assert_eq!(absurd.out_len(0), Ok(0));
    assert!(matches!(absurd.out_len(8), Err(TransformError::SourceLength { found: 8, .. })));
}

#[test]
fn an_error_leaves_the_destination_alone() {
    let mut dst = [7.0; 5];
    assert_eq!(rgb().apply(&[1; 6], &mut dst), Err(TransformError::BufferTooSmall { wanted: 6, found: 5 }));
    assert_eq!(rgb().apply(&[1; 4], &mut dst), Err(TransformError::SourceLength { wanted: 3, found: 4 }));
    assert_eq!(dst, [7.0; 5]);

    assert_eq!(u16_to_u32(&[1; 3], &mut [0; 9]), Err(TransformError::SourceLength { wanted: 2, found: 3 }));
    assert_eq!(u16_to_i64(&[1; 4], &mut [0; 1]), Err(TransformError::BufferTooSmall { wanted: 2, found: 1 }));
    assert_eq!(f32_to_f16(&[1; 6], &mut [0; 9]), Err(TransformError::SourceLength { wanted: 4, found: 6 }));
    assert_eq!(f32_to_bf16(&[1; 4], &mut []), Err(TransformError::BufferTooSmall { wanted: 1, found: 0 }));
}

#[test]
fn a_message_is_one_line_that_names_wanted_and_found() {
    let error = rgb().apply(&[1; 4], &mut []).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the source is not whole: wanted a multiple of 3 bytes, found 4: check the number, the channels and the \
         pixels"
    );
    let error = rgb().normalise(&[], &[]).unwrap_err();
    assert_eq!(error.to_string(), "scale: wanted one value for each channel, 3, found 0");
    let error = Transform::new(DType::C128, 1).unwrap_err();
    assert_eq!(error.to_string(), "wanted u8, u16, i16, f16 or bf16 as source, found c128");
}

#[test]
fn what_is_shared_between_threads() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Transform>();
    shared::<TransformError>();
    shared::<Records>();
    shared::<Error>();
}
