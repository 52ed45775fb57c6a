//! An engine of threads. Each thread does one read after the other.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

use super::{Engine, Read, Reads};
use crate::error::lock;

/// The most threads. With 16, a cloud machine's disk answered a sixth fewer random reads of 4 KiB. Large reads need
/// only 8.
const THREADS: usize = 32;

/// Bytes of a thread's stack. One system call uses little of it, but the stack also holds the program's thread-local
/// memory.
pub(super) const STACK: usize = 256 << 10;

/// A function that reads once at an offset of a file.
pub(super) type ReadAt = fn(&File, &mut [u8], u64) -> io::Result<usize>;

#[derive(Debug)]
pub(super) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    sender: Sender<Ended>,
    ended: Receiver<Ended>,
    begun: Vec<Read>,
}

type Ended = (Read, io::Result<usize>);

#[derive(Debug)]
struct Shared {
    work: Mutex<Work>,
    changed: Condvar,
    read_at: ReadAt,
}

#[derive(Debug, Default)]
struct Work {
    reads: VecDeque<Read>,
    /// Threads that do no read: they wait for one, or will look for one next.
    idle: usize,
    closed: bool,
}

impl Threads {
    /// Creates an engine that has no threads yet. Its threads will read with `read_at`.
    pub(super) fn new(read_at: ReadAt) -> Self {
        let shared = Shared { work: Mutex::default(), changed: Condvar::new(), read_at };
        let (sender, ended) = channel();
        Self { shared: Arc::new(shared), threads: Vec::new(), sender, ended, begun: Vec::new() }
    }

    /// Starts `wanted` threads, or as many as [`THREADS`] and the system allow.
    fn grow(&mut self, wanted: usize) {
        for _ in 0..wanted.min(THREADS - self.threads.len()) {
            let (shared, sender) = (Arc::clone(&self.shared), self.sender.clone());
            let thread = Builder::new().name("twinbuf-read".into()).stack_size(STACK);
            lock(&self.shared.work).idle += 1;
            if let Ok(thread) = thread.spawn(move || shared.run(&sender)) {
                self.threads.push(thread);
            } else {
                // The system starts no more threads: the existing ones do the reads later. Without any, `reap` does.
                lock(&self.shared.work).idle -= 1;
                return;
            }
        }
    }
}

impl Engine for Threads {
    fn begin(&mut self, read: Read, _: &mut Reads) {
        self.begun.push(read);
    }

    fn submit(&mut self, _: &mut Reads) {
        if self.begun.is_empty() {
            return;
        }
        let mut work = lock(&self.shared.work);
        work.reads.extend(self.begun.drain(..));
        let (waiting, idle) = (work.reads.len(), work.idle);
        drop(work);
        for _ in 0..waiting.min(idle) {
            self.shared.changed.notify_one();
        }
        self.grow(waiting.saturating_sub(idle));
    }

    fn reap(&mut self, reads: &mut Reads) {
        while let Ok((read, result)) = self.ended.try_recv() {
            reads.end(read, result);
        }
        if reads.ended.is_empty() && self.threads.is_empty() {
            // The system refuses every thread: do a read on this one.
            let read = lock(&self.shared.work).reads.pop_front();
            if let Some((read, result)) = read.map(|read| self.shared.read(read)) {
                reads.end(read, result);
            }
        }
    }

    fn wait(&mut self, reads: &mut Reads) {
        self.submit(reads);
        self.reap(reads);
        if reads.ended.is_empty() {
            // `recv` returns: at least one thread exists, and threads send every read that they take.
            if let Ok((read, result)) = self.ended.recv() {
                reads.end(read, result);
            }
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut work = lock(&self.shared.work);
        work.closed = true;
        work.reads.clear();
        drop(work);
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // Ignore a thread that has panicked: it holds no read any more.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// What each thread does: takes reads, does them and sends the results, until the engine is dropped.
    fn run(&self, ended: &Sender<Ended>) {
        let mut work = lock(&self.work);
        while !work.closed {
            let Some(read) = work.reads.pop_front() else {
                work = self.changed.wait(work).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            work.idle -= 1;
            drop(work);
            // `send` does not fail: the engine has the receiver, and joins this thread before it drops the receiver.
            let _ = ended.send(self.read(read));
            work = lock(&self.work);
            work.idle += 1;
        }
    }

    fn read(&self, mut read: Read) -> Ended {
        let len = read.len;
        let result = (self.read_at)(&read.file, &mut read.into[..len], read.offset);
        (read, result)
    }
}
