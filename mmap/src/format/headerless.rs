//! Files of numbers without a header, as `numpy.ndarray.tofile` and nanoGPT write them; and how to recognize other
//! formats that could be mistaken for them.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Array, little, open};
use crate::file::DataFile;
use crate::records::count;
use crate::{Cut, DType, Error, Options, Records};

impl Records {
    /// Opens files that contain only elements of type `dtype`, without a header: for example nanoGPT's `train.bin`
    /// (`DType::U16`, see `data/openwebtext/prepare.py`), or 32-bit token IDs (`DType::U32`). `cut` sets how
    /// elements become records; a row is one element.
    ///
    /// The call checks the size of the files, and refuses those that start like a format it knows, because their
    /// headers would be read as elements: most formats that this crate opens, and common ones of archives and
    /// compressed files, tables and databases (such as HDF5, Parquet and Arrow), pickles, pictures, sound, documents,
    /// programs, and, unless the elements have one byte, JSON lines and other text that hardly could be numbers.
    /// [`Options::header`] skips a header: then only files of gzip, bzip2, xz, zstd and LZ4 are refused.
    ///
    /// # Errors
    ///
    /// - [`Error::Ragged`]: a file ends inside an element.
    /// - [`Error::TooShort`]: a file contains less than one record (see [`Options::skip_short`]).
    /// - [`Error::ZeroRecord`], [`Error::ZeroStride`]: the window or the stride is 0.
    /// - [`Error::Format`]: a file has another format, or is shorter than its [`header`](Options::header).
    /// - The remaining errors of [`Options::open`](crate::Options::open); [`Error::Read`], [`Error::Truncated`]: the
    ///   first bytes of a file cannot be read.
    ///
    /// See [`Cut`] for an example.
    pub fn open_headerless(
        paths: impl IntoIterator<Item: AsRef<Path>>,
        dtype: DType,
        cut: Cut,
    ) -> Result<Self, Error> {
        Self::options().open_headerless(paths, dtype, cut)
    }
}

impl Options {
    /// Opens files as [`Records::open_headerless`] does, with these options.
    ///
    /// # Errors
    ///
    /// The errors of [`Records::open_headerless`].
    pub fn open_headerless(
        self,
        paths: impl IntoIterator<Item: AsRef<Path>>,
        dtype: DType,
        cut: Cut,
    ) -> Result<Records, Error> {
        let Self { header, .. } = self;
        open(self, paths, cut, |file| {
            refuse(file, dtype, header)?;
            let elements = count(file, header, dtype.size() as u64, false)?;
            Ok(Array { offset: header, dtype, shape: vec![elements] })
        })
    }
}

/// Bytes at the start of a file that are checked: enough to include tar's magic, and to tell text from numbers.
const FRONT: usize = 512;

/// If elements have fewer different high bytes than this, text could also be numbers.
const TEXT: usize = 8;

const DECOMPRESS: &str = "decompress it first";
const UNPACK: &str = "unpack it first";
const DECODE: &str = "decode it first, and save the arrays as .npy";
const PARSE: &str = "parse it first, and save the arrays with `numpy.save(path, x)`";
const COLUMNS: &str = "save its columns as .npy: `numpy.save(path, table[name].to_numpy())`";
const TABLE: &str =
    "save its columns as .npy: `numpy.save(path, pyarrow.parquet.read_table(file)[name].to_numpy())`";
const MEMBERS: &str = "open an array of it with `Records::open_npz`, or save its arrays as .npy: `for name, x in \
    numpy.load(path).items(): numpy.save(name, x)`";
const NOTHING: &str = "it has no records";
const TOKENIZE: &str = "tokenize it first, or open it with the type U8 if its bytes are tokens or no text";

/// Known formats: the offset and the bytes of the magic, the name of the format, and what to do
/// with such a file. A short magic could also be tokens, so its entry includes more of the header.
const MAGICS: [(usize, &[u8], &str, &str); 34] = [
    (0, b"\x93NUMPY", "numpy's .npy", "open it with `Records::open_npy`"),
    // `HEADERS_INFO` in llm.c's `dev/data/data_common.py`: magic and version.
    (0, b"\x88\xd8\x34\x01\x01\0\0\0", "llm.c's tokens", "open it with `Records::open_llm_c`"),
    (0, b"\xa1\xd9\x34\x01\x07\0\0\0", "llm.c's tokens", "open it with `Records::open_llm_c`"),
    (0, b"\x8a\xd8\x34\x01", "llm.c's evaluation data", "its records have many lengths and cannot be opened"),
    (0, b"GGUF\x01\0\0\0", "GGUF", "open it with `Tensors::open`"),
    (0, b"GGUF\x02\0\0\0", "GGUF", "open it with `Tensors::open`"),
    (0, b"GGUF\x03\0\0\0", "GGUF", "open it with `Tensors::open`"),
    (0, b"MMIDIDX\0\0", "Megatron-LM's index", "open its `.bin` with `RaggedRecords::open_megatron`"),
    (0, b"PK\x03\x04", "zip (.npz, .pt)", MEMBERS),
    (0, b"\x28\xb5\x2f\xfd", "zstd", DECOMPRESS),
    (0, b"\xfd7zXZ\0", "xz", DECOMPRESS),
    (4, b"1AY&SY", "bzip2", DECOMPRESS),
    (0, b"\x04\x22\x4d\x18", "LZ4", DECOMPRESS),
    (0, b"7z\xbc\xaf\x27\x1c", "7z", UNPACK),
    (257, b"ustar", "tar", UNPACK),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5", "save its sets as .npy: `numpy.save(path, h5py.File(file)[name][:])`"),
    (0, b"PAR1", "Parquet", TABLE),
    (0, b"ARROW1\0\0", "Arrow IPC", COLUMNS),
    // Pickles of protocol 4 and 5, if they start with a frame, which Python writes unless they are tiny. Of protocol 2,
    // only pickles of a dict and of a list, and those of torch.save; of protocol 3, only those of a dict.
    (0, b"\x80\x04\x95", "a Python pickle", PARSE),
    (0, b"\x80\x05\x95", "a Python pickle", PARSE),
    (0, b"\x80\x02}q\0", "a Python pickle", PARSE),
    (0, b"\x80\x02]q\0", "a Python pickle", PARSE),
    (0, b"\x80\x03}q\0", "a Python pickle", PARSE),
    (0, b"\x80\x02\x8a\nl\xfc\x9cF", "a Python pickle", PARSE),
    (0, b"SQLite format 3\0", "SQLite", PARSE),
    (16, b"\xde\xc0\xef\xbe", "LMDB", PARSE),
    (0, b"\x89PNG\r\n\x1a\n", "PNG", DECODE),
    (0, b"GIF8", "GIF", DECODE),
    (4, b"ftyp", "MP4", DECODE),
    (0, b"OggS\0", "Ogg", DECODE),
    (0, b"fLaC\0\0\0\x22", "FLAC", DECODE),
    (0, b"%PDF-", "PDF", NOTHING),
    (0, b"\x7fELF\x01\x01\x01", "ELF", NOTHING),
    (0, b"\x7fELF\x02\x01\x01", "ELF", NOTHING),
];

/// Recognizes formats that have no sufficient magic. `len` is the length of the file.
fn by_header(front: &[u8], len: u64) -> Option<(&'static str, &'static str)> {
    let bytes = |at: usize, count: usize| front.get(at..at.checked_add(count)?);
    let little = |at, count| bytes(at, count).map(little);
    let big = |at, count| Some(bytes(at, count)?.iter().fold(0_u64, |n, &byte| n << 8 | u64::from(byte)));
    let length = little(0, 8)?;
    if bytes(8, 2)? == b"{\"" && length <= len.saturating_sub(8) {
        return Some(("safetensors", "open it with `Records::open_safetensors`"));
    }
    // gzip (RFC 1952): method 8, reserved flags 0, a known operating system.
    if front.starts_with(b"\x1f\x8b\x08") && front[3] & 0xe0 == 0 && (front[9] <= 13 || front[9] == 255) {
        return Some(("gzip", DECOMPRESS));
    }
    // IDX, Yann LeCun's format for MNIST: two zero bytes, the type, the number of axes, and their lengths.
    if let [0, 0, kind @ (8 | 9 | 11..=14), axes @ 1..=4, ..] = *front {
        let size = [1, 1, 0, 2, 4, 4, 8][usize::from(kind - 8)];
        let axes = usize::from(axes);
        let data = (1..=axes).try_fold(size, |bytes: u64, axis| bytes.checked_mul(big(4 * axis, 4)?));
        let header = 4 + 4 * axes as u64;
        if data.and_then(|data| data.checked_add(header)) == Some(len) {
            const ADVICE: &str =
                "skip its header: `Options::header(8)` for labels, `header(16)` for pictures";
            return Some(("IDX (MNIST)", ADVICE));
        }
    }
    if front.starts_with(b"\xff\xd8\xff") && front[3] >= 0xc0 {
        return Some(("JPEG", DECODE));
    }
    // An Arrow stream begins with a mark, the schema's length in whole words, and the offset of its root table.
    let schema = little(4, 4)?;
    if little(0, 4)? == u64::from(u32::MAX)
        && schema % 8 == 0
        && (8..len).contains(&schema)
        && little(8, 4)? < 64
    {
        return Some(("Arrow IPC", COLUMNS));
    }
    if front.starts_with(b"RIFF") && matches!(bytes(8, 4)?, b"WEBP" | b"WAVE" | b"AVI ") {
        return Some(("RIFF (WebP, WAV, AVI)", DECODE));
    }
    // A TFRecord file begins with a record's length and its masked CRC-32C (TensorFlow's `record_writer.cc`).
    let crc = !front[..8].iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ (crc & 1).wrapping_mul(0x82f6_3b78))
    });
    let masked = crc.rotate_right(15).wrapping_add(0xa282_ead8);
    (length < len && little(8, 4)? == u64::from(masked)).then_some(("TFRecord", PARSE))
}

/// Recognizes text in UTF-8 without control characters other than tabs, line ends and form feeds. `size` is that of an
/// element.
///
/// Numbers of several bytes can have the bytes of text, too. In a narrow range, or in a few, they have few different high
/// bytes; but a table of digits alone is text. Pixels of 8 bits that were made wider have each byte twice.
fn by_text(front: &[u8], size: usize) -> Option<(&'static str, &'static str)> {
    let text = match std::str::from_utf8(front) {
        // `front` may end within a character: look at the text before it.
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&front[..error.valid_up_to()]).ok()?
        }
        text => text.ok()?,
    };
    let control = |c: char| c.is_control() && !matches!(c, '\t' | '\n' | '\r' | '\x0c');
    let apart = |c: char| c.is_whitespace() || matches!(c, ',' | '"');
    let high: BTreeSet<_> = text.bytes().skip(size - 1).step_by(size).collect();
    let has_words = text.contains(apart) && text.as_bytes().chunks(2).any(|two| two.first() != two.last());
    let in_table = |c: char| c.is_ascii_digit() || c.is_whitespace() || matches!(c, '+' | '-' | '.' | ',');
    let is_table = text.len() >= 8 * TEXT && text.chars().all(in_table);
    let found = (high.len() >= TEXT || is_table) && has_words && !text.contains(control);
    found.then_some((if text.starts_with(['{', '[']) { "JSON" } else { "text" }, TOKENIZE))
}

/// Fails if a file starts as a file of another format does. Text is allowed for elements of one byte, because it may be
/// meant. If the caller skips a header, it may be of any format: then only compression is refused.
fn refuse(file: &DataFile, dtype: DType, skipped: u64) -> Result<(), Error> {
    let front = file.header(0, usize::try_from(file.len).map_or(FRONT, |len| len.min(FRONT)))?;
    let magic =
        MAGICS.iter().find(|(at, magic, ..)| front.get(*at..).is_some_and(|from| from.starts_with(magic)));
    let found = magic.map(|&(_, _, name, advice)| (name, advice));
    let found = found.or_else(|| by_header(&front, file.len));
    let found = found.or_else(|| (dtype.size() > 1).then(|| by_text(&front, dtype.size()))?);
    let found = found.filter(|&(_, advice)| skipped == 0 || advice == DECOMPRESS);
    found.map_or(Ok(()), |(found, advice)| {
        Err(file.bad("another format", None, "numbers without a header", found, advice))
    })
}
