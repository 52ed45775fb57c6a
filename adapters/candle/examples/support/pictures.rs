//! The pictures that `train` and `train_cuda` train on, as rows of pixels and a label.

use std::path::Path;

use candle_core::{D, DType, Tensor};
use twinbuf::BoxError;

const RECORDS: u64 = 4096;
pub(crate) const PIXELS: usize = 64;
pub(crate) const CLASSES: usize = 4;

pub(crate) const EPOCHS: u64 = 4;

/// Trains on new pictures. `train` returns the mean loss of each epoch, which must fall to half.
pub(crate) fn learn(train: impl FnOnce(&Path) -> Result<Vec<f32>, BoxError>) -> Result<(), BoxError> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("pictures.npy");
    write(&path)?;
    let losses = train(&path)?;
    for (epoch, loss) in losses.iter().enumerate() {
        println!("epoch {epoch}: loss {loss:.4}");
    }
    if losses[losses.len() - 1] > losses[0] / 2.0 {
        return Err(format!("wanted a loss that falls to half, found {losses:?}").into());
    }
    Ok(())
}

/// Scale and shift of each column: pixels to -1..1, the label as it is.
pub(crate) fn normalise() -> ([f32; PIXELS + 1], [f32; PIXELS + 1]) {
    let (mut scale, mut shift) = ([1.0 / 127.5; PIXELS + 1], [-1.0; PIXELS + 1]);
    (scale[PIXELS], shift[PIXELS]) = (1.0, 0.0);
    (scale, shift)
}

/// The pixels and the labels of a batch of rows.
pub(crate) fn split(rows: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
    let pixels = rows.narrow(D::Minus1, 0, PIXELS)?.contiguous()?;
    let labels = rows.narrow(D::Minus1, PIXELS, 1)?.squeeze(D::Minus1)?.to_dtype(DType::U32)?;
    Ok((pixels, labels))
}

/// Pictures of noise, brighter in the quarter that is their class; and the class.
fn write(path: &Path) -> std::io::Result<()> {
    let mut header =
        format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({RECORDS}, {}), }}", PIXELS + 1);
    // NumPy's format 1.0: ten bytes before the header. The header ends in a newline at a multiple of 64.
    header.extend(std::iter::repeat_n(' ', 63 - (10 + header.len()) % 64));
    header.push('\n');
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());

    let mut state = 1_u32;
    for record in 0..RECORDS {
        let class = record as usize % CLASSES;
        for pixel in 0..PIXELS {
            // xorshift32 (Marsaglia 2003).
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            let brighter = if pixel / (PIXELS / CLASSES) == class { 55 } else { 0 };
            file.push((state % 200) as u8 + brighter);
        }
        file.push(class as u8);
    }
    std::fs::write(path, file)
}
