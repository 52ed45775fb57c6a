//! A keyed permutation of `0..n` in O(1) memory: no table, forward and backward.
//!
//! The construction is `VariablePhilox`, listing 1 of Mitchell, Stokes, Frank and Holmes,
//! "Bandwidth-Optimal Random Shuffling for GPUs" (ACM Transactions on Parallel Computing 9, 2022,
//! arXiv:2106.06161): 24 rounds of the multiplication of Philox (Salmon, Moraes, Dror and Shaw, SC 2011)
//! on the two halves of a word of b bits, one random key a round. It permutes `0..2^b`. For any other `n`
//! the walk of Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), is added: apply it
//! again until the value lies below `n`. The word is the narrowest that holds `n`, so fewer than two steps
//! are expected from any start.
//!
//! The round keys are the outputs of `SplitMix64` (Steele, Lea and Flood, OOPSLA 2014). All of it is integer
//! arithmetic with stated widths: the same numbers on every machine. They are part of this crate's contract,
//! because a job that is resumed has to see the order it began with; golden values in the tests hold them.

/// Rounds, as in listing 1 of the paper.
const ROUNDS: usize = 24;

/// The multiplier of Philox-2x64. It is odd, so that multiplying by it permutes the words of any width.
const MULTIPLIER: u64 = 0xD2B7_4407_B1CE_6E93;

/// The inverse of `MULTIPLIER` modulo 2^64, and so modulo every smaller power of two.
const UNMULTIPLIER: u64 = {
    // Newton: each step doubles the number of right bits, and an odd number is its own inverse modulo 8.
    let mut inverse = MULTIPLIER;
    let mut right_bits = 3;
    while right_bits < 64 {
        inverse = inverse.wrapping_mul(2_u64.wrapping_sub(MULTIPLIER.wrapping_mul(inverse)));
        right_bits *= 2;
    }
    inverse
};

/// The increment of `SplitMix64`: 2^64 divided by the golden ratio, made odd.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The narrowest word. Narrower ones mix badly (one bit would not be permuted at all), and at this width
/// visiting all of `0..n` takes at most 256 steps however small `n` is.
const FEWEST_BITS: u32 = 8;

/// The output function of `SplitMix64`.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The upper half of the product of `value` and the multiplier.
fn multiply_high(value: u64) -> u64 {
    ((u128::from(MULTIPLIER) * u128::from(value)) >> 64) as u64
}

/// A random number from which the keys of permutations are derived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u64);

impl Key {
    /// The key that belongs to `seed` and `epoch`.
    pub(super) const fn new(seed: u64, epoch: u64) -> Self {
        // Two rounds of mixing, so that neighbouring seeds and neighbouring epochs share nothing.
        Self(mix(mix(seed.wrapping_add(GAMMA)) ^ epoch))
    }

    /// One of 2^64 keys that are derived from this one.
    pub(super) const fn of(self, index: u64) -> Self {
        // As `SplitMix64` derives its outputs from a state, and once more, so that the outputs of neighbouring indices
        // are no neighbouring states.
        Self(mix(mix(self.0.wrapping_add(GAMMA.wrapping_mul(index))).wrapping_add(GAMMA)))
    }

    /// A number that distinguishes keys.
    #[expect(clippy::cast_possible_truncation, reason = "its low bits do too")]
    pub(super) const fn id(self) -> usize {
        self.0 as usize
    }

    /// A number below `n`, which is at least 1. It is the product's upper half: Lemire, "Fast Random Integer
    /// Generation in an Interval" (ACM TOMACS 29, 2019), without the correction of a bias below `n` in 2^64.
    pub(super) fn below(self, n: u64) -> u64 {
        ((u128::from(self.0) * u128::from(n)) >> 64) as u64
    }
}

/// A permutation of `0..n` for one key.
#[derive(Clone, Debug)]
pub(super) struct Permutation {
    n: u64,
    left_bits: u32,
    right_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..n` that belongs to `seed` and `epoch`; `n` is at least 1.
    pub(super) fn new(n: u64, seed: u64, epoch: u64) -> Self {
        Self::keyed(n, Key::new(seed, epoch))
    }

    /// The permutation of `0..n` that belongs to `key`; `n` is at least 1.
    pub(super) fn keyed(n: u64, key: Key) -> Self {
        let bits = (u64::BITS - n.saturating_sub(1).leading_zeros()).max(FEWEST_BITS);
        let mut state = key.0;
        let keys = std::array::from_fn(|_| {
            state = state.wrapping_add(GAMMA);
            mix(state)
        });
        Self { n, left_bits: bits / 2, right_bits: bits - bits / 2, keys }
    }

    /// Where `position` goes; both are below `n`.
    pub(super) fn forward(&self, position: u64) -> u64 {
        debug_assert!(position < self.n);
        let mut value = position;
        loop {
            value = self.encrypt(value);
            if value < self.n {
                return value;
            }
        }
    }

    /// What `forward` brings to `value`; both are below `n`.
    pub(super) fn inverse(&self, value: u64) -> u64 {
        debug_assert!(value < self.n);
        let mut position = value;
        loop {
            position = self.decrypt(position);
            if position < self.n {
                return position;
            }
        }
    }

    /// One step of the walk: a permutation of the words of `left_bits + right_bits` bits.
    ///
    /// The right half is as wide as the left one or a bit wider; the upper bit that it has more moves to
    /// the lower end of the new right half, so that every bit takes part.
    fn encrypt(&self, word: u64) -> u64 {
        let (left_mask, right_mask) = self.masks();
        let wider = self.right_bits - self.left_bits;
        let (mut left, mut right) = (word >> self.right_bits, word & right_mask);
        for key in self.keys {
            let low = (MULTIPLIER.wrapping_mul(left) << wider) | (right >> self.left_bits);
            left = (multiply_high(left) ^ key ^ right) & left_mask;
            right = low & right_mask;
        }
        (left << self.right_bits) | right
    }

    /// The inverse of `encrypt`: the rounds undone, last one first.
    fn decrypt(&self, word: u64) -> u64 {
        let (left_mask, right_mask) = self.masks();
        let wider = self.right_bits - self.left_bits;
        let (mut left, mut right) = (word >> self.right_bits, word & right_mask);
        for key in self.keys.iter().rev() {
            let before = UNMULTIPLIER.wrapping_mul(right >> wider) & left_mask;
            let low = (multiply_high(before) ^ key ^ left) & left_mask;
            right = ((right << self.left_bits) | low) & right_mask;
            left = before;
        }
        (left << self.right_bits) | right
    }

    /// The bits of the left and of the right half. Each is between 4 and 32 bits wide.
    const fn masks(&self) -> (u64, u64) {
        ((1 << self.left_bits) - 1, (1 << self.right_bits) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_multiplier_and_its_inverse_cancel() {
        assert_eq!(MULTIPLIER.wrapping_mul(UNMULTIPLIER), 1);
    }

    /// Printed by an implementation of the paper's listing in Python, written apart from this one.
    #[test]
    fn golden_values() {
        let first = |n, seed, epoch| -> Vec<u64> {
            let permutation = Permutation::new(n, seed, epoch);
            (0..n.min(8)).map(|position| permutation.forward(position)).collect()
        };
        assert_eq!(first(4, 0, 0), [2, 1, 3, 0]);
        assert_eq!(first(10, 0, 0), [7, 1, 3, 0, 5, 8, 2, 6]);
        assert_eq!(first(10, 0, 1), [3, 9, 5, 2, 0, 1, 6, 4]);
        assert_eq!(first(1000, 1, 0), [761, 4, 60, 342, 446, 502, 961, 444]);
        assert_eq!(
            first(1 << 20, 42, 3),
            [906_936, 53_424, 696_204, 225_718, 475_836, 587_140, 1_012_788, 758_558]
        );
        assert_eq!(
            first(u64::MAX, u64::MAX, u64::MAX)[..3],
            [16_187_686_892_620_215_874, 3_306_169_557_630_123_613, 17_545_739_077_684_030_382]
        );
    }

    #[test]
    fn a_permutation_for_every_small_n() {
        for n in 1..300 {
            let permutation = Permutation::new(n, 7, n);
            let mut seen = vec![false; usize::try_from(n).unwrap()];
            for position in 0..n {
                let value = permutation.forward(position);
                assert_eq!(permutation.inverse(value), position, "n = {n}");
                assert!(!std::mem::replace(&mut seen[usize::try_from(value).unwrap()], true), "n = {n}");
            }
        }
    }

    /// Each of the 24 orders of four items should come up for one seed in 24. With 23 degrees of freedom
    /// a fair shuffle exceeds 49.7 once in a thousand times; the seeds are fixed, so this never varies.
    #[test]
    fn every_order_of_four_is_as_likely_as_another() {
        const SEEDS: u32 = 24_000;
        let mut counts = std::collections::BTreeMap::<Vec<u64>, u32>::new();
        for seed in 0..SEEDS {
            let permutation = Permutation::new(4, u64::from(seed), 0);
            *counts.entry((0..4).map(|position| permutation.forward(position)).collect()).or_default() += 1;
        }
        let expected = f64::from(SEEDS) / 24.0;
        let chi_squared: f64 = counts.values().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        assert_eq!(counts.len(), 24);
        assert!(chi_squared < 49.7, "chi squared {chi_squared}");
    }

    #[test]
    fn an_epoch_has_its_own_order() {
        let order = |seed, epoch| {
            let permutation = Permutation::new(1000, seed, epoch);
            (0..1000).map(|position| permutation.forward(position)).collect::<Vec<_>>()
        };
        let still = |a: &[u64], b: &[u64]| a.iter().zip(b).filter(|(a, b)| a == b).count();
        // Two unrelated orders agree in one place on average; ten or more come once in ten million times.
        assert!(still(&order(3, 0), &order(3, 1)) < 10);
        assert!(still(&order(3, 0), &order(4, 0)) < 10);
        assert!(still(&order(3, 0), &(0..1000).collect::<Vec<_>>()) < 10);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_is_a_bijection(n in 1_u64..5000, seed: u64, epoch: u64) {
            let permutation = Permutation::new(n, seed, epoch);
            let mut values: Vec<u64> = (0..n).map(|position| permutation.forward(position)).collect();
            values.sort_unstable();
            prop_assert!(values.into_iter().eq(0..n));
        }

        #[test]
        fn inverse_undoes_forward_at_any_size(n in 1..=u64::MAX, seed: u64, epoch: u64, at: u64) {
            let permutation = Permutation::new(n, seed, epoch);
            let position = at % n;
            let value = permutation.forward(position);
            prop_assert!(value < n);
            prop_assert_eq!(permutation.inverse(value), position);
            prop_assert_eq!(permutation.forward(permutation.inverse(position)), position);
        }
    }
}
