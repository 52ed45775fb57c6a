//! Keeps many reads of files in flight. Each read owns its memory until it has ended.
//!
//! A read is queued, then in flight, then ended. [`Queue`] owns the reads that are queued or have ended, and limits how
//! many are in flight. An [`Engine`] owns the reads in flight. There are two engines: [`uring`] on x86-64 and aarch64
//! if the kernel has `io_uring` and permits it; otherwise [`threads`], for example in Docker by default. Threads are as
//! fast, but take more processor time for a read: 15 µs instead of 5 for 4 KiB, 16 instead of 9 for 64 KiB, and as much
//! for 1 MiB (2 vCPUs, AMD EPYC, Linux 6.18, ext4, 2026-11-25; medians of 7 rounds in turn, on a busy machine).

mod threads;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod uring;

#[cfg(test)]
pub(super) mod tests;

use std::collections::VecDeque;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::Buffer;
use crate::file::read_at;
use threads::{STACK, Threads};

/// The most reads in flight. With 64, a cloud machine's disk answered a tenth fewer random reads of 4 KiB; with 128, no
/// more.
const READS: usize = 96;

/// The most bytes in flight, except for a single longer read. With twice as many, that disk answered no more reads of
/// 64 KiB or 1 MiB. A small number is better, because only reads that are not in flight can be taken back.
const BYTES: usize = 8 << 20;

/// Reads that are pushed between two checks for finished reads.
const TOGETHER: usize = 16;

/// How long a drop waits for the reads in flight.
const LEAVE: Duration = Duration::from_millis(500);

/// One read, with the memory it fills.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) file: Arc<File>,
    pub(crate) offset: u64,
    pub(crate) into: Buffer,
    /// The number of bytes to read, at most the length of `into`.
    pub(crate) len: usize,
    /// A number that [`Done`] returns, so that the caller can tell its reads apart.
    pub(crate) tag: u64,
}

/// A read that has ended. It returns the memory, also after an error.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) tag: u64,
    pub(crate) into: Buffer,
    pub(crate) read: io::Result<usize>,
}

/// A queue of reads. They are handed over in the order of [`push`](Self::push) and end in any order.
///
/// Dropping the queue waits for the reads in flight, for [`LEAVE`] at most: a disk may hang. A thread then waits for
/// them and has their memory. If the system starts no thread, the drop waits for all of them. After a `fork`, the child
/// may do nothing with its copy but drop it. That changes nothing that the parent uses, and leaks the memory of the
/// reads in flight.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    reads: Reads,
    /// Created by the first `push`.
    running: Option<Running>,
}

/// The engine of a queue, once there is one.
#[derive(Debug)]
struct Running {
    engine: Box<dyn Engine>,
    /// The process that created the engine.
    process: u32,
}

/// The reads that are queued or have ended, and the number and the bytes of those in flight.
#[derive(Debug, Default)]
struct Reads {
    queued: VecDeque<Read>,
    ended: VecDeque<Done>,
    in_flight: usize,
    bytes: usize,
}

/// Owns the reads in flight. No read is dropped before the system is done with its memory, not even if the engine is
/// dropped.
trait Engine: Debug + Send {
    /// Takes one more read. The engine has at most [`READS`] at a time.
    fn begin(&mut self, read: Read, reads: &mut Reads);

    /// Hands the reads taken since the last call to the system, without waiting.
    fn submit(&mut self, reads: &mut Reads);

    /// Moves the reads that the system has finished to the ended ones.
    fn reap(&mut self, reads: &mut Reads);

    /// Hands the reads taken since the last call to the system, and waits until a read has ended or was requeued. At
    /// least one read is in flight.
    fn wait(&mut self, reads: &mut Reads);

    /// Whether the engine can take reads.
    fn works(&self) -> bool {
        true
    }
}

impl Reads {
    /// Moves a read in flight to the ended ones.
    fn end(&mut self, read: Read, result: io::Result<usize>) {
        self.leave(&read);
        self.ended.push_back(Done { tag: read.tag, into: read.into, read: result });
    }

    /// Moves a read in flight back to the front of the queue, because the system has not taken it or could not run it.
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn requeue(&mut self, read: Read) {
        self.leave(&read);
        self.queued.push_front(read);
    }

    /// Stops counting a read as in flight.
    fn leave(&mut self, read: &Read) {
        self.in_flight -= 1;
        self.bytes -= read.len;
    }

    /// Takes the next read from the queue and counts it as in flight, if the limits allow it.
    fn next(&mut self) -> Option<Read> {
        let len = self.queued.front()?.len;
        let fits = self.in_flight < READS && self.bytes.saturating_add(len) <= BYTES;
        if !fits && self.in_flight > 0 {
            return None;
        }
        self.in_flight += 1;
        self.bytes += len;
        self.queued.pop_front()
    }

    /// Whether so few reads are in flight that it is worth a system call to start more.
    const fn is_low(&self) -> bool {
        self.in_flight <= READS / 4 * 3 && self.bytes <= BYTES / 4 * 3
    }
}

impl Queue {
    /// Queues a read. It starts at the next call of `start`, `poll` or `wait`, or after some more calls of `push`.
    pub(crate) fn push(&mut self, mut read: Read) {
        read.len = read.len.min(read.into.len());
        let Self { reads, running } = self;
        let running =
            running.get_or_insert_with(|| Running { engine: engine(), process: std::process::id() });
        reads.queued.push_back(read);
        // If `push` only queued reads, the disk would be idle while the caller pushes a long list. Starting reads may
        // take a system call, so do it once per `TOGETHER` reads.
        if reads.queued.len() % TOGETHER == 0 {
            running.engine.reap(reads);
            if reads.is_low() {
                running.begin(reads);
                running.engine.submit(reads);
            }
        }
    }

    /// Starts the reads that the limits allow, without waiting.
    pub(crate) fn start(&mut self) {
        let Self { reads, running: Some(running) } = self else { return };
        running.engine.reap(reads);
        running.begin(reads);
        running.engine.submit(reads);
    }

    /// Returns a read that has ended, if there is one, and starts more if few are in flight. Does not wait.
    pub(crate) fn poll(&mut self) -> Option<Done> {
        let Self { reads, running: Some(running) } = self else { return None };
        if reads.ended.is_empty() {
            running.engine.reap(reads);
        }
        let done = reads.ended.pop_front();
        if reads.is_low() {
            running.begin(reads);
        }
        running.engine.submit(reads);
        done
    }

    /// Returns a read that has ended. Waits for one if there is none. Returns `None` if no read is queued or in flight.
    pub(crate) fn wait(&mut self) -> Option<Done> {
        let Self { reads, running: Some(running) } = self else { return None };
        running.engine.reap(reads);
        while reads.ended.is_empty() {
            // The system call that waits also hands over new reads: start even a few.
            running.begin(reads);
            if reads.ended.is_empty() {
                if reads.in_flight == 0 {
                    return None;
                }
                running.engine.wait(reads);
            }
        }
        self.poll()
    }

    /// Removes the queued reads, and returns their tags and memory. The reads in flight stay.
    pub(crate) fn forget_queued(&mut self) -> Vec<(u64, Buffer)> {
        self.reads.queued.drain(..).map(|read| (read.tag, read.into)).collect()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let Some(running) = self.running.take() else { return };
        if running.process != std::process::id() {
            // Leak the engine in a forked child: its ring, its threads and the locks that they held are the parent's.
            return std::mem::forget(running);
        }
        if self.reads.in_flight > 0 {
            let (ends, ended) = channel::<()>();
            let wait = move || drop((running, ends)); // in this order
            // If the system starts no thread, `wait` is dropped, and that waits.
            let thread = Builder::new().name("twinbuf-read".into()).stack_size(STACK).spawn(wait);
            if ended.recv_timeout(LEAVE) == Err(RecvTimeoutError::Disconnected) {
                let _ = thread.map(JoinHandle::join);
            }
        }
    }
}

impl Running {
    /// Gives the engine the reads that the limits allow. Replaces an engine that no longer works by threads, once it
    /// has no read.
    fn begin(&mut self, reads: &mut Reads) {
        if !self.engine.works() {
            if reads.in_flight > 0 {
                return;
            }
            self.engine = Box::new(Threads::new(read_at));
        }
        while let Some(read) = reads.next() {
            self.engine.begin(read, reads);
        }
    }
}

/// Creates the engine that takes the least processor time of those that the system permits.
fn engine() -> Box<dyn Engine> {
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    if let Ok(uring) = uring::Uring::new() {
        return Box::new(uring);
    }
    Box::new(Threads::new(read_at))
}
