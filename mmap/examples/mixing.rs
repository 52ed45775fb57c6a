//! How well each order mixes a file that is sorted by class, against a shuffle buffer with as much memory.
//!
//! ```sh
//! cargo run --release -p twinbuf-mmap --example mixing -- --train
//! ```
//!
//! No file is read: the orders are computed, and the class of a record is that of its place in the file.

use std::collections::HashSet;
use std::error::Error;

use clap::Parser;
use twinbuf_mmap::{Plan, Shuffle};

/// Prints how many classes are in a batch and in 50 consecutive batches, how many neighbors in the
/// file share a batch, and with `--train` how well a linear model does after one epoch.
#[derive(Parser)]
#[command(name = "mixing")]
struct Args {
    /// Records in the file
    #[arg(long, default_value_t = 1_281_167)]
    records: u64,
    /// Classes, each with as many records, one after the other
    #[arg(long, default_value_t = 1000)]
    classes: u64,
    /// Records in a batch
    #[arg(long, default_value_t = 256)]
    batch: u64,
    /// Records in a chunk
    #[arg(long, default_value_t = 341)]
    chunk: u64,
    /// Chunks in memory
    #[arg(long, default_value_t = 128)]
    window: u64,
    /// Also cut chunks into this many, with as many more of them in memory
    #[arg(long, value_delimiter = ',', default_values_t = [4, 8])]
    parts: Vec<u64>,
    /// Also train a linear model for one epoch, which takes up to a minute for each row
    #[arg(long)]
    train: bool,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let Args { records, batch, chunk, window, .. } = args;
    let memory = window.saturating_mul(chunk).min(records);
    println!(
        "{records} records in {} classes, batches of {batch}, {memory} records in memory ({:.1} %)",
        args.classes,
        memory as f64 * 100.0 / records as f64
    );
    println!(
        "{:<34} {:>15} {:>13} {:>10} {:>9}",
        "order", "classes a batch", "in 50 batches", "neighbors", "accuracy"
    );
    let row = |name: String, order: Vec<u64>| {
        let [one, many] = [1, 50].map(|batches| classes(&args, &order, batches));
        let neighbors = neighbors(&args, &order);
        print!("{name:<34} {one:>15.1} {many:>13.1} {neighbors:>10}");
        let accuracy = args.train.then(|| format!("{:.4}", linear_model(&args, &order)));
        println!(" {:>9}", accuracy.unwrap_or_default());
    };
    row("Shuffle::Full".to_owned(), plan(&args, Shuffle::Full)?);
    for parts in [1].iter().chain(&args.parts) {
        let (records, chunks) = ((chunk / parts).max(1), window.saturating_mul(*parts));
        let shuffle = Shuffle::Window { chunk_records: records, window_chunks: chunks };
        row(format!("Shuffle::Window, {chunks} of {records}"), plan(&args, shuffle)?);
    }
    row("buffer, chunks shuffled before".to_owned(), buffered(&args, memory, true)?);
    row("buffer, files in order".to_owned(), buffered(&args, memory, false)?);
    row("Shuffle::Chunks".to_owned(), plan(&args, Shuffle::Chunks { records: chunk })?);
    Ok(())
}

/// An epoch of a plan.
fn plan(args: &Args, shuffle: Shuffle) -> Result<Vec<u64>, Box<dyn Error>> {
    let plan = Plan::builder(args.records).batch(args.batch).shuffle(shuffle).seed(1).build()?;
    let batches = (0..plan.steps(0)).filter_map(|step| plan.batch(0, step));
    Ok(batches.flat_map(|batch| batch.runs().flatten()).collect())
}

/// An epoch through a shuffle buffer, as `tf.data` (files in order) and `WebDataset` (shards, here chunks, shuffled
/// before) have them: a random record is delivered, and the next record takes its place.
fn buffered(args: &Args, buffer: u64, shuffled: bool) -> Result<Vec<u64>, Box<dyn Error>> {
    let mut random = Random(1);
    let mut chunks: Vec<u64> = (0..args.records.div_ceil(args.chunk)).collect();
    if shuffled {
        random.shuffle(&mut chunks);
    }
    let buffer = usize::try_from(buffer)?;
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
    Ok(order)
}

fn class(args: &Args, record: u64) -> usize {
    usize::try_from(record * args.classes / args.records).unwrap_or(usize::MAX)
}

fn batches<'a>(args: &Args, order: &'a [u64], together: usize) -> std::slice::ChunksExact<'a, u64> {
    order.chunks_exact(usize::try_from(args.batch).map_or(usize::MAX, |batch| batch.saturating_mul(together)))
}

/// Different classes in consecutive batches, on average.
fn classes(args: &Args, order: &[u64], together: usize) -> f64 {
    let count =
        |records: &[u64]| records.iter().map(|&record| class(args, record)).collect::<HashSet<_>>().len();
    let batches = batches(args, order, together);
    batches.clone().map(count).sum::<usize>() as f64 / batches.len() as f64
}

/// Pairs of records that are neighbors in the file and are in one batch.
fn neighbors(args: &Args, order: &[u64]) -> usize {
    let count = |batch: &[u64]| {
        let mut batch = batch.to_vec();
        batch.sort_unstable();
        batch.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count()
    };
    batches(args, order, 1).map(count).sum()
}

/// Numbers in a record, for the linear model.
const INPUTS: usize = 32;

/// The accuracy of a softmax classifier after an epoch of plain gradient descent, on records that it has not seen. A record
/// is its class's center, of normally distributed numbers, and noise with the same deviation.
fn linear_model(args: &Args, order: &[u64]) -> f64 {
    let classes = usize::try_from(args.classes).unwrap_or(usize::MAX);
    let mut random = Random(2);
    let centers: Vec<f32> = (0..classes * INPUTS).map(|_| random.normal()).collect();
    let mut weights = vec![0.0_f32; classes * INPUTS];
    let mut scores = vec![0.0_f32; classes];
    let draw = |class: usize, random: &mut Random| -> [f32; INPUTS] {
        std::array::from_fn(|i| centers[class * INPUTS + i] + random.normal())
    };
    let score = |weights: &[f32], inputs: &[f32; INPUTS], scores: &mut [f32]| {
        for (score, weights) in scores.iter_mut().zip(weights.chunks_exact(INPUTS)) {
            let mut sums = [0.0_f32; 8];
            for (weights, inputs) in weights.chunks_exact(8).zip(inputs.chunks_exact(8)) {
                for i in 0..8 {
                    sums[i] += weights[i] * inputs[i];
                }
            }
            *score = sums.iter().sum();
        }
    };
    let mut gradient = vec![0.0_f32; classes * INPUTS];
    for batch in batches(args, order, 1) {
        gradient.fill(0.0);
        for &record in batch {
            let class = class(args, record);
            let inputs = draw(class, &mut random);
            score(&weights, &inputs, &mut scores);
            let most = scores.iter().copied().fold(f32::MIN, f32::max);
            scores.iter_mut().for_each(|score| *score = (*score - most).exp());
            let sum: f32 = scores.iter().sum();
            for (at, (score, gradient)) in scores.iter().zip(gradient.chunks_exact_mut(INPUTS)).enumerate() {
                let error = score / sum - f32::from(u8::from(at == class));
                // Most classes are out of the question.
                if error.abs() > 1e-6 {
                    gradient.iter_mut().zip(&inputs).for_each(|(gradient, input)| *gradient += error * input);
                }
            }
        }
        let rate = 0.5 / batch.len() as f32;
        weights.iter_mut().zip(&gradient).for_each(|(weight, gradient)| *weight -= rate * gradient);
    }
    let tests = 20 * classes;
    let right = (0..tests).filter(|test| {
        let inputs = draw(test % classes, &mut random);
        score(&weights, &inputs, &mut scores);
        let best = (0..classes).max_by(|&a, &b| scores[a].total_cmp(&scores[b]));
        best == Some(test % classes)
    });
    right.count() as f64 / tests as f64
}

/// `SplitMix64`.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from((u128::from(self.next()) * n as u128) >> 64).unwrap_or(0)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    /// Nearly normally distributed, deviation 1: four uniform numbers.
    fn normal(&mut self) -> f32 {
        let bytes = self.next().to_le_bytes();
        let sum: u32 =
            bytes.chunks_exact(2).map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]]))).sum();
        (sum as f32 / 65536.0 - 2.0) * 3.0_f32.sqrt()
    }
}
