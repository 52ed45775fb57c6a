//! Formats that files of bare numbers are mistaken for.

use crate::file::DataFile;
use crate::{Error, FormatError};

/// A format, how it begins, and what to do with such a file.
struct Known {
    name: &'static str,
    begins: fn(&Front<'_>) -> bool,
    advice: &'static str,
}

/// The beginning of a file.
struct Front<'a> {
    bytes: &'a [u8],
    /// Bytes in the whole file.
    len: u64,
}

impl Front<'_> {
    fn starts(&self, magic: &[u8]) -> bool {
        self.bytes.starts_with(magic)
    }

    /// A 32-bit number at `4 * index`.
    fn number(&self, index: usize) -> Option<i32> {
        let bytes = self.bytes.get(4 * index..4 * index + 4)?;
        Some(bytes.iter().rev().fold(0, |number, &byte| number << 8 | i32::from(byte)))
    }
}

/// Bytes that are looked at: as far as tar's magic.
const FRONT: u64 = 263;

/// Short magics are joined by more of the header, since two bytes may well be a token.
const KNOWN: [Known; 12] = [
    Known {
        name: "numpy's .npy",
        begins: |front| front.starts(b"\x93NUMPY"),
        advice: "open it with `Records::open_npy`",
    },
    Known {
        name: "llm.c's tokens",
        // `HEADERS_INFO` in llm.c's `dev/data/data_common.py`.
        begins: |front| {
            matches!(
                (front.number(0), front.number(1)),
                (Some(20_240_520), Some(1)) | (Some(20_240_801), Some(7))
            )
        },
        advice: "open it with `Records::open_llm_c`",
    },
    Known {
        name: "llm.c's evaluation data",
        begins: |front| front.number(0) == Some(20_240_522),
        advice: "its records have many lengths and cannot be opened",
    },
    Known {
        name: "safetensors",
        begins: |front| {
            let length =
                front.bytes.iter().take(8).rev().fold(0_u64, |length, &byte| length << 8 | u64::from(byte));
            front.bytes.get(8..10) == Some(b"{\"") && length <= front.len.saturating_sub(8)
        },
        advice: "open it with `Records::open_safetensors`",
    },
    Known {
        name: "zip (.npz, .pt)",
        begins: |front| front.starts(b"PK\x03\x04"),
        advice: "open an array of it with `Records::open_npz`, or save its arrays as .npy: `for name, x in \
                 numpy.load(path).items(): numpy.save(name, x)`",
    },
    Known {
        name: "gzip",
        // RFC 1952: method 8, reserved flags 0, a known operating system.
        begins: |front| {
            front.starts(b"\x1f\x8b\x08")
                && front.bytes.get(3).is_some_and(|flags| flags & 0xe0 == 0)
                && front.bytes.get(9).is_some_and(|&system| system <= 13 || system == 255)
        },
        advice: "decompress it first",
    },
    Known { name: "zstd", begins: |front| front.starts(b"\x28\xb5\x2f\xfd"), advice: "decompress it first" },
    Known {
        name: "HDF5",
        begins: |front| front.starts(b"\x89HDF\r\n\x1a\n"),
        advice: "save its data sets as .npy: `numpy.save(path, h5py.File(file)[name][:])`",
    },
    Known {
        name: "Parquet",
        begins: |front| front.starts(b"PAR1") && front.len >= 12,
        advice: "save its columns as .npy: `numpy.save(path, pyarrow.parquet.read_table(file)[name].to_numpy())`",
    },
    Known {
        name: "Arrow IPC",
        begins: |front| front.starts(b"ARROW1\0\0"),
        advice: "save its columns as .npy: `numpy.save(path, table[name].to_numpy())`",
    },
    Known {
        name: "tar",
        begins: |front| front.bytes.get(257..262) == Some(b"ustar"),
        advice: "unpack it first",
    },
    Known {
        name: "a Python pickle",
        // Protocols 4 and 5, with the frame that every pickler writes.
        begins: |front| front.starts(b"\x80\x04\x95") || front.starts(b"\x80\x05\x95"),
        advice: "save its arrays as .npy: `numpy.save(path, x)`",
    },
];

/// Refuses a file that begins as another format does.
pub(super) fn refuse(file: &DataFile) -> Result<(), Error> {
    let front = file.header(0, usize::try_from(file.len.min(FRONT)).unwrap_or(0))?;
    let front = Front { bytes: &front, len: file.len };
    match KNOWN.iter().find(|known| (known.begins)(&front)) {
        None => Ok(()),
        Some(Known { name, advice, .. }) => {
            Err(FormatError::NotHeaderless { path: file.path.clone(), found: name, advice }.into())
        }
    }
}
