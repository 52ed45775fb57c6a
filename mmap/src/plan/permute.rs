//! A keyed permutation of `0..n` in O(1) memory.
//!
//! It permutes the words of b bits, the fewest that hold all numbers below `n`, but at least 4, by rounds of three
//! steps. Each step is a bijection: multiply by a random odd number, add a random number, and xor the upper half into
//! the lower half. If there are more than `n` words, the permutation is repeated until the value is below `n`, which is
//! called cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002). For `n` from 9 on,
//! fewer than two passes are expected.
//!
//! The tests compare the permutation with a fair shuffle: all orders of a few items, pairs of items, and differences
//! between neighbors. Six rounds fail the tests, ten pass, and the permutation uses twelve. It is no cipher.
//!
//! Keys are made with the output function of `SplitMix64` (Steele, Lea and Flood, OOPSLA 2014). All of it is integer
//! arithmetic with fixed widths, so the numbers are the same on every machine. Golden values in the tests pin them,
//! because a job that is resumed must see the order that it began with.

/// The rounds of a permutation.
const ROUNDS: usize = 12;

/// The increment of `SplitMix64`: 2^64 divided by the golden ratio, made odd.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The fewest bits of a word. Words with halves of one bit mix badly. With this many bits, a walk visits 16 words at
/// most.
const FEWEST_BITS: u32 = 4;

/// The output function of `SplitMix64`.
pub(super) const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A random number. The keys of permutations are derived from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u64);

impl Key {
    /// The key that belongs to `seed` and `epoch`.
    pub(super) const fn new(seed: u64, epoch: u64) -> Self {
        // Mix twice, so that the keys of neighboring seeds and of neighboring epochs are unrelated.
        Self(mix(mix(seed.wrapping_add(GAMMA)) ^ epoch))
    }

    /// One of 2^64 keys that are derived from this one.
    pub(super) const fn of(self, index: u64) -> Self {
        // Output number `index` of `SplitMix64` with the key as its state, mixed once more. Without
        // that, it could be a number that `Permutation::new` draws from this key.
        Self(mix(mix(self.0.wrapping_add(GAMMA.wrapping_mul(index))).wrapping_add(GAMMA)))
    }

    /// A number below `n`, or 0 if `n` is 0. It is the product's upper half: Lemire, "Fast Random Integer Generation in
    /// an Interval" (ACM TOMACS 29, 2019), without the correction of a bias below `n` in 2^64.
    pub(super) fn below(self, n: u64) -> u64 {
        ((u128::from(self.0) * u128::from(n)) >> 64) as u64
    }
}

/// A permutation of `0..n` for one key.
#[derive(Clone, Debug)]
pub(super) struct Permutation {
    n: u64,
    mask: u64,
    half: u32,
    /// The factor and the term of each round.
    rounds: [(u64, u64); ROUNDS],
}

impl Permutation {
    /// The permutation of `0..n` that belongs to `key`; `n` is at least 1.
    pub(super) fn new(n: u64, key: Key) -> Self {
        let bits = (u64::BITS - n.saturating_sub(1).leading_zeros()).max(FEWEST_BITS);
        let mut state = key.0;
        let mut next = || {
            state = state.wrapping_add(GAMMA);
            mix(state)
        };
        let rounds = std::array::from_fn(|_| (next() | 1, next()));
        Self { n, mask: u64::MAX >> (u64::BITS - bits), half: bits.div_ceil(2), rounds }
    }

    /// Returns the value for `position`. Both are below `n`.
    pub(super) fn at(&self, position: u64) -> u64 {
        debug_assert!(position < self.n);
        let mut words = self.step([position]);
        while words[0] >= self.n {
            words = self.step(words);
        }
        words[0]
    }

    /// Does one step of the walk for each word. Several words take little longer than one, because no word depends on
    /// another.
    #[inline]
    fn step<const N: usize>(&self, mut words: [u64; N]) -> [u64; N] {
        for (factor, term) in self.rounds {
            words = words.map(|word| {
                let word = word.wrapping_mul(factor).wrapping_add(term) & self.mask;
                word ^ (word >> self.half)
            });
        }
        words
    }
}

/// A permutation for positions in order. It looks up several positions at a time.
#[derive(Clone, Debug)]
pub(super) struct InOrder {
    permutation: Permutation,
    /// The position of the first value.
    from: u64,
    /// The values for the positions from `from` on.
    values: [u64; LANES],
    /// How many of the values were looked up.
    found: usize,
}

/// The number of positions that are looked up together.
const LANES: usize = 16;

impl InOrder {
    pub(super) const fn new(permutation: Permutation) -> Self {
        Self { permutation, from: 0, values: [0; LANES], found: 0 }
    }

    /// Returns the value for `position`. Both are below `n`.
    pub(super) fn at(&mut self, position: u64) -> u64 {
        match usize::try_from(position.wrapping_sub(self.from)) {
            Ok(ahead) if ahead < self.found => self.values[ahead],
            _ => {
                self.look_up(position);
                self.values[0]
            }
        }
    }

    /// Looks up the positions from `from` on.
    fn look_up(&mut self, from: u64) {
        let n = self.permutation.n;
        debug_assert!(from < n);
        let mut words: [[u64; 4]; LANES / 4] =
            std::array::from_fn(|i| std::array::from_fn(|j| from.wrapping_add((4 * i + j) as u64)));
        let mut places: [usize; LANES] = std::array::from_fn(|i| i);
        (self.from, self.found) = (from, usize::try_from(n - from).map_or(LANES, |left| left.min(LANES)));
        // Cycle walking: words that are not below `n` after a step are moved to the front and stepped again.
        let mut left = self.found;
        while left > 0 {
            for four in &mut words[..left.div_ceil(4)] {
                *four = self.permutation.step(*four);
            }
            let words = words.as_flattened_mut();
            let mut kept = 0;
            for i in 0..left {
                let (word, place) = (words[i], places[i]);
                // If the word is not below `n` yet, a later round overwrites this value.
                self.values[place] = word;
                (words[kept], places[kept]) = (word, place);
                kept += usize::from(word >= n);
            }
            left = kept;
        }
    }
}

/// A permutation for positions in any order. A small one is looked up as a whole when it is made,
/// which saves time in windows.
#[derive(Clone, Debug)]
pub(super) struct Table {
    permutation: Permutation,
    values: [u8; TABLE],
}

/// The largest permutation that is looked up as a whole. Its values fit a byte.
const TABLE: usize = 128;

impl Table {
    pub(super) fn new(permutation: Permutation) -> Self {
        let mut values = [0; TABLE];
        if permutation.n <= TABLE as u64 {
            let mut order = InOrder::new(permutation.clone());
            // All values are below `n`, so they fit a byte.
            for (value, position) in values.iter_mut().zip(0..permutation.n) {
                *value = u8::try_from(order.at(position)).unwrap_or_default();
            }
        }
        Self { permutation, values }
    }

    /// Returns the value for `position`. Both are below `n`.
    pub(super) fn at(&self, position: u64) -> u64 {
        match usize::try_from(position) {
            Ok(at) if self.permutation.n <= TABLE as u64 => u64::from(self.values[at]),
            _ => self.permutation.at(position),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::cast_possible_truncation)] // small numbers

    use super::*;
    use proptest::prelude::*;

    fn of(n: u64, seed: u64, epoch: u64) -> Permutation {
        Permutation::new(n, Key::new(seed, epoch))
    }

    fn list(n: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let permutation = of(n, seed, epoch);
        (0..n).map(|position| permutation.at(position)).collect()
    }

    /// Chi squared for each degree of freedom: 1 on average for a fair shuffle.
    fn chi_squared(counts: impl IntoIterator<Item = u64>) -> f64 {
        let counts: Vec<u64> = counts.into_iter().collect();
        let cells = counts.len() as f64;
        let expected = counts.iter().sum::<u64>() as f64 / cells;
        counts.iter().map(|&n| (n as f64 - expected).powi(2) / expected).sum::<f64>() / (cells - 1.0)
    }

    #[test]
    fn a_permutation_for_every_small_n() {
        for n in 1..300 {
            let mut values = list(n, 7, n);
            values.sort_unstable();
            assert!(values.into_iter().eq(0..n), "n = {n}");
        }
    }

    /// The seeds are fixed, so the results never vary. A fair shuffle exceeds each of these bounds
    /// about once in a thousand times.
    #[test]
    fn every_order_of_a_few_is_as_likely_as_another() {
        for (n, orders, bound) in [(2, 2, 10.9), (3, 6, 4.11), (4, 24, 2.17), (5, 120, 1.43)] {
            let mut counts = std::collections::BTreeMap::<Vec<u64>, u64>::new();
            for seed in 0..24_000 {
                *counts.entry(list(n, seed, 0)).or_default() += 1;
            }
            assert_eq!(counts.len(), orders, "n = {n}");
            let found = chi_squared(counts.into_values());
            assert!(found < bound, "n = {n}: {found}");
        }
    }

    #[test]
    fn two_items_go_anywhere() {
        for n in [8_u64, 16, 17, 31] {
            for second in [1, 2, n / 2, n - 1] {
                let mut counts = std::collections::BTreeMap::<[u64; 2], u64>::new();
                for seed in 0..40_000 {
                    let permutation = of(n, seed, 3);
                    *counts.entry([permutation.at(0), permutation.at(second)]).or_default() += 1;
                }
                assert_eq!(counts.len() as u64, n * (n - 1));
                let found = chi_squared(counts.into_values());
                assert!(found < 1.6, "n = {n}, 0 and {second}: {found}");
            }
        }
    }

    #[test]
    fn neighbors_go_apart() {
        for n in [1000, 1024, 4097, 65_536_u64] {
            let seeds = 40;
            let orders: Vec<_> = (0..seeds).map(|seed| list(n, seed, 1)).collect();
            for apart in [1, 2, 3, 8, 64] {
                let mean = orders
                    .iter()
                    .map(|order| {
                        let mut counts = [0_u64; 64];
                        for (one, other) in order.iter().zip(&order[apart..]) {
                            counts[((other + n - one) % n * 64 / n) as usize] += 1;
                        }
                        chi_squared(counts)
                    })
                    .sum::<f64>()
                    / seeds as f64;
                assert!((0.8..1.2).contains(&mean), "n = {n}, {apart} apart: {mean}");
            }
        }
    }

    #[test]
    fn an_epoch_has_its_own_order() {
        let still = |a: &[u64], b: &[u64]| a.iter().zip(b).filter(|(a, b)| a == b).count();
        let order = |seed, epoch| list(1000, seed, epoch);
        // Two unrelated orders agree at one position on average, and at ten or more about once in ten million times.
        assert!(still(&order(3, 0), &order(3, 1)) < 10);
        assert!(still(&order(3, 0), &order(4, 0)) < 10);
        assert!(still(&order(3, 0), &(0..1000).collect::<Vec<_>>()) < 10);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_is_a_bijection(n in 1_u64..5000, seed: u64, epoch: u64) {
            let mut values = list(n, seed, epoch);
            values.sort_unstable();
            prop_assert!(values.into_iter().eq(0..n));
        }

        #[test]
        fn it_stays_below_any_size(n in 1..=u64::MAX, seed: u64, epoch: u64, at: u64) {
            let permutation = of(n, seed, epoch);
            prop_assert!(permutation.at(at % n) < n);
            let mut in_order = InOrder::new(permutation.clone());
            prop_assert!((at % n..n).take(40).all(|at| in_order.at(at) == permutation.at(at)));
            // Two different positions never have the same value.
            prop_assert!(n == 1 || permutation.at(at % n) != permutation.at((at % n + 1) % n));
        }
    }
}
