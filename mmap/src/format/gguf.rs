//! The header of GGUF files, of versions 2 and 3 (`docs/gguf.md` of ggml): which tensors a file has, and where.
//!
//! Metadata is skipped, except for the alignment and the numbers of a model in several files. The parser is written
//! here, because no crate was found that checks what it reads, keeps only what is needed, and has few dependencies.

use super::{ByteRange, LONGEST, Tensor, little};
use crate::file::DataFile;
use crate::{DType, Error};

/// The first four bytes of a file.
pub(super) const MAGIC: &[u8] = b"GGUF";

/// The most axes of a tensor (`GGML_MAX_DIMS`).
const AXES: u64 = 4;
/// The longest name of a tensor or a key, in bytes. The format allows 64 for tensors, and 65 535 for keys.
const NAME: u64 = 65_535;
/// How deep arrays may be inside arrays.
const NESTED: u32 = 8;
/// The most bytes in one read of the file.
const READ: usize = 256 << 10;

/// The types. Each has its number, its name, the elements and the bytes of a block (`GGML_QUANT_SIZES` of the package
/// `gguf`), and the [`DType`], if there is one. `Q8_1` is left out, because only computations use it.
type Row = (u64, &'static str, u64, u64, Option<DType>);
const TYPES: [Row; 33] = [
    (0, "F32", 1, 4, Some(DType::F32)),
    (1, "F16", 1, 2, Some(DType::F16)),
    (2, "Q4_0", 32, 18, None),
    (3, "Q4_1", 32, 20, None),
    (6, "Q5_0", 32, 22, None),
    (7, "Q5_1", 32, 24, None),
    (8, "Q8_0", 32, 34, None),
    (10, "Q2_K", 256, 84, None),
    (11, "Q3_K", 256, 110, None),
    (12, "Q4_K", 256, 144, None),
    (13, "Q5_K", 256, 176, None),
    (14, "Q6_K", 256, 210, None),
    (15, "Q8_K", 256, 292, None),
    (16, "IQ2_XXS", 256, 66, None),
    (17, "IQ2_XS", 256, 74, None),
    (18, "IQ3_XXS", 256, 98, None),
    (19, "IQ1_S", 256, 50, None),
    (20, "IQ4_NL", 32, 18, None),
    (21, "IQ3_S", 256, 110, None),
    (22, "IQ2_S", 256, 82, None),
    (23, "IQ4_XS", 256, 136, None),
    (24, "I8", 1, 1, Some(DType::I8)),
    (25, "I16", 1, 2, Some(DType::I16)),
    (26, "I32", 1, 4, Some(DType::I32)),
    (27, "I64", 1, 8, Some(DType::I64)),
    (28, "F64", 1, 8, Some(DType::F64)),
    (29, "IQ1_M", 256, 56, None),
    (30, "BF16", 1, 2, Some(DType::Bf16)),
    (34, "TQ1_0", 256, 54, None),
    (35, "TQ2_0", 256, 66, None),
    (39, "MXFP4", 32, 17, None),
    (40, "NVFP4", 64, 36, None),
    (41, "Q1_0", 128, 18, None),
];

/// The number of a file among the files of its model, from 0, and the number of these files.
pub(super) struct Part {
    pub(super) number: u64,
    pub(super) of: u64,
}

/// Reads the tensors of a file, and which part of a model the file is. `index` is the index of the file among those of
/// the model.
pub(super) fn tensors(file: &DataFile, index: usize) -> Result<(Vec<Tensor>, Part), Error> {
    let mut header = Header { file, at: MAGIC.len() as u64, read: Vec::new(), from: 0 };
    let version = header.number(4)?;
    if !(2..=3).contains(&version) {
        return Err(file.bad_version(MAGIC.len() as u64, "2 or 3, in little-endian order", version));
    }
    let (count, keys) = (header.number(8)?, header.number(8)?);
    let (mut align, mut number, mut of, mut split) = (32, 0, 1, 0);
    for _ in 0..keys {
        let key = header.name()?;
        let kind = header.number(4)?;
        let at = header.at;
        // llama.cpp writes the alignment with 32 bits, and the numbers of a part (`LLM_KV_SPLIT_NO`,
        // `LLM_KV_SPLIT_COUNT`) with 16; any size is accepted.
        match (size(kind), &*key) {
            (Some(size), "general.alignment") => {
                align = header.number(size)?;
                if !align.is_power_of_two() {
                    let wanted = "a power of two as `general.alignment`";
                    return Err(file.bad_header(at, wanted, align.to_string()));
                }
            }
            (Some(size), "split.no") => (number, split) = (header.number(size)?, at),
            (Some(size), "split.count") => (of, split) = (header.number(size)?, at),
            _ => header.skip_value(kind, NESTED)?,
        }
    }
    if of > u16::MAX.into() || of > 1 && number >= of {
        let wanted = "at most 65535 parts, and a number below theirs";
        return Err(file.bad_header(split, wanted, format!("number {number} of {of}")));
    }
    let mut all = Vec::new();
    for _ in 0..count {
        let at = header.at;
        let tensor = header.tensor(index)?;
        let offset = tensor.range.bytes.start;
        if offset % align != 0 {
            let wanted = "an offset that is a multiple of the alignment";
            return Err(file.bad_header(at, wanted, offset.to_string()));
        }
        all.push((tensor, at));
    }
    // The data begins at the next multiple of the alignment, and the tensors' offsets count from there.
    let start = header.at.checked_next_multiple_of(align).unwrap_or(u64::MAX);
    all.sort_unstable_by_key(|(tensor, _)| (tensor.range.bytes.start, tensor.range.bytes.end));
    let mut end = 0;
    for (tensor, at) in &mut all {
        let bytes = &mut tensor.range.bytes;
        if bytes.start < end && !bytes.is_empty() {
            return Err(file.bad_header(*at, "tensors that do not overlap", tensor.name.as_bytes()));
        }
        end = end.max(bytes.end);
        if start.checked_add(bytes.end).is_none_or(|end| end > file.len) {
            // This fails. Unlike the data of other formats, that of this one may end before the file does.
            file.check_data(start, bytes.end, file.len)?;
        }
        *bytes = start + bytes.start..start + bytes.end;
    }
    Ok((all.into_iter().map(|(tensor, _)| tensor).collect(), Part { number, of }))
}

/// A header that is being parsed.
struct Header<'f> {
    file: &'f DataFile,
    /// The offset in the file of the next byte to parse.
    at: u64,
    /// Bytes that were read from the file.
    read: Vec<u8>,
    /// The offset in the file of the first of these bytes.
    from: u64,
}

impl Header<'_> {
    /// Returns where the next bytes end, if the header limit and the file allow that many.
    fn end(&self, bytes: Option<u64>) -> Result<u64, Error> {
        let end = bytes.and_then(|bytes| self.at.checked_add(bytes)).unwrap_or(u64::MAX);
        self.file.check_end(end, self.file.len)?;
        self.file.header_len(0, LONGEST, end).map(|_| end)
    }

    /// Returns the next `len` bytes.
    fn take(&mut self, len: u64) -> Result<&[u8], Error> {
        let end = self.end(Some(len))?;
        // `len` fits a usize: callers take a number, or a name whose length was checked.
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if end > self.from + self.read.len() as u64 {
            let left = usize::try_from(self.file.len - self.at).unwrap_or(usize::MAX);
            self.read.resize(READ.max(len).min(left), 0);
            self.file.read_exact(&mut self.read, self.at)?;
            self.from = self.at;
        }
        let start = usize::try_from(self.at - self.from).unwrap_or(usize::MAX);
        self.at = end;
        Ok(&self.read[start..start + len])
    }

    /// Reads a little-endian number of up to 8 bytes.
    fn number(&mut self, bytes: u64) -> Result<u64, Error> {
        Ok(little(self.take(bytes)?))
    }

    fn name(&mut self) -> Result<String, Error> {
        let at = self.at;
        let len = self.number(8)?;
        self.file.header_len(at, NAME, len)?;
        let name = self.take(len)?.to_vec();
        String::from_utf8(name)
            .map_err(|error| self.file.bad_header(at + 8, "a name in UTF-8", error.as_bytes()))
    }

    /// Skips a value of the type with the number `kind`, without reading it. `nested` is how deep arrays may be inside it.
    fn skip_value(&mut self, kind: u64, nested: u32) -> Result<(), Error> {
        let bytes = match (kind, size(kind)) {
            (_, Some(size)) => Some(size),
            (8, _) => Some(self.number(8)?),
            (9, _) if nested > 0 => {
                let (kind, count) = (self.number(4)?, self.number(8)?);
                let Some(size) = size(kind) else {
                    return (0..count).try_for_each(|_| self.skip_value(kind, nested - 1));
                };
                count.checked_mul(size)
            }
            _ => {
                let found = format!("type {kind}");
                return Err(self.file.bad_header(self.at, "a value of a known type", found));
            }
        };
        self.at = self.end(bytes)?;
        Ok(())
    }

    /// Reads the description of a tensor. Its bytes are counted from the start of the data.
    fn tensor(&mut self, file: usize) -> Result<Tensor, Error> {
        let start = self.at;
        let name = self.name()?;
        if name.is_empty() {
            return Err(self.file.bad_header(start, "a tensor with a name", "none"));
        }
        let at = self.at;
        let axes = self.number(4)?;
        if axes > AXES {
            return Err(self.file.bad_header(at, "at most 4 axes", axes.to_string()));
        }
        let ne = (0..axes).map(|_| self.number(8)).collect::<Result<Vec<u64>, Error>>()?;
        let at_type = self.at;
        let kind = self.number(4)?;
        let offset = self.number(8)?;
        let Some(&(_, format, block, block_bytes, dtype)) = TYPES.iter().find(|row| row.0 == kind) else {
            let advice = "its size is not known: convert it to a type that llama.cpp still writes";
            return Err(self.file.unsupported(at_type, format!("GGUF type {kind}"), advice));
        };
        // ggml lists the fastest-varying axis first. The elements of a block follow each other along that axis.
        let first = ne.first().copied().unwrap_or(1);
        let elements = ne.iter().try_fold(1_u64, |all, &axis| all.checked_mul(axis));
        let bytes = elements.and_then(|all| (all / block).checked_mul(block_bytes));
        let end = bytes.and_then(|bytes| offset.checked_add(bytes));
        let shape: Option<Vec<usize>> = ne.iter().rev().map(|&axis| usize::try_from(axis).ok()).collect();
        let (Some(end), Some(shape), 0) = (end, shape, first % block) else {
            return Err(self.file.bad_shape("whole blocks, and fewer than 2^64 bytes", &ne));
        };
        let range = ByteRange { file, bytes: offset..end };
        Ok(Tensor { name: name.into(), dtype, format: format.into(), shape: shape.into(), range })
    }
}

/// The bytes of a value, for types whose values all have the same size.
const fn size(kind: u64) -> Option<u64> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}
