//! Workers without threads of their own: a thread pool drives two of them, one slot a job.
//!
//! ```text
//! cargo run --release --example driven
//! ```

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use twinbuf::BoxError;
use twinbuf::pipe::{self, Driven, Slots};

type Job = Box<dyn FnOnce() + Send>;

/// Decodes one picture, and posts the job of the next one. It ends when the pipe is closed.
fn decode(mut worker: Driven<Slots<Vec<f32>, u32>>, pool: &Sender<Job>) {
    let Some(mut fill) = worker.next() else { return };
    let (picture, pixels, mut at) = fill.parts();
    pixels.clear(); // what an earlier picture left: memory to reuse
    pixels.extend((0..64_u32).map(|pixel| (*picture * pixel % 256) as f32 / 255.0));
    let bytes = size_of_val(&pixels[..]);
    at.read_bytes(64);
    fill.commit(bytes);
    let others = pool.clone();
    // Fails only if the pool is gone: then nobody waits for a picture.
    let _ = pool.send(Box::new(move || decode(worker, &others)));
}

fn main() -> Result<(), BoxError> {
    let (pool, jobs) = channel::<Job>();
    let jobs = Arc::new(Mutex::new(jobs));
    let next = |jobs: &Mutex<Receiver<Job>>| jobs.lock().ok()?.recv().ok();
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let jobs = jobs.clone();
            thread::spawn(move || {
                while let Some(job) = next(&jobs) {
                    job();
                }
            })
        })
        .collect();

    let mut pipe = pipe::builder(vec![Vec::new(); 4]).driven().driven().build()?;
    for worker in pipe.driven() {
        let others = pool.clone();
        pool.send(Box::new(move || decode(worker, &others))).map_err(|_| "the pool is gone")?;
    }
    drop(pool);
    let mut sum = 0.0;
    for (number, picture) in (0..1000).zip(pipe.items(0..1000)) {
        let picture = picture?; // decoded while the one before was in use
        assert_eq!((*picture.unit(), picture.len()), (number, 64));
        sum += picture.iter().sum::<f32>();
    }
    println!("mean {:.3}", sum / 64_000.0);
    println!("{}", pipe.report());
    pipe.close()?; // the jobs end, and with the last one the pool
    for thread in threads {
        thread.join().map_err(|_| "a job panicked")?;
    }
    Ok(())
}
