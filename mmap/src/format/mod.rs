//! File formats: where the records or tensors of a file are.

#[cfg(feature = "safetensors")]
mod gguf;
mod headerless;
mod llm_c;
mod megatron;
mod npy;
#[cfg(feature = "npz")]
mod npz;
mod ragged;
#[cfg(feature = "safetensors")]
mod safetensors;
#[cfg(feature = "safetensors")]
mod tensor;
#[cfg(feature = "safetensors")]
mod tensors;

use std::fmt::Display;
use std::path::Path;

pub use ragged::RaggedRecords;
#[cfg(feature = "safetensors")]
pub use tensor::{ByteRange, Tensor};
#[cfg(feature = "safetensors")]
pub use tensors::Tensors;

use crate::file::{DataFile, little};
use crate::ranges::{Kind, Layout, Places, Ranges};
use crate::{DType, Error, Options, Records};

/// The longest header of a model's file and the longest index, in bytes: safetensors' own rule (`MAX_HEADER_SIZE` in
/// that crate's `src/tensor.rs`).
#[cfg(feature = "safetensors")]
const LONGEST: u64 = 100_000_000;

/// How an array is cut into records.
///
/// A *row* is one entry along the array's first axis: one token of a token file, or one image of an array of images.
///
/// ```
/// use twinbuf_mmap::{Cut, DType, Plan, Records};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("train.bin");
/// std::fs::write(&path, (0..12_u16).flat_map(u16::to_le_bytes).collect::<Vec<u8>>())?;
///
/// // Inputs and targets of four tokens: the target of a window's last input is its fifth token.
/// let records = Records::open_headerless([&path], DType::U16, Cut::sequence(4))?;
/// assert_eq!((records.len(), records.shape()), (2, &[5][..]));
///
/// let batch = Plan::builder(records.len()).batch(2).build()?.batch(0, 0).unwrap();
/// let mut tokens = vec![0_u16; 10];
/// records.read(&batch, bytemuck::cast_slice_mut(&mut tokens))?;
/// assert_eq!(tokens, [0, 1, 2, 3, 4, /* and */ 4, 5, 6, 7, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cut {
    /// Each row is one record.
    #[default]
    Rows,
    /// Each record is a window of consecutive rows. The last rows of a file that do not fill a window are skipped. A
    /// window never spans two files.
    Windows {
        /// The number of rows in a window, at least 1.
        rows: usize,
        /// The number of rows from the start of a window to the start of the next, at least 1. Windows overlap if
        /// `stride` is less than `rows`. Rows are skipped if `stride` is greater than `rows`.
        stride: usize,
    },
}

impl Cut {
    /// Returns windows of `tokens + 1` tokens with a stride of `tokens`, for next-token prediction. Adjacent windows
    /// share one token: each token of a file except the first is a target exactly once, up to the end of the last
    /// whole window.
    #[must_use]
    pub const fn sequence(tokens: usize) -> Self {
        Self::Windows { rows: tokens.saturating_add(1), stride: tokens }
    }
}

/// An array in C order in a file.
struct Array {
    /// The offset of its first byte.
    offset: u64,
    dtype: DType,
    shape: Vec<u64>,
}

/// Opens files of one format. `parse` reads the header of each.
fn open(
    options: Options,
    paths: impl IntoIterator<Item: AsRef<Path>>,
    cut: Cut,
    parse: impl Fn(&DataFile) -> Result<Array, Error>,
) -> Result<Records, Error> {
    match cut {
        Cut::Windows { rows: 0, .. } => return Err(Error::ZeroRecord),
        Cut::Windows { stride: 0, .. } => return Err(Error::ZeroStride),
        _ => {}
    }
    let ranges = Ranges::assemble(paths, options.skip_short, |file| layout(file, &parse(file)?, cut))?;
    Ok(Records { ranges })
}

/// Bytes in an array, or `None` if there are 2^64 or more.
fn data_bytes(dtype: DType, shape: &[u64]) -> Option<u64> {
    // An array with a dimension of 0 is empty, even if the product of the others overflows.
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(dtype.size() as u64, |bytes, &axis| bytes.checked_mul(axis))
}

/// Returns the array if it ends at byte `end` of the file.
fn checked(file: &DataFile, end: u64, array: Array) -> Result<Array, Error> {
    match data_bytes(array.dtype, &array.shape) {
        Some(wanted) => file.check_data(array.offset, wanted, end).map(|()| array),
        None => Err(file.bad_shape("fewer than 2^64 bytes", &array.shape)),
    }
}

/// Returns the layout of an array's records. The caller has checked that the array is within the file.
fn layout(file: &DataFile, array: &Array, cut: Cut) -> Result<Layout, Error> {
    let Some((&rows, row)) = array.shape.split_first() else {
        return Err(file.bad_shape("at least one axis", &array.shape));
    };
    let row_bytes = match data_bytes(array.dtype, row) {
        Some(0) => return Err(file.bad_shape("no empty rows", &array.shape)),
        Some(bytes) => bytes,
        None => return Err(file.bad_shape("fewer than 2^64 bytes", &array.shape)),
    };
    let (window, stride, axis) = match cut {
        Cut::Rows => (1, 1, None),
        Cut::Windows { rows, stride } => (rows as u64, stride as u64, Some(rows)),
    };
    // The products may saturate. A window of 2^64 bytes or more fits no file. The stride is used only if there is a
    // second window; if there is one, the stride fits the file and has not saturated.
    let bytes = row_bytes.saturating_mul(window);
    let stride_bytes = row_bytes.saturating_mul(stride);
    let Some(spare) = rows.checked_sub(window) else {
        // The rows are within the file, so this product is at most its length.
        return Err(Error::TooShort { path: file.path.clone(), wanted: bytes, found: rows * row_bytes });
    };
    let row = row.iter().map(|&axis| usize::try_from(axis));
    let shape: Result<Vec<usize>, _> = axis.map(Ok).into_iter().chain(row).collect();
    let (Ok(bytes), Ok(shape)) = (usize::try_from(bytes), shape) else {
        return Err(Error::TooLarge { path: file.path.clone() });
    };
    Ok(Layout {
        kind: Kind { dtype: array.dtype, typed: true, shape, bytes, stride: stride_bytes },
        at: Places::Strided(array.offset),
        records: spare / stride + 1,
    })
}

/// Errors about a file's header, with the file's path.
impl DataFile {
    fn bad_magic(&self, offset: u64, wanted: &str, found: String) -> Error {
        self.bad("another format, by the magic", Some(offset), wanted, found, "")
    }

    fn bad_version(&self, offset: u64, wanted: impl Display, found: impl Display) -> Error {
        self.bad("unknown version", Some(offset), wanted, found, "")
    }

    fn bad_header(&self, offset: u64, wanted: &str, found: impl AsRef<[u8]>) -> Error {
        self.bad("bad header", Some(offset), wanted, excerpt(found.as_ref()), "")
    }

    /// Fails if `wanted` bytes of data from `offset` on do not end at `end`.
    fn check_data(&self, offset: u64, wanted: u64, end: u64) -> Result<(), Error> {
        if offset.checked_add(wanted) == Some(end) {
            return Ok(());
        }
        let problem = "cut off or grown, by the length of the data";
        let (wanted, found) = (format!("{wanted} bytes"), end.saturating_sub(offset));
        Err(self.bad(problem, Some(offset), wanted, found, ""))
    }

    fn bad_shape(&self, wanted: &str, found: &[u64]) -> Error {
        self.bad("no records in this shape", None, wanted, format!("{found:?}"), "")
    }

    fn unsupported(&self, offset: u64, found: String, advice: &'static str) -> Error {
        self.bad("unsupported type", Some(offset), "", found, advice)
    }

    /// Returns the length `found`, which the header has at `offset`, if it is at most `wanted`.
    fn header_len(&self, offset: u64, wanted: u64, found: u64) -> Result<usize, Error> {
        let fits = usize::try_from(found).ok().filter(|_| found <= wanted);
        let problem = "too long a header, by the length";
        let wanted = || format!("at most {wanted} bytes");
        fits.ok_or_else(|| self.bad(problem, Some(offset), wanted(), found, ""))
    }
}

/// Text from a file for a message of one line: escaped except for quotes, and cut after 100 characters.
fn excerpt(text: &[u8]) -> String {
    const MOST: usize = 100;
    // A character has at most four bytes, so the cut text still has `MOST` characters.
    let text = String::from_utf8_lossy(&text[..text.len().min(4 * MOST)]);
    let mut line = String::new();
    for c in text.chars().take(MOST) {
        match c {
            '\'' | '"' => line.push(c),
            c => line.extend(c.escape_debug()),
        }
    }
    line
}

/// Calls `use_one` for `count` numbers of `N` bytes from `offset` on, each with its offset. The caller has checked that
/// the file is long enough.
pub(super) fn numbers<const N: usize>(
    file: &DataFile,
    offset: u64,
    count: u64,
    mut use_one: impl FnMut(u64, [u8; N]) -> Result<(), Error>,
) -> Result<(), Error> {
    let end = offset + count * N as u64;
    let mut part = vec![0; (64 << 10) / N * N];
    let mut at = offset;
    while at < end {
        let len = usize::try_from(end - at).map_or(part.len(), |left| left.min(part.len()));
        file.read_exact(&mut part[..len], at)?;
        for number in part[..len].chunks_exact(N) {
            let mut bytes = [0; N];
            bytes.copy_from_slice(number);
            use_one(at, bytes)?;
            at += N as u64;
        }
    }
    Ok(())
}
