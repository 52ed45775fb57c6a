//! `impl Read` over a thread that reads ahead: it fills one block while the caller uses the other.
//!
//! `cargo run --example read_ahead`

use std::io::{self, Cursor, Read};
use std::thread;

use twinbuf_core::{Closed, Consumer, HeapRing, KeptSlot};

/// Bytes, and then the error that followed them.
type Block = (Cursor<Vec<u8>>, Option<io::Error>);

pub(crate) struct ReadAhead {
    rx: Consumer<'static, Block>,
    /// The block in use.
    block: Option<KeptSlot<'static, Block>>,
}

impl ReadAhead {
    pub(crate) fn new(mut file: impl Read + Send + 'static, block_size: u64) -> Self {
        let (mut tx, rx) = HeapRing::from_fn(2, |_| Block::default()).into_handles();
        thread::spawn(move || {
            while tx.fill(|(bytes, error)| {
                bytes.set_position(0);
                bytes.get_mut().clear();
                *error = file.by_ref().take(block_size).read_to_end(bytes.get_mut()).err();
                error.is_some() || !bytes.get_ref().is_empty() // not yet the end
            })? {}
            tx.finish();
            Ok::<(), Closed>(()) // `Closed`: the caller gave up
        });
        Self { rx, block: None }
    }
}

impl Read for ReadAhead {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some((bytes, error)) = self.block.as_deref_mut() {
                let len = bytes.read(to)?;
                if len > 0 || to.is_empty() {
                    return Ok(len);
                }
                error.take().map_or(Ok(()), Err)?;
            }
            self.block = None; // to be filled again
            match self.rx.recv().map_err(io::Error::other)? {
                Some(block) => self.block = Some(block.keep()),
                None => return Ok(0),
            }
        }
    }
}

fn main() -> io::Result<()> {
    let file = std::fs::File::open(std::env::args().nth(1).unwrap_or("Cargo.toml".into()))?;
    println!("{} bytes", io::copy(&mut ReadAhead::new(file, 1 << 20), &mut io::sink())?);
    Ok(())
}
