//! A small model in a file, for the tests of streams of tensors.

use std::path::PathBuf;

use twinbuf::Error;
use twinbuf::mmap::Groups;
use twinbuf::stream::{Group, Tensors};

/// How many numbers each layer of a model has.
pub const SIZES: [usize; 6] = [40_000, 3, 0, 2_500_000, 70_000, 9];

/// A model of layers in one file: tensor `up` of layer `n` has `sizes[n]` numbers of 16 bits, `n * 1000 + i * 7`, and
/// `down` has four of 32 bits.
pub struct Model {
    _folder: tempfile::TempDir,
    pub path: PathBuf,
    /// The numbers of each layer.
    pub numbers: Vec<Vec<u16>>,
}

impl Model {
    pub fn new(sizes: &[usize]) -> Self {
        let (mut tensors, mut data) = (Vec::new(), Vec::new());
        for (layer, &size) in sizes.iter().enumerate() {
            tensors.push((format!("m.{layer}.down"), "F32", [4], 16));
            data.extend([layer as f32; 4].map(f32::to_le_bytes).concat());
            tensors.push((format!("m.{layer}.mlp.up"), "BF16", [size], 2 * size));
            data.extend((0..size).flat_map(|i| number(layer, i).to_le_bytes()));
        }
        let (folder, path) = super::written("model.safetensors", twinbuf_testing::safetensors(tensors, data));
        let numbers = sizes.iter().enumerate();
        let numbers = numbers.map(|(layer, &size)| (0..size).map(|i| number(layer, i)).collect()).collect();
        Self { _folder: folder, path, numbers }
    }

    pub fn groups(&self) -> Groups {
        let layer = |name: &str| name.split('.').nth(1)?.parse::<u32>().ok();
        Tensors::open([&self.path]).unwrap().groups_by(layer).unwrap()
    }

    /// Checks that these are the groups of these numbers.
    pub fn check_all(
        &self,
        groups: impl Iterator<Item = Result<Group, Error>>,
        numbers: impl Iterator<Item = usize>,
    ) {
        let mut numbers = numbers.into_iter();
        groups.for_each(|group| self.check(&group.unwrap(), numbers.next().unwrap()));
        assert_eq!(numbers.next(), None);
    }

    pub fn check(&self, group: &Group, number: usize) {
        assert_eq!(group.number(), number);
        let up = group.tensor("mlp.up").unwrap().cast::<u16>().unwrap();
        assert!(up == self.numbers[number], "layer {number}");
        let down = group.tensor(&format!("m.{number}.down")).unwrap().cast::<f32>().unwrap();
        assert_eq!(down, [number as f32; 4]);
    }
}

/// Number `i` of a layer's tensor `up`.
#[allow(clippy::cast_possible_truncation, reason = "a pattern")]
pub fn number(layer: usize, i: usize) -> u16 {
    (layer * 1000 + i * 7) as u16
}
