//! `impl Read` over a thread that reads ahead: one buffer is filled while the caller uses the other.
//!
//! `cargo run --example read_ahead`

use std::io::{self, Read};
use std::thread;

use twinbuf_core::{Closed, Consumer, HeapRing, KeptSlot};

struct Block {
    bytes: Vec<u8>,
    /// How many bytes the thread read, or why it could not. An error comes after everything read before it.
    read: io::Result<usize>,
}

struct ReadAhead {
    rx: Consumer<'static, Block>,
    /// The block in use, and how much of it the caller has.
    block: Option<(KeptSlot<'static, Block>, usize)>,
}

impl ReadAhead {
    fn new(mut file: impl Read + Send + 'static, size: usize) -> Self {
        let block = |_| Block { bytes: vec![0; size], read: Ok(0) };
        let (mut tx, rx) = HeapRing::from_fn(2, block).into_handles();
        thread::spawn(move || {
            while tx.fill(|block| {
                block.read = file.read(&mut block.bytes);
                !matches!(block.read, Ok(0) | Err(_))
            })? {}
            tx.finish();
            Ok::<(), Closed>(()) // `Closed`: the caller gave up, and the file is closed
        });
        Self { rx, block: None }
    }
}

impl Read for ReadAhead {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some((block, used)) = &mut self.block {
                let len = block.read.as_ref().map_or(0, |&len| len);
                let copied = (&block.bytes[*used..len]).read(to)?;
                *used += copied;
                if copied > 0 || to.is_empty() {
                    return Ok(copied);
                }
            }
            self.block = None; // gives the buffer back
            let Some(mut block) = self.rx.recv().map_err(io::Error::other)? else { return Ok(0) };
            std::mem::replace(&mut block.read, Ok(0)).map(|len| block.read = Ok(len))?;
            self.block = Some((block.keep(), 0));
        }
    }
}

fn main() -> io::Result<()> {
    let source = io::repeat(7).take(1 << 20);
    println!("{} bytes", io::copy(&mut ReadAhead::new(source, 1 << 16), &mut io::sink())?);
    Ok(())
}
