//! The items to hand over. One function writes a block and one reads it, neither is inlined: every subject
//! runs the same machine code on its blocks.

use std::mem::MaybeUninit;

/// A value that a number fills.
pub trait Payload: Send + Sync + Sized + 'static {
    const BYTES: usize;

    /// A new value filled with `seq`.
    fn made(seq: u64) -> Self;
    /// Writes all of it.
    fn fill(&mut self, seq: u64);
    /// Reads all of it.
    fn sum(&self) -> u64;
    /// The sum of a value filled with `seq`.
    fn expected(seq: u64) -> u64;
}

/// A payload without heap memory: it can be written to uninitialized memory.
pub trait Inline: Payload {
    /// Writes all of `place`.
    fn init(place: &mut MaybeUninit<Self>, seq: u64);
}

impl Payload for u64 {
    const BYTES: usize = 8;

    #[inline]
    fn made(seq: u64) -> Self {
        seq
    }

    #[inline]
    fn fill(&mut self, seq: u64) {
        *self = seq;
    }

    #[inline]
    fn sum(&self) -> u64 {
        *self
    }

    #[inline]
    fn expected(seq: u64) -> u64 {
        seq
    }
}

impl Inline for u64 {
    #[inline]
    fn init(place: &mut MaybeUninit<u64>, seq: u64) {
        place.write(seq);
    }
}

/// A buffer of this many words, aligned like buffers for files and devices: at least to a cache line.
#[repr(C, align(128))]
pub struct Block<const WORDS: usize>([u64; WORDS]);

pub type Block4K = Block<{ (4 << 10) / 8 }>;
pub type Block1M = Block<{ (1 << 20) / 8 }>;

#[inline(never)]
fn write_words(words: &mut [MaybeUninit<u64>], seq: u64) {
    for (i, word) in (0..).zip(words) {
        word.write(seq.wrapping_add(i));
    }
}

#[inline(never)]
fn sum_words(words: &[u64]) -> u64 {
    words.iter().fold(0, |sum, &word| sum.wrapping_add(word))
}

impl<const WORDS: usize> Payload for Block<WORDS> {
    const BYTES: usize = 8 * WORDS;

    fn made(seq: u64) -> Self {
        let mut block = Block([0; WORDS]);
        block.fill(seq);
        block
    }

    #[inline]
    fn fill(&mut self, seq: u64) {
        // SAFETY: `MaybeUninit<Self>` has the layout of `Self`, and `init` writes only initialized words: `self` stays valid.
        Self::init(unsafe { &mut *std::ptr::from_mut(self).cast() }, seq);
    }

    #[inline]
    fn sum(&self) -> u64 {
        sum_words(&self.0)
    }

    #[inline]
    fn expected(seq: u64) -> u64 {
        let words = WORDS as u64;
        words.wrapping_mul(seq).wrapping_add(words * (words - 1) / 2)
    }
}

impl<const WORDS: usize> Inline for Block<WORDS> {
    #[inline]
    fn init(place: &mut MaybeUninit<Self>, seq: u64) {
        // SAFETY: a block consists of its words, at the same address and of the same size. Uninitialized
        // words are allowed in both types.
        let words = unsafe { &mut *place.as_mut_ptr().cast::<[MaybeUninit<u64>; WORDS]>() };
        write_words(words, seq);
    }
}

impl<P: Inline> Payload for Box<P> {
    const BYTES: usize = P::BYTES;

    /// Filled without a copy.
    #[inline]
    fn made(seq: u64) -> Self {
        let mut place = Box::new_uninit();
        P::init(&mut place, seq);
        // SAFETY: `init` writes all of it.
        unsafe { place.assume_init() }
    }

    #[inline]
    fn fill(&mut self, seq: u64) {
        P::fill(self, seq);
    }

    #[inline]
    fn sum(&self) -> u64 {
        P::sum(self)
    }

    #[inline]
    fn expected(seq: u64) -> u64 {
        P::expected(seq)
    }
}
