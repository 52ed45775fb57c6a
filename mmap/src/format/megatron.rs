//! The index of Megatron-LM's token files: `IndexedDataset` in its `megatron/core/datasets/indexed_dataset.py`.

use super::numbers;
use crate::file::DataFile;
use crate::{DType, Error};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
/// Bytes in the header: magic, version, type, number of sequences, number of entries of the document index.
const HEADER: usize = 9 + 8 + 1 + 8 + 8;

/// Reads the type of a token, and the offsets of the sequences in the data file: the start of each, and then the end of
/// the last one.
pub(super) fn index(file: &DataFile) -> Result<(DType, Vec<u64>), Error> {
    let header = file.header(0, HEADER)?;
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
    if header[..9] != *MAGIC {
        return Err(file.bad_magic(0, "MMIDIDX\\0\\0", header[..9].escape_ascii().to_string()));
    }
    if number(9) != VERSION {
        return Err(file.bad_version(9, VERSION, number(9)));
    }
    // The types in the order of their codes. The first code is 1.
    let known =
        [DType::U8, DType::I8, DType::I16, DType::I32, DType::I64, DType::F64, DType::F32, DType::U16];
    let Some(&dtype) = usize::from(header[17]).checked_sub(1).and_then(|code| known.get(code)) else {
        let advice = "wanted a code from 1 to 8: integers of 8 to 64 bits or floats of 32 or 64 bits";
        return Err(file.unsupported(17, format!("the code {}", header[17]), advice));
    };
    let (sequences, documents) = (number(18), number(26));
    if sequences == 0 {
        return Err(file.bad_header(18, "at least one sequence", "0"));
    }
    // The index has a length (4 bytes) and a pointer (8 bytes) for each sequence, and 8 bytes for each entry of the
    // document index. With several modalities, it also has a mode (1 byte) for each sequence.
    let bytes = |each: u64| {
        sequences.checked_mul(each)?.checked_add(documents.checked_mul(8)?)?.checked_add(HEADER as u64)
    };
    if bytes(13) != Some(file.len) {
        let start = HEADER as u64;
        file.check_data(start, bytes(12).map_or(u64::MAX, |bytes| bytes - start), file.len)?;
    }
    let mut offsets = vec![0_u64];
    numbers(file, HEADER as u64, sequences, |at, tokens: [u8; 4]| {
        let tokens = i32::from_le_bytes(tokens);
        let end = u64::try_from(tokens).ok().and_then(|tokens| {
            // The file holds fewer than 2^60 lengths, but their sum may be larger.
            offsets[offsets.len() - 1].checked_add(tokens * dtype.size() as u64)
        });
        let wanted = "a number of tokens, fewer than 2^64 bytes in all";
        offsets.push(end.ok_or_else(|| file.bad_header(at, wanted, tokens.to_string()))?);
        Ok(())
    })?;
    // No overflow: the file's length was checked above.
    let pointers = HEADER as u64 + 4 * sequences;
    let mut ends = offsets.iter();
    numbers(file, pointers, sequences, |at, pointer: [u8; 8]| {
        let pointer = i64::from_le_bytes(pointer);
        if ends.next().copied() == u64::try_from(pointer).ok() {
            Ok(())
        } else {
            Err(file.bad_header(at, "the end of the sequence before", pointer.to_string()))
        }
    })?;
    Ok((dtype, offsets))
}
