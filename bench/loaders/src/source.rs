//! How the Rust subjects except twinbuf read the file: by position, adjacent records at once.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt as _;

use crate::work::{Batch, Kind, WINDOW, Work};

/// Numbers that start at a multiple of 64 bytes.
///
/// A large `Vec` starts 16 bytes after a multiple of a page, and the kernel's copies out of a page may then
/// be several times slower (`rep movsb` on an AMD EPYC). Without this, the subjects would compare allocators.
pub struct Aligned<T> {
    numbers: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    fn new(len: usize) -> Self {
        let numbers = vec![T::default(); len + 64 / size_of::<T>()];
        let start = numbers.as_ptr().align_offset(64);
        Self { numbers, start, len }
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.numbers[self.start..][..self.len]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.numbers[self.start..][..self.len]
    }
}

/// The memory of one batch.
pub enum Buffer {
    Tokens(Aligned<u32>),
    Images(Aligned<u8>),
}

impl Buffer {
    /// For batches of `work`.
    pub fn new(work: &Work) -> Self {
        match work.kind {
            Kind::Tokens => Self::Tokens(Aligned::new(work.batch * WINDOW)),
            Kind::Images => Self::Images(Aligned::new(work.batch * work.kind.record_bytes())),
        }
    }

    pub fn batch(&self) -> Batch<'_> {
        match self {
            Self::Tokens(tokens) => Batch::Tokens(tokens),
            Self::Images(bytes) => Batch::Images(bytes),
        }
    }
}

/// The open file.
pub struct Source {
    file: File,
    kind: Kind,
    /// Tokens of a batch as stored in the file, before they are widened to 32 bits.
    narrow: Aligned<u8>,
}

impl Source {
    pub fn open(work: &Work) -> io::Result<Self> {
        let narrow = match work.kind {
            Kind::Tokens => work.batch * work.kind.record_bytes(),
            Kind::Images => 0,
        };
        Ok(Self { file: File::open(&work.data)?, kind: work.kind, narrow: Aligned::new(narrow) })
    }

    /// Reads `records`. `out` has room for exactly that many.
    pub fn read(&mut self, records: &[u64], out: &mut Buffer) -> io::Result<()> {
        let Self { file, kind, narrow } = self;
        let offset = |record: u64| kind.header() + record * kind.stride();
        // Windows are longer than their stride by the token that they share.
        let bytes = |run: &[u64]| (run.len() - 1) * kind.stride() as usize + kind.record_bytes();
        let runs = records.chunk_by(|a, b| a + 1 == *b);
        match out {
            Buffer::Images(out) => {
                let mut rest = &mut out[..];
                for run in runs {
                    let (front, back) = rest.split_at_mut(bytes(run));
                    file.read_exact_at(front, offset(run[0]))?;
                    rest = back;
                }
            }
            Buffer::Tokens(out) => {
                let mut windows = out.chunks_exact_mut(WINDOW);
                for run in runs {
                    let narrow = &mut narrow[..bytes(run)];
                    file.read_exact_at(narrow, offset(run[0]))?;
                    let tokens = narrow.as_chunks().0;
                    for (i, window) in windows.by_ref().take(run.len()).enumerate() {
                        let tokens = &tokens[i * (WINDOW - 1)..][..WINDOW];
                        for (wide, &token) in window.iter_mut().zip(tokens) {
                            *wide = u16::from_le_bytes(token).into();
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
