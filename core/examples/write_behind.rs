//! `impl Write` over a thread that writes: one buffer is written while the caller fills the other. When the disk is
//! full, a later `write` or `flush` says so.
//!
//! `cargo run --example write_behind`

use std::io::{self, Read, Write};
use std::{mem, thread};

use twinbuf_core::{HeapRing, Producer};

/// Bytes for the file, or why it failed. Each `write` is a block: put a `BufWriter` around it.
pub(crate) struct WriteBehind(Producer<'static, io::Result<Vec<u8>>>);

impl WriteBehind {
    pub(crate) fn new(mut file: impl Write + Send + 'static) -> Self {
        let (tx, mut rx) = HeapRing::from_fn(2, |_| Ok(Vec::new())).into_handles();
        thread::spawn(move || {
            while let Ok(Some(mut block)) = rx.recv() {
                let Ok(bytes) = &*block else { return };
                let written = if bytes.is_empty() { file.flush() } else { file.write_all(bytes) };
                if let Err(error) = written {
                    *block = Err(error);
                    return block.put_back(); // `rx` goes too: the caller finds the reason
                }
            }
        });
        Self(tx)
    }
}

impl Write for WriteBehind {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let fill = |block: &mut io::Result<Vec<u8>>| {
            let mut buffer = mem::replace(block, Ok(Vec::new())).unwrap_or_default();
            buffer.clear();
            buffer.extend_from_slice(bytes);
            *block = Ok(buffer);
        };
        self.0.fill(fill).map(|()| bytes.len()).map_err(|_closed| {
            let reason = self.0.unread().map(|block| mem::replace(block, Ok(Vec::new())));
            reason.and_then(Result::err).unwrap_or_else(|| io::ErrorKind::BrokenPipe.into()) // said before
        })
    }

    /// Empty blocks, one more than there are slots: the first of them is then done, and all before it.
    fn flush(&mut self) -> io::Result<()> {
        (0..=self.0.depth()).try_for_each(|_| self.write(&[]).map(drop))
    }
}

fn main() -> io::Result<()> {
    let mut to = io::BufWriter::with_capacity(1 << 16, WriteBehind::new(io::sink()));
    println!("{} bytes", io::copy(&mut io::repeat(7).take(1 << 20), &mut to)?);
    to.flush()
}
