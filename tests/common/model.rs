//! A small model in a file, for the tests of streams of tensors.

use std::path::PathBuf;

use twinbuf::mmap::Groups;
use twinbuf::stream::{Group, Tensors};

/// Numbers of the layers of a model.
pub const SIZES: [usize; 6] = [40_000, 3, 0, 2_500_000, 70_000, 9];

/// A model of layers in one file: tensor `up` of layer `n` has `sizes[n]` numbers of 16 bits, `n * 1000 + i`, and `down` has
/// four of 32 bits.
pub struct Model {
    _folder: tempfile::TempDir,
    pub path: PathBuf,
    /// The numbers of each layer.
    pub numbers: Vec<Vec<u16>>,
}

impl Model {
    pub fn new(sizes: &[usize]) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("model.safetensors");
        let (mut header, mut data) = (Vec::new(), Vec::new());
        for (layer, &size) in sizes.iter().enumerate() {
            let mut add = |name: &str, dtype: &str, count: usize, bytes: Vec<u8>| {
                let (start, end) = (data.len(), data.len() + bytes.len());
                header.push(format!(
                    r#""m.{layer}.{name}":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[{start},{end}]}}"#
                ));
                data.extend(bytes);
            };
            add("down", "F32", 4, [layer as f32; 4].map(f32::to_le_bytes).concat());
            add("mlp.up", "BF16", size, (0..size).flat_map(|i| number(layer, i).to_le_bytes()).collect());
        }
        let header = format!("{{{}}}", header.join(","));
        let header = format!("{header:width$}", width = header.len().next_multiple_of(8));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        file.extend(data);
        std::fs::write(&path, file).unwrap();
        let numbers = sizes.iter().enumerate();
        let numbers = numbers.map(|(layer, &size)| (0..size).map(|i| number(layer, i)).collect()).collect();
        Self { _folder: folder, path, numbers }
    }

    pub fn groups(&self) -> Groups {
        let layer = |name: &str| name.split('.').nth(1)?.parse::<u32>().ok();
        Tensors::open([&self.path]).unwrap().groups_by(layer).unwrap()
    }

    pub fn check(&self, group: &Group, number: usize) {
        assert_eq!(group.number(), number);
        let up = group.tensor("mlp.up").unwrap().cast::<u16>().unwrap();
        assert!(up == self.numbers[number], "layer {number}");
        let down = group.tensor(&format!("m.{number}.down")).unwrap().cast::<f32>().unwrap();
        assert_eq!(down, [number as f32; 4]);
    }
}

#[allow(clippy::cast_possible_truncation, reason = "a pattern")]
fn number(layer: usize, i: usize) -> u16 {
    (layer * 1000 + i * 7) as u16
}
