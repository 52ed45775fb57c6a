//! One thread or two that read a batch of 1 GiB into its slot: from the page cache, and from the disk.
//!
//! ```sh
//! cargo bench --bench fill [-- FOLDER]    # 2 GiB of files there, and 2 GiB of memory
//! ```

use std::fs::File;
use std::hash::{DefaultHasher, Hasher as _};
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use twinbuf::{BoxError, Loader, Plan, Records};

const RECORD: usize = 1 << 20;
const BATCH: u64 = 1024;
const ROUNDS: usize = 7;

/// Reads both batches; returns seconds for one, and a hash of the bytes.
fn measure(path: &Path, threads: usize, cold: bool) -> Result<(f64, u64), BoxError> {
    let data = Records::open([path], RECORD)?;
    if cold {
        data.evict()?;
    }
    let plan = Plan::builder(data.len()).batch(BATCH).build()?;
    let mut loader =
        Loader::builder(data, plan).fill_threads(threads).overlap(false).host_depth(1).build()?;
    let mut hash = DefaultHasher::new();
    let mut time = 0.0;
    let mut epoch = loader.epoch(0);
    loop {
        let started = Instant::now();
        let Some(batch) = epoch.next() else { break };
        let took = started.elapsed().as_secs_f64();
        // The pages of the slot are new before the second batch.
        time = took;
        hash.write(&batch?);
    }
    Ok((time, hash.finish()))
}

fn main() -> Result<(), BoxError> {
    let folder = std::env::args().skip(1).find(|word| !word.starts_with("--"));
    let folder = tempfile::tempdir_in(folder.unwrap_or_else(|| std::env::temp_dir().display().to_string()))?;
    let path = folder.path().join("data.bin");
    let mut file = File::create(&path)?;
    for block in 0..2 * BATCH {
        let words =
            (0..RECORD as u64 / 8).map(|word| (block << 17 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        file.write_all(&words.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())?;
    }
    file.sync_all()?;
    for (what, cold) in [("from the page cache", false), ("from the disk", true)] {
        let mut times = [const { Vec::new() }; 2];
        let mut hashes = Vec::new();
        for round in 0..2 * ROUNDS {
            let threads = 1 + (round + round / 2) % 2;
            let (time, hash) = measure(&path, threads, cold)?;
            times[threads - 1].push(time);
            hashes.push(hash);
        }
        assert!(hashes.iter().all(|hash| *hash == hashes[0]), "bytes differ");
        times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
        for (threads, times) in (1..).zip(&times) {
            let [low, median, high] = [0, ROUNDS / 2, ROUNDS - 1].map(|at| times[at]);
            println!("{what}, {threads} threads: {median:.3} s [{low:.3}, {high:.3}] for 1 GiB");
        }
        println!("{what}: {:.2} x", times[0][ROUNDS / 2] / times[1][ROUNDS / 2]);
    }
    Ok(())
}
