//! The promises of the example `read_ahead`.

#[allow(dead_code)]
#[path = "../../examples/read_ahead.rs"]
mod example;

use std::io::{self, ErrorKind, Read};
use std::sync::mpsc::{Receiver, RecvError, Sender, channel};

use example::ReadAhead;

/// Its first read calls `end`, and all later ones return nothing. It is a file that is open while it exists.
struct Last<F>(Option<F>, #[allow(dead_code)] Sender<()>);

impl<F: FnOnce() -> io::Result<usize>> Read for Last<F> {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        self.0.take().map_or(Ok(0), |end| end())
    }
}

fn last<F: FnOnce() -> io::Result<usize>>(end: F) -> (Last<F>, Receiver<()>) {
    let (open, closed) = channel();
    (Last(Some(end), open), closed)
}

#[test]
fn everything_comes_in_order_whatever_the_sizes() {
    let bytes: Vec<u8> = (0..10_000_u32).map(|i| (i % 251) as u8).collect();
    for (block, at_once) in [(1, 7), (7, 1), (4096, 4096), (1 << 20, 333)] {
        let mut file = ReadAhead::new(io::Cursor::new(bytes.clone()), block);
        let (mut read, mut part) = (Vec::<u8>::new(), vec![0; at_once]);
        while let len @ 1.. = file.read(&mut part).unwrap() {
            read.extend(&part[..len]);
        }
        assert!(read == bytes, "blocks of {block}, read {at_once} at once");
        assert_eq!(file.read(&mut part).unwrap(), 0, "the end stays the end");
    }
}

#[test]
fn an_error_comes_after_what_was_read_before_it_and_once() {
    let (broken, _closed) = last(|| Err(ErrorKind::TimedOut.into()));
    let mut file = ReadAhead::new(io::repeat(7).take(10_000).chain(broken), 4096);
    let mut read = Vec::new();
    assert_eq!(file.read_to_end(&mut read).unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(read, [7; 10_000]);
    assert_eq!(file.read(&mut [0]).unwrap(), 0, "as the file itself");
}

#[test]
fn a_reader_that_gives_up_ends_the_thread() {
    let (end, closed) = last(|| Ok(0));
    let mut file = ReadAhead::new(io::repeat(7).take(u64::MAX - 1).chain(end), 4096);
    file.read_exact(&mut [0; 5000]).unwrap();
    drop(file);
    assert_eq!(closed.recv(), Err(RecvError), "the thread dropped the file");
}

#[test]
fn a_panic_of_the_thread_is_not_the_end() {
    let (panics, _closed) = last(|| std::panic::resume_unwind(Box::new("the source panics")));
    let mut file = ReadAhead::new(io::repeat(7).take(8192).chain(panics), 4096);
    let error = file.read_to_end(&mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("without a finish"), "{error}");
}
