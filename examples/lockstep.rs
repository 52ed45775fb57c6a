//! Data made by code from the newest weights: round `n + 1` is made while round `n` is trained on.
//!
//! `cargo run --release --example lockstep`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use twinbuf::{BoxError, generate};

fn main() -> Result<(), BoxError> {
    let weight = AtomicU32::new(1); // what is trained
    let copy = Arc::new(AtomicU32::new(0)); // what plays
    let plays = copy.clone();
    let play = move |round: u64, games: &mut Vec<u64>| {
        games.clear(); // the slot still holds an earlier round
        games.extend((0..4).map(|game| round * 10 + game + u64::from(plays.load(Ordering::Relaxed))));
        Ok::<(), BoxError>(())
    };
    let publish = |_next| {
        copy.store(weight.load(Ordering::Relaxed), Ordering::Relaxed);
        Ok::<(), BoxError>(())
    };
    let mut generator = generate(play).before(publish).build()?;
    for round in generator.rounds(5) {
        println!("{:?}", round?.iter().collect::<Vec<_>>());
        weight.fetch_add(1, Ordering::Relaxed); // train
    }
    Ok(generator.close()?)
}
