//! Many reads of files in flight. Each read owns its memory until it has ended.
//!
//! A read is queued, then in flight, then ended. [`Queue`] keeps those that are queued or have ended and bounds what
//! is in flight; an [`Engine`] owns those in flight. There are two: [`uring`] where the kernel has `io_uring` and permits
//! it, otherwise [`threads`], as in Docker by default. Threads are as fast, but take more of a processor for a read: 15 in
//! place of 5 µs for 4 KiB, 16 in place of 9 for 64 KiB, and as much for 1 MiB (2 vCPUs, AMD EPYC, Linux 6.18,
//! ext4, 2026-11-25; medians of 7 rounds in turn, on a busy machine).

mod threads;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod uring;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::sync::Arc;

use crate::Buffer;
use crate::file::read_at;
use threads::Threads;

/// Most reads in flight. A cloud machine's disk answered a tenth fewer random reads of 4 KiB with 64, and no more with
/// 128.
const READS: usize = 96;

/// Most bytes in flight, of more than one read. It answered no more reads of 64 KiB or 1 MiB with twice as many, and
/// what is not in flight can be taken back.
const BYTES: usize = 8 << 20;

/// Reads that are pushed between two looks at what the disk has finished.
const TOGETHER: usize = 16;

/// One read, with the memory it fills.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) file: Arc<File>,
    pub(crate) offset: u64,
    pub(crate) into: Buffer,
    /// Bytes wanted, at most those of `into`.
    pub(crate) len: usize,
    /// What [`Done`] carries, for the caller to tell the reads apart.
    pub(crate) tag: u64,
}

/// A read that has ended: the memory comes back in any case.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) tag: u64,
    pub(crate) into: Buffer,
    pub(crate) read: io::Result<usize>,
}

/// Reads in push order; they end in any order.
///
/// Dropping it waits for the reads in flight. After a `fork` the child may do nothing with its copy but drop it. That
/// touches nothing that the parent uses, and the memory of the reads in flight leaks.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    reads: Reads,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    engine: Box<dyn Engine>,
    /// The process that has set it up.
    process: u32,
}

/// The reads outside an engine, and how much is inside.
#[derive(Debug, Default)]
struct Reads {
    queued: VecDeque<Read>,
    ended: VecDeque<Done>,
    in_flight: usize,
    bytes: usize,
}

/// Owns the reads in flight: none is dropped before the system is done with its memory, also if the engine is.
trait Engine: Debug + Send {
    /// Takes one more read, of at most [`READS`].
    fn begin(&mut self, read: Read, reads: &mut Reads);

    /// Hands over what has begun, without waiting.
    fn submit(&mut self, reads: &mut Reads);

    /// Ends the reads that the system is done with, without waiting.
    fn reap(&mut self, reads: &mut Reads);

    /// Hands over what has begun and waits until a read has ended or come back. At least one is in flight.
    fn wait(&mut self, reads: &mut Reads);

    /// Whether it takes reads.
    fn works(&self) -> bool {
        true
    }
}

impl Reads {
    /// A read in flight has ended.
    fn end(&mut self, read: Read, result: io::Result<usize>) {
        self.leave(&read);
        self.ended.push_back(Done { tag: read.tag, into: read.into, read: result });
    }

    /// A read in flight could not be handed over, and has not begun after all.
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn requeue(&mut self, read: Read) {
        self.leave(&read);
        self.queued.push_front(read);
    }

    fn leave(&mut self, read: &Read) {
        self.in_flight -= 1;
        self.bytes -= read.len;
    }

    /// The next read to begin, if the limits allow it.
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

    /// Whether enough has ended to make beginning more worth a system call.
    const fn is_low(&self) -> bool {
        self.in_flight <= READS / 4 * 3 && self.bytes <= BYTES / 4 * 3
    }
}

impl Queue {
    /// An empty queue; it sets up its engine at the first push.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Queues a read. It begins at the next call of another kind, or with later ones that are pushed.
    pub(crate) fn push(&mut self, mut read: Read) {
        read.len = read.len.min(read.into.len());
        let Self { reads, running } = self;
        let running = running.get_or_insert_with(|| Running::new(engine()));
        reads.queued.push_back(read);
        // Hand reads over in groups of `TOGETHER`: while a long list is prepared, the disk would be idle.
        if reads.queued.len() % TOGETHER == 0 {
            running.engine.reap(reads);
            if reads.is_low() {
                running.begin(reads);
                running.engine.submit(reads);
            }
        }
    }

    /// Begins the reads that the limits allow, without waiting for any.
    pub(crate) fn start(&mut self) {
        let Self { reads, running: Some(running) } = self else { return };
        running.engine.reap(reads);
        running.begin(reads);
        running.engine.submit(reads);
    }

    /// Returns a read that has ended, without waiting for one, and begins more.
    pub(crate) fn poll(&mut self) -> Option<Done> {
        let Self { reads, running: Some(running) } = self else { return None };
        let done = running.ended(reads);
        if reads.is_low() {
            running.begin(reads);
        }
        running.engine.submit(reads);
        done
    }

    /// Returns a read that has ended, and waits for one if need be. `None` if none is queued or in flight.
    pub(crate) fn wait(&mut self) -> Option<Done> {
        let Self { reads, running: Some(running) } = self else { return None };
        loop {
            let done = running.ended(reads);
            // If this call has to wait, its system call hands over new reads too: begin even a few of them.
            if done.is_none() || reads.is_low() {
                running.begin(reads);
            }
            if done.is_some() {
                running.engine.submit(reads);
                return done;
            }
            if reads.ended.is_empty() {
                if reads.in_flight == 0 {
                    return None;
                }
                running.engine.wait(reads);
            }
        }
    }

    /// Takes back the queued reads, as tag and memory. Those in flight stay.
    pub(crate) fn forget_queued(&mut self) -> Vec<(u64, Buffer)> {
        self.reads.queued.drain(..).map(|read| (read.tag, read.into)).collect()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Leak the engine in a forked child: its ring, its threads and the locks that they held are the parent's.
        if self.running.as_ref().is_some_and(|running| running.process != std::process::id()) {
            std::mem::forget(self.running.take());
        }
    }
}

impl Running {
    fn new(engine: Box<dyn Engine>) -> Self {
        Self { engine, process: std::process::id() }
    }

    fn ended(&mut self, reads: &mut Reads) -> Option<Done> {
        if reads.ended.is_empty() {
            self.engine.reap(reads);
        }
        reads.ended.pop_front()
    }

    /// Gives the engine the reads that the limits allow.
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

/// The best engine that the system permits.
fn engine() -> Box<dyn Engine> {
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    if let Ok(uring) = uring::Uring::new() {
        return Box::new(uring);
    }
    Box::new(Threads::new(read_at))
}
