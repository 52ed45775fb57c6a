//! Pictures of any length, decoded by two threads while the last batch is in use.
//!
//! `cargo run --release --example decode -- [FOLDER]` writes the pictures to the folder: one file of JPEGs, their
//! offsets, and labels.

use std::path::Path;

use jpeg_encoder::{ColorType, Encoder};
use twinbuf::mmap::{Cut, DType, RaggedRecords};
use twinbuf::transform::per_record;
use twinbuf::{BoxError, Loader, Plan, Records, Shuffle};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;

const PICTURES: u32 = 160;
const SIDE: usize = 96;

fn main() -> Result<(), BoxError> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "target/pictures".into());
    let [pictures, index, labels] =
        ["pictures.bin", "pictures.idx.npy", "labels.bin"].map(|name| Path::new(&folder).join(name));
    std::fs::create_dir_all(&folder)?;
    write(&pictures, &index, &labels)?;
    let labels = Records::open_headerless([labels], DType::U32, Cut::Rows)?;
    let pictures = RaggedRecords::open_indexed([(pictures, index)])?;
    println!("{} pictures of {} bytes, the longest {}", pictures.len(), pictures.bytes(), pictures.max_len());
    let plan = Plan::builder(pictures.len()).batch(32).shuffle(Shuffle::Full).seed(1).build()?;
    let decode = per_record(SIDE * SIDE * 3, |jpeg, out, _| {
        let mut decoder = JpegDecoder::new(ZCursor::new(jpeg));
        let pixels = decoder.decode()?;
        let (width, height) = decoder.dimensions().ok_or("no size")?;
        // The middle of the picture.
        let (left, top) = ((width - SIDE) / 2, (height - SIDE) / 2);
        let rows = pixels.chunks_exact(width * 3).skip(top);
        for (out, row) in out.chunks_exact_mut(SIDE * 3).zip(rows) {
            out.copy_from_slice(&row[left * 3..][..SIDE * 3]);
        }
        Ok(())
    });
    let builder = Loader::builder((pictures, labels), plan).workers(2).transform(decode);
    let mut loader = builder.from_env()?.build()?;
    let mut sum = 0_u64;
    for batch in loader.epochs(0..2) {
        let batch = batch?;
        let (pixels, labels) = batch.fields::<(u8, u32)>()?; // train on them
        let each = pixels.chunks_exact(pixels.len() / labels.len()).zip(labels);
        sum += each.map(|(pixels, label)| u64::from(pixels[0]) * u64::from(*label)).sum::<u64>();
    }
    println!("{sum}\n{}", loader.report());
    Ok(loader.close()?)
}

/// Writes pictures of many sizes one after the other, the places where they begin as `numpy.save` does, and labels.
fn write(pictures: &Path, index: &Path, labels: &Path) -> Result<(), BoxError> {
    let (mut bytes, mut offsets) = (Vec::new(), vec![0]);
    for i in 0..PICTURES {
        let (width, height) = (96 + i * 37 % 96, 96 + i * 53 % 96);
        let places = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
        let pixels: Vec<u8> =
            places.flat_map(|(x, y)| [x * i, y * 3 + i, (x ^ y) * 5].map(|n| n.to_le_bytes()[0])).collect();
        Encoder::new(&mut bytes, 75).encode(
            &pixels,
            u16::try_from(width)?,
            u16::try_from(height)?,
            ColorType::Rgb,
        )?;
        offsets.push(bytes.len() as u64);
    }
    let shape = format!("{{'descr': '<u8', 'fortran_order': False, 'shape': ({},), }}", offsets.len());
    let header = [b"\x93NUMPY\x01\0v\0", format!("{shape:117}\n").as_bytes()].concat();
    let numbers: Vec<u8> = offsets.into_iter().flat_map(u64::to_le_bytes).collect();
    std::fs::write(pictures, bytes)?;
    std::fs::write(index, [header, numbers].concat())?;
    Ok(std::fs::write(labels, (0..PICTURES).flat_map(u32::to_le_bytes).collect::<Vec<u8>>())?)
}
