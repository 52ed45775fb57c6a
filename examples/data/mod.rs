//! The data set that the examples make for themselves, once: 512 MiB of bytes with something to learn in them.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use twinbuf::BoxError;

const FOLDER: &str = "target/twinbuf/data";
/// Files, and the bytes of each.
const SHARDS: usize = 4;
const SHARD_BYTES: usize = 128 << 20;

/// The data set that this example makes for itself, once: text-like bytes from a seeded Markov chain.
pub(crate) fn made() -> Result<Vec<PathBuf>, BoxError> {
    let folder = Path::new(FOLDER);
    let at = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
    fs::create_dir_all(folder).map_err(|error| at(folder, error))?;
    let mut paths = Vec::new();
    for shard in 0..SHARDS {
        let path = folder.join(format!("shard-{shard}.bin"));
        let whole = fs::metadata(&path).is_ok_and(|found| found.len() == SHARD_BYTES as u64);
        if !whole {
            eprintln!("making {}", path.display());
            make_shard(shard as u64, &path).map_err(|error| at(&path, error))?;
        }
        paths.push(path);
    }
    Ok(paths)
}

fn make_shard(shard: u64, path: &Path) -> io::Result<()> {
    // Written to another name and renamed: a run that is killed leaves no file that looks complete.
    let unfinished = path.with_extension("part");
    let mut random = SplitMix(0x7477_696e);
    // The bytes that follow each byte: three times out of four, one of four that belong to it; otherwise any of the 96.
    let mut follow = [[0u8; 256]; 256];
    for row in &mut follow {
        let often: [u8; 4] = std::array::from_fn(|_| random.symbol());
        for (i, next) in row.iter_mut().enumerate() {
            *next = if i < 192 { often[i / 48] } else { random.symbol() };
        }
    }
    let mut random = SplitMix(shard);
    let mut file = fs::File::create(&unfinished)?;
    let mut block = vec![0u8; 1 << 20];
    let mut last = b' ';
    for _ in 0..SHARD_BYTES / block.len() {
        for bytes in block.chunks_exact_mut(8) {
            for (byte, draw) in bytes.iter_mut().zip(random.next().to_le_bytes()) {
                last = follow[usize::from(last)][usize::from(draw)];
                *byte = last;
            }
        }
        file.write_all(&block)?;
    }
    file.sync_all()?;
    fs::rename(&unfinished, path)
}

/// `SplitMix64` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
struct SplitMix(u64);

impl SplitMix {
    /// One of 96 bytes, from the space on.
    fn symbol(&mut self) -> u8 {
        32 + self.next().to_le_bytes()[7] % 96
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
