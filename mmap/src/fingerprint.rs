//! A number that identifies a data set, to check that a saved position belongs to it.

use std::sync::Mutex;
use std::thread;

use crate::error::lock;
use crate::file::little;
use crate::ranges::Places;
use crate::{Error, Ranges, Shard};

/// Bytes that are read at the start and at the end of each file's records.
const SAMPLE: usize = 8192;

/// The most threads that read samples. One thread alone reads up to [`ALONE`] files. Each thread takes [`PART`] files
/// at a time. If files are not in the page cache, each thread keeps one more read in flight.
const THREADS: usize = 4;
const ALONE: usize = 64;
const PART: usize = 16;

impl Ranges {
    /// Returns a number that identifies the data set. Save it together with a position, and compare it before you
    /// use the position.
    ///
    /// The fingerprint depends on the element type, shape and stride of the records, the number of files, and the
    /// offset and number of records of each file. It also depends on the first and the last 8 KiB of the records of
    /// **every** file, and, for records of varying length, on the offset of every record. The call makes about two
    /// reads for each file, or one if its records have at most 8 KiB. Paths and file times have no effect: a copy has
    /// the same fingerprint on any platform.
    ///
    /// It is made to detect files that were replaced, swapped, resized or regenerated. It does not
    /// detect a change between the two samples of a file, or a deliberate forgery.
    ///
    /// The hash has eight lanes of 64 bits, which start as their numbers 0 to 7. Word `i` of each part of the
    /// input (8 bytes, little-endian, the last filled up with zeros) changes lane `i % 8` to
    /// `rotate_left((lane ^ word) * 0x9E3779B97F4A7C15, 32)`, modulo 2^64. In the end the lanes change a lane that
    /// starts as 8. Each file is hashed separately, and its hash is a word of the whole. The result is the same in
    /// every version of this crate.
    ///
    /// # Errors
    ///
    /// - [`Error::Truncated`]: a file became shorter after it was opened.
    /// - [`Error::Read`]: a read failed.
    /// - [`Error::Replaced`], [`Error::NotFound`], [`Error::PermissionDenied`],
    ///   [`Error::NotAFile`], [`Error::Open`]: a file that is not kept open could not be reopened.
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
        // The length of each part comes before the part, so different values never give the same sequence of words.
        let mut words = vec![little(format!("{:<8}", self.dtype()).as_bytes()), self.kind.shape.len() as u64];
        words.extend(self.kind.shape.iter().map(|&axis| axis as u64));
        words.extend([self.kind.stride, self.shards().len() as u64]);
        let mut hashes: Vec<Result<u64, Error>> = self.shards().iter().map(|_| Ok(0)).collect();
        // Each thread takes the next files of the list. A thread that starts late or is refused leaves them to the
        // others.
        let parts = Mutex::new(self.shards().chunks(PART).zip(hashes.chunks_mut(PART)));
        let next = || lock(&parts).next();
        let work = || {
            while let Some((shards, hashes)) = next() {
                shards.iter().zip(hashes).for_each(|(shard, hash)| *hash = of_shard(shard));
            }
        };
        thread::scope(|scope| {
            for _ in 1..THREADS.min(self.shards().len().div_ceil(ALONE)) {
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        // If several files failed, return the error of the first.
        words.extend(hashes.into_iter().collect::<Result<Vec<u64>, Error>>()?);
        let mut hash = Lanes(START);
        hash.add(words);
        Ok(hash.end())
    }
}

/// Hashes the records of a shard: their positions, and the bytes at the start and at the end.
fn of_shard(shard: &Shard) -> Result<u64, Error> {
    let all = &shard.bytes;
    let mut hash = Lanes(START);
    hash.add([all.start, shard.records]);
    if let Places::Offsets(offsets) = &shard.at {
        hash.add(offsets.iter().copied());
    }
    // The first and the last `SAMPLE` bytes. If the records have fewer than both together, all of
    // their bytes, each once.
    let front = all.start..all.end.min(all.start + SAMPLE as u64);
    let back = front.end.max(all.end.saturating_sub(SAMPLE as u64))..all.end;
    let mut bytes = [0; SAMPLE];
    for part in [front, back] {
        #[expect(clippy::cast_possible_truncation, reason = "at most `SAMPLE`")]
        let bytes = &mut bytes[..(part.end - part.start) as usize];
        shard.file.read_exact(bytes, part.start)?;
        hash.add(bytes.chunks(8).map(little));
    }
    Ok(hash.end())
}

/// A hash of words. Each step is a bijection of its lane, so two inputs of the same length that differ in one word
/// never have the same lanes. The lanes do not depend on each other, so the processor computes several at a time.
struct Lanes([u64; 8]);

/// The lanes before the first word.
const START: [u64; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

impl Lanes {
    const fn step(lane: u64, word: u64) -> u64 {
        (lane ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(32)
    }

    /// Adds a part of the input to the hash. Each part starts at lane 0.
    fn add(&mut self, words: impl IntoIterator<Item = u64>) {
        for (number, word) in words.into_iter().enumerate() {
            let lane = &mut self.0[number % 8];
            *lane = Self::step(*lane, word);
        }
    }

    fn end(self) -> u64 {
        self.0.into_iter().fold(8, Self::step)
    }
}
