//! The promises of the example `write_behind`.

#[allow(dead_code)]
#[path = "../../examples/write_behind.rs"]
mod example;

use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, Mutex};

use example::WriteBehind;

/// A disk with room for so many bytes.
#[derive(Clone)]
struct Disk(Arc<Mutex<Vec<u8>>>, usize);

impl Disk {
    fn new(room: usize) -> Self {
        Self(Arc::default(), room)
    }
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut disk = self.0.lock().unwrap();
        let len = bytes.len().min(self.1 - disk.len());
        disk.extend(&bytes[..len]);
        if len == 0 { Err(ErrorKind::StorageFull.into()) } else { Ok(len) }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.1 == 777 { Err(ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

#[test]
fn everything_is_written_in_order_once_flushed() {
    let disk = Disk::new(1 << 20);
    let mut file = WriteBehind::new(disk.clone());
    let bytes: Vec<u8> = (0..10_000_u32).map(|i| (i % 251) as u8).collect();
    for part in bytes.chunks(333) {
        assert_eq!(file.write(part).unwrap(), part.len());
    }
    file.flush().unwrap();
    assert!(*disk.0.lock().unwrap() == bytes);
}

#[test]
fn a_full_disk_is_told_once_by_a_later_write_or_by_flush() {
    for block in [1, 10, 100] {
        let mut file = WriteBehind::new(Disk::new(100));
        let error = (0..200).find_map(|_| file.write(&vec![7; block]).err()).expect("longer than the disk");
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        assert_eq!(file.write(&[7]).unwrap_err().kind(), ErrorKind::BrokenPipe, "once");
        assert_eq!(file.flush().unwrap_err().kind(), ErrorKind::BrokenPipe);

        let mut file = WriteBehind::new(Disk::new(block / 2));
        let error = file.write(&vec![7; block]).and_then(|_| file.flush()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
    }
    let mut file = WriteBehind::new(Disk::new(777));
    assert_eq!(file.flush().unwrap_err().kind(), ErrorKind::TimedOut, "of the flush itself");
}
