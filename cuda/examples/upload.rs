//! Uploads batches, and copies each once more on the device in place of training.
//!
//! `cargo run --release -p twinbuf-cuda --example upload`. Without a driver it prints one line and exits with 2.

use twinbuf_cuda::{Error, Uploader, context};

const STEPS: u64 = 100;
const BYTES: usize = 4 << 20;

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(2);
    }
}

fn run() -> Result<(), Error> {
    let ctx = context(0)?;
    let driver = |error| Error::Driver { call: "cudarc", code: 0, name: format!("{error:?}") };
    let stream = ctx.new_stream().map_err(driver)?;
    let (mut slots, mut batches) = Uploader::new(&ctx, BYTES).build::<u64>()?;
    let reader = std::thread::spawn(move || {
        for step in 0..STEPS {
            let mut slot = slots.acquire()?;
            slot.fill(u8::try_from(step % 251).unwrap_or_default()); // in place of reading
            slot.commit(BYTES, step)?;
        }
        slots.finish();
        Ok::<(), Error>(())
    });
    let mut weights = stream.alloc_zeros::<f32>(BYTES / 4).map_err(driver)?;
    while let Some(batch) = batches.recv()? {
        // In place of training. Enqueued, not waited for.
        stream.memcpy_dtod(&batch.on::<f32>(&stream)?, &mut weights).map_err(driver)?;
    }
    if let Ok(result) = reader.join() {
        result?;
    }
    let last = stream.clone_dtoh(&weights).map_err(driver)?;
    println!("{STEPS} batches of {BYTES} bytes; the last one holds {:?} ...", last[0].to_le_bytes());
    Ok(())
}
