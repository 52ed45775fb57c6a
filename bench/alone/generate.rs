//! Data made by code: a simulator that plays while the model trains, in rounds of 7 : 2.5.
//!
//! ```sh
//! cargo bench --bench generate                          # both sides compute
//! cargo bench --bench generate -- --work sleep          # both sides sleep: what the hand-over itself costs
//! cargo bench --bench generate -- --generate-ms 7000 --train-ms 2500 --work sleep   # the full size
//! ```
//!
//! Generation of 7 s to training of 2.5 s is a shape that was published for self-play. One after the other a round
//! takes 9.5; overlapped it cannot take less than the longer of the two, 7: 9.5 / 7 = 1.357 times faster, over very
//! many rounds. Over a few it is less, because the first round's generation and the last one's training have nothing to
//! hide behind. More than that (1.61 was published) needs training and generation of more equal length, or something in
//! addition to overlap.
//!
//! Each is run four ways: in turn and overlapped, freely and in lockstep (every round is played with the weights that
//! the hook copied when the round before was taken). The rounds and the loss are the same in turn and overlapped.
//!
//! * `--work compute` (the default): a damped, driven pendulum is integrated; a linear model of its motion is
//!   trained by SGD. The number of steps is measured out at the start to take the time asked for. The sides
//!   share the machine's memory and its clock, so they slow each other down a little.
//! * `--work spin`: both sides spin for the time, on a core each.
//! * `--work sleep`: both sides sleep for the time.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use twinbuf::observe::Settings;
use twinbuf::{BoxError, Report, generate};

/// A simulator that plays while the model trains.
#[derive(Parser)]
#[command(name = "generate")]
struct Args {
    /// Milliseconds that a round takes to make
    #[arg(long, default_value_t = 70, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    generate_ms: u64,
    /// Milliseconds that a round takes to train on
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    train_ms: u64,
    /// Rounds in a run
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    rounds: u64,
    /// How often everything is run; the fastest of each is shown
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    repeats: u64,
    /// What the two sides do
    #[arg(long, value_enum, default_value_t = Work::Compute)]
    work: Work,
    /// Cargo passes it to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Work {
    Compute,
    Spin,
    Sleep,
}

/// How much work a side has in a round.
#[derive(Clone, Copy)]
enum Amount {
    Steps(usize),
    Spin(Duration),
    Sleep(Duration),
}

/// The motion that the model learns: angle and speed now, and a moment later.
#[derive(Default)]
struct Game {
    moves: Vec<([f32; 2], [f32; 2])>,
}

/// Moves that a game records; the pendulum is integrated on between two of them.
const MOVES: usize = 1024;

/// Plays a game, whose drive depends on the weights it is played with.
fn play(round: u64, weights: [f32; 4], amount: Amount, game: &mut Game) {
    let steps = wait_or_steps(amount, MOVES);
    let drive = 1.0 + weights.iter().sum::<f32>().clamp(-1.0, 1.0) * 0.1;
    #[expect(clippy::cast_precision_loss, reason = "only a start that differs from round to round")]
    let mut now = [(round as f32 * 0.37).sin(), 0.0f32];
    let per_move = steps.div_ceil(MOVES);
    game.moves.clear();
    for _ in 0..MOVES {
        let before = now;
        for _ in 0..per_move {
            let [angle, speed] = now;
            let push = drive * (3.0 * angle).cos() - angle.sin() - 0.2 * speed;
            now = [angle + 0.001 * speed, speed + 0.001 * push];
        }
        game.moves.push((before, now));
    }
}

/// Trains a linear map on the moves; the mean squared error.
fn train(weights: &mut [f32; 4], game: &Game, amount: Amount) -> f32 {
    let steps = wait_or_steps(amount, MOVES);
    let mut error = 0.0;
    for (before, after) in game.moves.iter().cycle().take(steps) {
        for (row, after) in weights.chunks_exact_mut(2).zip(after) {
            let miss = row[0] * before[0] + row[1] * before[1] - after;
            row[0] -= 0.01 * miss * before[0];
            row[1] -= 0.01 * miss * before[1];
            error += miss * miss;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "a mean to read")]
    let mean = error / steps as f32;
    mean
}

/// Waits, if that is what there is to do; says how many steps to compute.
fn wait_or_steps(amount: Amount, least: usize) -> usize {
    match amount {
        Amount::Steps(steps) => return steps.max(least),
        Amount::Spin(time) => {
            let start = Instant::now();
            while start.elapsed() < time {
                std::hint::spin_loop();
            }
        }
        Amount::Sleep(time) => std::thread::sleep(time),
    }
    least
}

/// As many steps as take `time`, by the fastest of a few trials.
fn steps_of(time: Duration, mut work: impl FnMut(usize)) -> usize {
    const TRIAL: usize = 1 << 21;
    let fastest = (0..5).map(|_| {
        let start = Instant::now();
        work(TRIAL);
        start.elapsed()
    });
    let a_step = fastest.min().unwrap_or_default().as_secs_f64() / TRIAL as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number of steps")]
    let steps = (time.as_secs_f64() / a_step) as usize;
    steps.max(1)
}

/// How a run goes, and what came of it.
struct Run {
    overlap: bool,
    lockstep: bool,
    report: Report,
    /// The weights at the end, bit by bit, and the last loss.
    result: ([u32; 4], f32),
}

fn run(args: &Args, amounts: [Amount; 2], overlap: bool, lockstep: bool) -> Result<Run, BoxError> {
    let weights = Mutex::new([0.0f32; 4]);
    // What the simulator plays with. In lockstep the hook brings it up to date; else it stays as it is, because
    // what a free-running simulator would see depends on the moment.
    let players = Arc::new(Mutex::new([0.0f32; 4]));
    let copied = players.clone();
    let [playing, training] = amounts;
    let make = move |round, game: &mut Game| {
        let weights = *copied.lock().unwrap_or_else(PoisonError::into_inner);
        play(round, weights, playing, game);
        Ok::<(), BoxError>(())
    };
    let mut builder = generate(make).overlap(overlap);
    if lockstep {
        builder = builder.before(|_next| {
            *players.lock().unwrap_or_else(PoisonError::into_inner) = *weights.lock().unwrap();
            Ok::<(), BoxError>(())
        });
    }
    let mut generator = builder.build()?;
    let mut loss = 0.0;
    for round in generator.rounds(args.rounds) {
        let round = round?;
        loss = train(&mut weights.lock().unwrap(), &round, training);
    }
    let report = generator.report();
    generator.close()?;
    Ok(Run { overlap, lockstep, report, result: (weights.lock().unwrap().map(f32::to_bits), loss) })
}

fn compare(args: &Args) -> Result<(), BoxError> {
    let times = [Duration::from_millis(args.generate_ms), Duration::from_millis(args.train_ms)];
    let amounts = match args.work {
        Work::Sleep => times.map(Amount::Sleep),
        Work::Spin => times.map(Amount::Spin),
        Work::Compute => {
            let (mut game, mut weights) = (Game::default(), [0.0; 4]);
            let playing = steps_of(times[0], |steps| {
                play(0, std::hint::black_box([0.0; 4]), Amount::Steps(steps), &mut game);
            });
            let training = steps_of(times[1], |steps| {
                std::hint::black_box(train(&mut weights, &game, Amount::Steps(steps)));
            });
            println!("a round: {playing} steps of the pendulum, {training} of SGD");
            [Amount::Steps(playing), Amount::Steps(training)]
        }
    };
    let mut best: Vec<Run> = Vec::new();
    for repeat in 0..args.repeats {
        for (i, (lockstep, overlap)) in
            [(false, false), (false, true), (true, false), (true, true)].into_iter().enumerate()
        {
            let run = run(args, amounts, overlap, lockstep)?;
            if repeat == 0 {
                best.push(run);
            } else {
                if run.result != best[i].result {
                    return Err("two runs of the same kind differ".into());
                }
                if run.report.wall < best[i].report.wall {
                    best[i] = run;
                }
            }
        }
    }

    println!("seconds for {} rounds, the fastest of {}:", args.rounds, args.repeats);
    println!("mode                  wall  generate   train    wait  loss");
    for Run { overlap, lockstep, report, result } in &best {
        let mode = match (overlap, lockstep) {
            (false, false) => "serial",
            (true, false) => "overlap",
            (false, true) => "serial, lockstep",
            (true, true) => "overlap, lockstep",
        };
        println!(
            "{mode:<18} {:>7.3}   {:>7.3} {:>7.3} {:>7.3}  {:.3e}",
            report.wall.as_secs_f64(),
            report.read.busy.as_secs_f64(),
            report.train.busy.as_secs_f64(),
            report.train.waiting.as_secs_f64(),
            result.1,
        );
    }
    for pair in best.chunks(2) {
        let (serial, overlapped) = (&pair[0], &pair[1]);
        if serial.result != overlapped.result {
            return Err("overlap has changed the rounds".into());
        }
        let settings = Settings { overlap: true, ..serial.report.settings() };
        let found = serial.report.predict(settings);
        let foretold = found.map_or(1.0, |found| 1.0 / (1.0 - found.gain()));
        let gain = serial.report.wall.as_secs_f64() / overlapped.report.wall.as_secs_f64();
        println!(
            "{}: overlap is {gain:.3} x faster; replayed {:.3} x",
            if serial.lockstep { "in lockstep" } else { "free" },
            foretold,
        );
    }
    println!("the same rounds and the same loss, in turn and overlapped");
    println!("{}", best[1].report);
    Ok(())
}

fn main() -> ExitCode {
    match compare(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("generate: {error}");
            ExitCode::from(2)
        }
    }
}
