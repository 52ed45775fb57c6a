//! Files as records: the format is recognized by the first bytes of a file.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Serialize;
use twinbuf::mmap::{Cut, DType, Error};
use twinbuf::{BoxError, Records};

/// A file's format, recognized by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Format {
    Npy,
    /// A zip archive: assumed to contain `.npy` files.
    Npz,
    Safetensors,
    /// Tokens after llm.c's header.
    LlmC,
    /// None of these: plain bytes.
    Raw,
}

impl Format {
    /// The format of a file.
    pub(crate) fn of(path: &Path) -> Result<Self, BoxError> {
        // Refuses an empty file, or a path that is not a file, with its error message; a FIFO would block `File::open`.
        Records::open([path], 1)?;
        let failed = |error| format!("{}: {error}", path.display());
        let mut start = Vec::new();
        File::open(path).map_err(failed)?.take(9).read_to_end(&mut start).map_err(failed)?;
        Ok(Self::of_start(&start))
    }

    /// The format of a file with these first nine bytes, or all bytes of a shorter file.
    fn of_start(start: &[u8]) -> Self {
        // These are the magic numbers of `Records::open_llm_c`.
        const LLM_C: [i32; 2] = [20_240_520, 20_240_801];
        /// The longest header that the format allows.
        const LONGEST: u64 = 100_000_000;
        if start.starts_with(b"\x93NUMPY") {
            return Self::Npy;
        }
        if start.starts_with(b"PK\x03\x04") {
            return Self::Npz;
        }
        if let Some((magic, _)) = start.split_first_chunk() {
            if LLM_C.contains(&i32::from_le_bytes(*magic)) {
                return Self::LlmC;
            }
        }
        match start.split_first_chunk() {
            // The length of a header, followed by its opening brace.
            Some((header, b"{")) if u64::from_le_bytes(*header) <= LONGEST => Self::Safetensors,
            _ => Self::Raw,
        }
    }

    /// The name for the format's parts, if they have names.
    pub(crate) fn parts(self) -> Option<&'static str> {
        match self {
            Self::Npz => Some("array"),
            Self::Safetensors => Some("tensor"),
            Self::Npy | Self::LlmC | Self::Raw => None,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Npy => "npy (an array by numpy)",
            Self::Npz => "npz (a zip archive of arrays by numpy)",
            Self::Safetensors => "safetensors",
            Self::LlmC => "tokens with llm.c's header",
            Self::Raw => "raw",
        }
    }
}

/// How files are cut into records.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Shape {
    /// Bytes of a record: reads the files as plain bytes
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "dtype")]
    pub(crate) record_bytes: Option<u64>,
    /// Type of the elements, e.g. u16; without --sequence one is a record. For files without a header
    #[arg(long, value_parser = dtype)]
    pub(crate) dtype: Option<DType>,
    /// Tokens of a sequence: a record has T inputs and the target of the last one; one record starts every T tokens
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "record_bytes")]
    pub(crate) sequence: Option<u64>,
}

impl Shape {
    pub(crate) fn cut(&self) -> Result<Cut, BoxError> {
        let Some(tokens) = self.sequence else { return Ok(Cut::Rows) };
        let tokens = usize::try_from(tokens).map_err(|_| format!("--sequence: {tokens} are too many"))?;
        Ok(Cut::sequence(tokens))
    }

    /// The call that opens the files in a program.
    pub(crate) fn call(&self, paths: &[PathBuf], format: Format, tensor: &str) -> String {
        // As a list of string literals.
        let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        let paths = format!("{paths:?}");
        let cut = match self.sequence {
            Some(tokens) => format!("Cut::sequence({tokens})"),
            None => "Cut::Rows".to_string(),
        };
        match (format, self.dtype) {
            (Format::Npy, _) => format!("Records::open_npy({paths}, {cut})?"),
            (Format::LlmC, _) => format!("Records::open_llm_c({paths}, {cut})?"),
            (Format::Npz, _) => format!("Records::open_npz({paths}, {tensor:?}, {cut})?"),
            (Format::Safetensors, _) => format!("Records::open_safetensors({paths}, {tensor:?}, {cut})?"),
            (Format::Raw, Some(dtype)) => {
                format!("Records::open_headerless({paths}, DType::{dtype:?}, {cut})?")
            }
            (Format::Raw, None) => {
                let bytes = self.record_bytes.unwrap_or(1);
                format!("Records::options().partial(true).open({paths}, {bytes})?")
            }
        }
    }

    /// The format to read a file as.
    pub(crate) fn format(&self, path: &Path) -> Result<Format, BoxError> {
        if self.record_bytes.is_some() || self.dtype.is_some() { Ok(Format::Raw) } else { Format::of(path) }
    }

    /// Opens files of one format. If the format has parts, opens the part with that name.
    pub(crate) fn open(&self, paths: &[PathBuf], format: Format, tensor: &str) -> Result<Records, BoxError> {
        let cut = self.cut()?;
        let options = Records::options();
        Ok(match (format, self.record_bytes, self.dtype) {
            (Format::Npy, ..) => options.open_npy(paths, cut)?,
            (Format::LlmC, ..) => options.open_llm_c(paths, cut)?,
            (Format::Npz, ..) => options.open_npz(paths, tensor, cut)?,
            (Format::Safetensors, ..) => options.open_safetensors(paths, tensor, cut)?,
            (Format::Raw, _, Some(dtype)) => {
                options.open_headerless(paths, dtype, cut).map_err(without_dtype)?
            }
            (Format::Raw, _, None) if self.sequence.is_some() => {
                let path = paths.first().map(|path| path.display().to_string()).unwrap_or_default();
                return Err(format!("{path}: --sequence: wanted --dtype too, as it has no header").into());
            }
            (Format::Raw, bytes, None) => {
                let bytes = bytes.unwrap_or(1);
                let bytes =
                    usize::try_from(bytes).map_err(|_| format!("--record-bytes: {bytes} are too many"))?;
                options.partial(true).open(paths, bytes)?
            }
        })
    }
}

/// The error of a file with a header that needs no `--dtype`: the library names a call that opens it.
fn without_dtype(error: Error) -> BoxError {
    match error {
        Error::Format { path, problem: "another format", wanted, found, .. }
            if Format::of(&path).is_ok_and(|format| format != Format::Raw) =>
        {
            format!("{}: --dtype: wanted {wanted}, found {found}: leave it out", path.display()).into()
        }
        error => error.into(),
    }
}

/// A named part of a file, and its records or the reason why there are none.
pub(crate) type Part = (String, Result<Records, Error>);

/// The arrays or tensors of a file, sorted by name. Each is opened when the iterator reaches it. The file's header is
/// checked first.
pub(crate) fn parts(
    path: &Path,
    format: Format,
    cut: Cut,
) -> Result<Box<dyn Iterator<Item = Part> + '_>, BoxError> {
    Ok(match format {
        Format::Npz => Box::new(Records::open_npz_each(path, cut)?),
        Format::Safetensors => Box::new(Records::open_safetensors_each(path, cut)?),
        Format::Npy | Format::LlmC | Format::Raw => Box::new(std::iter::empty()),
    })
}

/// Whether the kernel tells this process what is cached of a file (`can_do_mincore` in its `mm/mincore.c`). It tells
/// other processes that everything is cached.
#[cfg(unix)]
pub(crate) fn tells(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let owner = |path: &Path| fs::metadata(path).ok().map(|found| found.uid());
    // A process's folder in `/proc` belongs to its effective user. Opening changes nothing in the file.
    owner(path).is_some() && owner(path) == owner(Path::new("/proc/self"))
        || fs::OpenOptions::new().append(true).open(path).is_ok()
}

#[cfg(not(unix))]
pub(crate) fn tells(_: &Path) -> bool {
    true
}

/// The type with this printed name.
fn dtype(name: &str) -> Result<DType, String> {
    use DType::{Bf16, Bool, C64, C128, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    let all = [Bool, U8, I8, U16, I16, F16, Bf16, U32, I32, F32, U64, I64, F64, C64, C128];
    all.into_iter().find(|dtype| dtype.to_string() == name).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(ToString::to_string).collect();
        format!("wanted one of {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_has_the_options_that_it_needs() {
        let call = |format, record_bytes| {
            let shape = Shape { record_bytes, dtype: None, sequence: None };
            shape.call(&["a".into()], format, "x")
        };
        assert_eq!(call(Format::Npy, None), r#"Records::open_npy(["a"], Cut::Rows)?"#);
        assert_eq!(call(Format::Npz, None), r#"Records::open_npz(["a"], "x", Cut::Rows)?"#);
        assert_eq!(call(Format::Raw, Some(8)), r#"Records::options().partial(true).open(["a"], 8)?"#);
    }

    #[test]
    fn formats_by_their_beginning() {
        let header = |length: u64, next: &[u8]| [&length.to_le_bytes()[..], next].concat();
        for (start, expected) in [
            (b"\x93NUMPY\x01\x00\x76".to_vec(), Format::Npy),
            (b"\x93NUMP".to_vec(), Format::Raw),
            (b"PK\x03\x04\x2d\0\0\0\0".to_vec(), Format::Npz),
            (b"PK\x03".to_vec(), Format::Raw),
            (20_240_520_i32.to_le_bytes().to_vec(), Format::LlmC),
            ([&20_240_801_i32.to_le_bytes()[..], &[7, 0, 0, 0, 1]].concat(), Format::LlmC),
            // llm.c's evaluation files have records of many lengths.
            (20_240_522_i32.to_le_bytes().to_vec(), Format::Raw),
            (header(2, b"{"), Format::Safetensors),
            (header(100_000_001, b"{"), Format::Raw),
            (header(u64::MAX, b"{"), Format::Raw),
            (header(2, b"["), Format::Raw),
            (header(2, b""), Format::Raw),
            (vec![], Format::Raw),
        ] {
            assert_eq!(Format::of_start(&start), expected, "{start:?}");
        }
    }
}
