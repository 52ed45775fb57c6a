//! A number that identifies a data set, to check that a saved position belongs to it.

use crate::ranges::Places;
use crate::{Error, Ranges, Shard};

/// Number of shards whose bytes are read: the first, the last, and others evenly between them.
const SHARDS: usize = 16;

/// The most offsets of a shard that are looked at.
const OFFSETS: usize = 1024;

/// Bytes that are read at each end of such a shard.
const SAMPLE: usize = 4096;

impl Ranges {
    /// Returns a number that identifies the data set. Save it together with a position, and compare it before you
    /// use the position.
    ///
    /// The fingerprint depends on the element type, shape and stride of the records, the number of files, and the
    /// offset and number of records of each file. It also depends on samples of the data: the first and last 4 KiB
    /// of the records in at most 16 files, spread evenly from the first to the last. For records of varying length,
    /// it also depends on at most 1024 record offsets per file. The call makes at most 32 reads of 4 KiB, regardless
    /// of the size of the data set. Paths and file times have no effect: a copy has the same fingerprint on any
    /// platform.
    ///
    /// Data sets that differ only outside the samples have the same fingerprint. It detects files that were
    /// replaced, resized or regenerated. It does not detect deliberate changes.
    ///
    /// The algorithm is 64-bit FNV-1a (Fowler, Noll and Vo; RFC 9923), with numbers as 8 little-endian bytes. The
    /// result is the same in every version of this crate.
    ///
    /// # Errors
    ///
    /// - [`Error::Truncated`]: a file became shorter after it was opened.
    /// - [`Error::Read`]: a read failed.
    /// - [`Error::Replaced`], [`Error::NotFound`], [`Error::PermissionDenied`], [`Error::Open`]: a file that is not
    ///   kept open could not be reopened.
    ///
    /// ```
    /// use twinbuf_mmap::Records;
    ///
    /// let folder = tempfile::tempdir()?;
    /// let (path, copy) = (folder.path().join("data"), folder.path().join("copy"));
    /// std::fs::write(&path, b"aabbcc")?;
    /// std::fs::copy(&path, &copy)?;
    /// let fingerprint = Records::open([&path], 2)?.fingerprint()?;
    /// assert_eq!(Records::open([&copy], 2)?.fingerprint()?, fingerprint);
    /// assert_ne!(Records::open([&path], 3)?.fingerprint()?, fingerprint);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fingerprint(&self) -> Result<u64, Error> {
        let mut hash = Fnv1a::new();
        // How long each part is follows from what came before it, so other numbers are other bytes.
        hash.bytes(format!("{:<8}", self.dtype()).as_bytes());
        hash.number(self.kind.shape.len() as u64);
        self.kind.shape.iter().for_each(|&axis| hash.number(axis as u64));
        hash.number(self.kind.stride);
        hash.number(self.shards().len() as u64);
        for shard in self.shards() {
            hash.number(shard.bytes.start);
            hash.number(shard.records().end - shard.records().start);
            if let Places::Offsets(offsets) = &shard.at {
                let every = offsets.len().div_ceil(OFFSETS);
                offsets.iter().step_by(every).for_each(|&offset| hash.number(offset));
            }
        }
        let last = self.shards().len() - 1;
        let looked_at = SHARDS.min(self.shards().len());
        for index in 0..looked_at {
            sample(&mut hash, &self.shards()[index * last / (looked_at - 1).max(1)])?;
        }
        Ok(hash.0)
    }
}

/// Takes in both ends of a shard's records; all of a short one, and no byte twice.
fn sample(hash: &mut Fnv1a, shard: &Shard) -> Result<(), Error> {
    let all = &shard.bytes;
    let front = all.start..all.end.min(all.start + SAMPLE as u64);
    let back = front.end.max(all.end.saturating_sub(SAMPLE as u64))..all.end;
    let mut bytes = [0; SAMPLE];
    for part in [front, back] {
        #[expect(clippy::cast_possible_truncation, reason = "at most `SAMPLE`")]
        let bytes = &mut bytes[..(part.end - part.start) as usize];
        shard.file.read_exact(bytes, part.start)?;
        hash.bytes(bytes);
    }
    Ok(())
}

/// The hash: every step is a bijection of the state, so two inputs of the same length that differ in one byte never
/// have the same hash.
struct Fnv1a(u64);

impl Fnv1a {
    const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn number(&mut self, number: u64) {
        self.bytes(&number.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the authors' test suite, `test_fnv.c`.
    #[test]
    fn published_hashes() {
        for (text, wanted) in
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)]
        {
            let mut hash = Fnv1a::new();
            hash.bytes(text.as_bytes());
            assert_eq!(hash.0, wanted, "{text:?}");
        }
    }
}
