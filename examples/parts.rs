//! Rounds of eight games, each played on 1, 2 and 4 threads: the same games, and the median time of a round.
//!
//! `cargo run --release --example parts`; a round is about 20 ms of work, measured out at the start.

use std::time::{Duration, Instant};

use twinbuf::{BoxError, generate};

const PARTS: usize = 8;
const ROUNDS: u64 = 100;

/// A pendulum that is pushed: as many steps of it as asked for, and every thousandth angle.
fn play(start: f64, steps: u64, angles: &mut Vec<f64>) {
    let [mut angle, mut speed] = [start.sin(), 0.0];
    angles.clear();
    for step in 0..steps {
        let push = (3.0 * angle).cos() - angle.sin() - 0.2 * speed;
        (angle, speed) = (angle + 0.001 * speed, speed + 0.001 * push);
        if step % 1000 == 0 {
            angles.push(angle);
        }
    }
}

/// As many steps as a part takes 2.5 ms for, by the fastest of ten trials.
fn steps() -> u64 {
    const TRIAL: u64 = 100_000;
    let trials = (0..10).map(|start| {
        let began = Instant::now();
        play(f64::from(start), TRIAL, &mut Vec::new());
        began.elapsed()
    });
    let nanos = trials.min().map_or(1, |fastest| fastest.as_nanos().max(1));
    u64::try_from(u128::from(TRIAL) * 2_500_000 / nanos).unwrap_or(TRIAL)
}

/// The times of all rounds in order of length, and their games.
fn rounds(threads: usize, steps: u64) -> Result<(Vec<Duration>, Vec<f64>), BoxError> {
    let fill = move |round: u64, part: usize, angles: &mut Vec<f64>| {
        play(round as f64 + part as f64 / PARTS as f64, steps, angles);
        Ok::<(), BoxError>(())
    };
    // One slot, and no overlap: the time of `next` is that of the round.
    let builder = generate::with_parts([vec![Vec::new(); PARTS]], threads, fill);
    let mut generator = builder.overlap(false).build()?;
    let (mut rounds, mut times, mut games) = (generator.rounds(ROUNDS), Vec::new(), Vec::new());
    loop {
        let began = Instant::now();
        let Some(round) = rounds.next() else { break };
        times.push(began.elapsed());
        games.extend(round?.iter().flatten());
    }
    times.sort_unstable();
    Ok((times, games))
}

fn main() -> Result<(), BoxError> {
    let steps = steps();
    let (alone, games) = rounds(1, steps)?;
    let half = alone.len() / 2;
    for threads in [1, 2, 4] {
        let (times, found) = rounds(threads, steps)?;
        assert_eq!(found, games, "the same games on any number of threads");
        let faster = alone[half].as_secs_f64() / times[half].as_secs_f64();
        let [low, high] = [times[half / 2], times[half + half / 2]];
        println!(
            "{threads} threads: {:.1?} a round ({low:.1?} to {high:.1?}), {faster:.2} x faster",
            times[half]
        );
    }
    Ok(())
}
