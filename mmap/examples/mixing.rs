//! How well each order mixes a file that is sorted by class, beside a shuffle buffer over the same file.
//!
//! ```sh
//! cargo run --release -p twinbuf-mmap --example mixing -- --records 65536 --chunk 4096 --window 64
//! ```
//!
//! No file is read: the orders are computed, and the class of a record is that of its place in the file.

use std::collections::HashSet;
use std::error::Error;

use clap::Parser;
use twinbuf_mmap::{Plan, Shuffle};

/// Prints how many classes a batch has, and what else tells a good shuffle from a bad one.
#[derive(Parser)]
#[command(name = "mixing")]
struct Args {
    /// Records in the file
    #[arg(long, default_value_t = 1 << 16)]
    records: u64,
    /// Classes, each with as many records, one after the other
    #[arg(long, default_value_t = 1000)]
    classes: u64,
    /// Records in a batch
    #[arg(long, default_value_t = 256)]
    batch: u64,
    /// Records in a chunk
    #[arg(long, default_value_t = 4096)]
    chunk: u64,
    /// Chunks in a window
    #[arg(long, default_value_t = 64)]
    window: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let Args { records, batch, chunk, window, .. } = args;
    println!("{records} records in {} classes, batches of {batch}, chunks of {chunk}", args.classes);
    println!(
        "{:<32} {:>15} {:>8} {:>14} {:>16}",
        "order", "classes a batch", "of full", "shared batches", "neighbours apart"
    );
    let full = plan(&args, Shuffle::Records)?;
    let best = classes(&args, &full[0]);
    let buffer = usize::try_from(window.saturating_mul(chunk).min(records))?;
    let rows = [
        ("Shuffle::Records".to_owned(), full),
        (
            format!("Shuffle::Window, {window} chunks"),
            plan(&args, Shuffle::Window { records: chunk, chunks: window })?,
        ),
        ("Shuffle::Chunks".to_owned(), plan(&args, Shuffle::Chunks { records: chunk })?),
        (format!("buffer of {buffer}, files in order"), buffered(&args, buffer, false)),
        (format!("buffer of {buffer}, chunks shuffled"), buffered(&args, buffer, true)),
        ("buffer of 1000, chunks shuffled".to_owned(), buffered(&args, 1000, true)),
    ];
    for (name, epochs) in rows {
        let found = classes(&args, &epochs[0]);
        let ratio = found / best;
        let shared = shared(&args, &epochs);
        println!("{name:<32} {found:>15.1} {ratio:>8.3} {shared:>14} {:>16}", apart(&epochs[0]));
    }
    Ok(())
}

/// Two epochs of a plan.
fn plan(args: &Args, shuffle: Shuffle) -> Result<[Vec<u64>; 2], Box<dyn Error>> {
    let plan = Plan::builder(args.records).batch(args.batch).shuffle(shuffle).seed(1).build()?;
    Ok([0, 1].map(|epoch| {
        (0..plan.steps())
            .filter_map(|step| plan.batch(epoch, step))
            .flat_map(|batch| batch.runs().flatten())
            .collect()
    }))
}

/// Two epochs through a shuffle buffer, as `tf.data`'s `shuffle` (files in order) and that of `WebDataset` (shards, here chunks,
/// shuffled before) have them: the next record takes the place of a random one, which is delivered.
fn buffered(args: &Args, buffer: usize, shuffled: bool) -> [Vec<u64>; 2] {
    [0, 1].map(|epoch| {
        let mut random = Random(epoch);
        let mut chunks: Vec<u64> = (0..args.records.div_ceil(args.chunk)).collect();
        if shuffled {
            random.shuffle(&mut chunks);
        }
        let range = |chunk| chunk * args.chunk..args.records.min((chunk + 1) * args.chunk);
        let (mut held, mut order) = (Vec::new(), Vec::new());
        for record in chunks.into_iter().flat_map(range) {
            if held.len() < buffer {
                held.push(record);
            } else {
                let at = random.below(held.len());
                order.push(std::mem::replace(&mut held[at], record));
            }
        }
        random.shuffle(&mut held);
        order.extend(held);
        order
    })
}

/// Different classes in a batch, on average.
fn classes(args: &Args, order: &[u64]) -> f64 {
    let size = usize::try_from(args.batch).unwrap_or(usize::MAX);
    let count = |batch: &[u64]| {
        batch.iter().map(|record| record * args.classes / args.records).collect::<HashSet<_>>()
    };
    let batches = order.chunks_exact(size);
    batches.clone().map(|batch| count(batch).len() as f64).sum::<f64>() / batches.len() as f64
}

/// Batches of the second epoch that hold the same records as one of the first.
fn shared(args: &Args, epochs: &[Vec<u64>; 2]) -> usize {
    let size = usize::try_from(args.batch).unwrap_or(usize::MAX);
    let [first, second] = epochs.each_ref().map(|order| {
        let sorted = |batch: &[u64]| {
            let mut batch = batch.to_vec();
            batch.sort_unstable();
            batch
        };
        order.chunks_exact(size).map(sorted).collect::<HashSet<_>>()
    });
    first.intersection(&second).count()
}

/// The median of the distance in the epoch between records that are neighbours in the file.
fn apart(order: &[u64]) -> u64 {
    let mut places: Vec<(u64, u64)> = order.iter().copied().zip(0..).collect();
    places.sort_unstable();
    let mut apart: Vec<u64> = places.windows(2).map(|pair| pair[0].1.abs_diff(pair[1].1)).collect();
    apart.sort_unstable();
    apart[apart.len() / 2]
}

/// `SplitMix64`: good enough for a buffer.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let product = u128::from(z ^ (z >> 31)) * n as u128;
        usize::try_from(product >> 64).unwrap_or(0)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
