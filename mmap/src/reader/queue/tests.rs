//! Tests of both engines: the bytes of every read, errors, limits, and what happens to reads in flight.

use std::fs::{self, OpenOptions};

use super::*;

/// Runs a test on each engine that this system has. Threads read with `read_at`.
fn each(read_at: threads::ReadAt, test: impl Fn(Queue)) {
    test(Queue::on(Box::new(Threads::new(read_at))));
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    match uring::Uring::new() {
        Ok(uring) => test(Queue::on(Box::new(uring))),
        Err(error) => println!("not checked: io_uring: {error}"),
    }
}

impl Queue {
    /// Creates a queue with an engine of threads, which read with `read_at`.
    pub(in crate::reader) fn by(read_at: threads::ReadAt) -> Self {
        Self::on(Box::new(Threads::new(read_at)))
    }

    fn on(engine: Box<dyn Engine>) -> Self {
        Self { running: Some(Running { engine, process: std::process::id() }), reads: Reads::default() }
    }
}

fn read(file: &Arc<File>, offset: u64, len: usize, tag: u64) -> Read {
    let mut into = Buffer::new(len).unwrap();
    into.fill(0xEE);
    Read { file: Arc::clone(file), offset, into, len, tag }
}

/// Creates a file of `len` bytes. Each byte differs from those a power of two away.
fn data(len: usize) -> (tempfile::TempDir, Arc<File>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..251).cycle().take(len).collect();
    let path = folder.path().join("data");
    fs::write(&path, &bytes).unwrap();
    (folder, Arc::new(File::open(path).unwrap()), bytes)
}

/// Checks that the read has returned the bytes of `bytes` at `offset`.
fn check(done: &Done, bytes: &[u8], offset: u64, len: usize) {
    let wanted = bytes.get(usize::try_from(offset).unwrap()..).unwrap_or_default();
    let wanted = &wanted[..len.min(wanted.len())];
    assert_eq!(*done.read.as_ref().unwrap(), wanted.len(), "{len} bytes at {offset}");
    assert!(done.into[..wanted.len()] == *wanted, "{len} bytes at {offset}");
    assert!(done.into[wanted.len()..].iter().all(|&byte| byte == 0xEE), "{len} bytes at {offset}");
}

/// Does a thousand reads of a file, many more than may be in flight. Some are large, and some reach past the end of the
/// file or start there.
fn reads_a_file(mut queue: Queue) {
    let (_folder, file, bytes) = data((3 << 20) + 77);
    let mut random = twinbuf_testing::Random(1);
    let mut read_of =
        |most| (random.below(bytes.len() as u64 + 10_000), usize::try_from(random.below(most)).unwrap());
    let asked: Vec<(u64, usize)> =
        (0..1000).map(|number| read_of(if number % 50 == 0 { 2 << 20 } else { 20_000 })).collect();
    let mut seen = vec![false; asked.len()];
    let mut got = |done: Done| {
        let tag = usize::try_from(done.tag).unwrap();
        assert!(!std::mem::replace(&mut seen[tag], true), "{tag} twice");
        check(&done, &bytes, asked[tag].0, asked[tag].1);
    };
    for (tag, &(offset, len)) in asked.iter().enumerate() {
        queue.push(read(&file, offset, len, tag as u64));
        if tag % 7 == 0 {
            queue.start();
        }
        if tag % 3 == 0 {
            queue.poll().into_iter().for_each(&mut got);
        }
        assert!(queue.reads.in_flight <= READS);
        assert!(queue.reads.bytes <= BYTES || queue.reads.in_flight == 1);
    }
    std::iter::from_fn(|| queue.wait()).for_each(&mut got);
    assert!(seen.iter().all(|&seen| seen));
    assert!(queue.poll().is_none() && queue.wait().is_none());
    assert_eq!((queue.reads.in_flight, queue.reads.bytes), (0, 0));
}

#[test]
fn every_byte_is_the_files() {
    each(read_at, reads_a_file);
}

/// Reads start before the last one of a long list is pushed.
#[test]
fn reads_begin_while_others_are_pushed() {
    let (_folder, file, bytes) = data(1000);
    each(read_at, |mut queue| {
        for tag in 1..TOGETHER as u64 {
            queue.push(read(&file, tag, 500, tag));
        }
        assert_eq!((queue.reads.queued.len(), queue.reads.in_flight), (TOGETHER - 1, 0));
        queue.push(read(&file, 0, 500, 0));
        assert_eq!(queue.reads.queued.len(), 0);
        let done: Vec<Done> = std::iter::from_fn(|| queue.wait()).collect();
        assert_eq!(done.len(), TOGETHER);
        done.iter().for_each(|done| check(done, &bytes, done.tag, 500));
    });
}

#[test]
fn what_is_chosen_by_the_first_read_reads_too() {
    let mut queue = Queue::default();
    assert!(queue.running.is_none() && queue.poll().is_none() && queue.wait().is_none());
    queue.start();
    assert!(queue.forget_queued().is_empty());
    reads_a_file(queue);
}

#[test]
fn errors_are_the_systems_and_the_memory_comes_back() {
    let (folder, file, bytes) = data(5000);
    let path = folder.path().join("data");
    let unreadable = Arc::new(OpenOptions::new().append(true).open(path).unwrap());
    each(read_at, |mut queue| {
        for tag in 0..100 {
            let file = if tag % 2 == 0 { &file } else { &unreadable };
            queue.push(read(file, 1000, 3000, tag));
        }
        queue.push(read(&file, u64::MAX, 10, 100));
        let done: Vec<Done> = std::iter::from_fn(|| queue.wait()).collect();
        assert_eq!(done.len(), 101);
        for done in done {
            match done.tag {
                100 => assert!(done.read.is_err() && done.into.len() == 10),
                tag if tag % 2 == 0 => check(&done, &bytes, 1000, 3000),
                _ => {
                    let error = done.read.unwrap_err();
                    #[cfg(unix)]
                    assert_eq!(error.raw_os_error(), Some(libc::EBADF));
                    assert!(done.into.len() == 3000, "{error}");
                }
            }
        }
    });
}

#[test]
fn no_more_is_read_than_the_memory_holds() {
    let (_folder, file, bytes) = data(100);
    each(read_at, |mut queue| {
        queue.push(Read { len: usize::MAX, ..read(&file, 3, 10, 1) });
        check(&queue.wait().unwrap(), &bytes, 3, 10);
        queue.push(Read { len: 4, ..read(&file, 3, 10, 2) });
        check(&queue.wait().unwrap(), &bytes, 3, 4);
    });
}

/// Forks this process. Returns the child's number, or `None` in the child, which must [`leave`].
#[cfg(unix)]
pub(in crate::reader) fn fork() -> Option<libc::pid_t> {
    // SAFETY: takes no pointer. The child leaves by `_exit` and runs nothing of the test harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", io::Error::last_os_error());
    (child > 0).then_some(child)
}

/// Does the work of a child, and ends it.
#[cfg(unix)]
pub(in crate::reader) fn leave(work: impl FnOnce()) -> ! {
    // SAFETY: takes no pointer. It ends a child that hangs.
    unsafe { libc::alarm(600) };
    // A panic would end the child's only thread, and with it the process, as if all were well.
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    // SAFETY: takes no pointer, and does not return.
    unsafe { libc::_exit(i32::from(done.is_err())) }
}

/// Waits for the end of a child, which did its work.
#[cfg(unix)]
pub(in crate::reader) fn ends_well(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: the kernel writes to `status`, and `status` is alive.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status}");
}

/// Reads of a socket. The test decides when they end, because it writes to the socket.
#[cfg(unix)]
mod gated {
    use std::io::Read as _;
    use std::io::Write;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::ptr::NonNull;
    use std::sync::atomic::Ordering::SeqCst;
    use std::sync::atomic::{AtomicBool, AtomicUsize};
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    fn gate() -> (UnixStream, Arc<File>) {
        let (writer, reader) = UnixStream::pair().unwrap();
        (writer, Arc::new(File::from(OwnedFd::from(reader))))
    }

    /// Reads the next bytes of a socket, which has no offsets.
    fn read_next(mut file: &File, out: &mut [u8], _: u64) -> io::Result<usize> {
        file.read(out)
    }

    #[test]
    fn only_wait_waits() {
        each(read_next, |mut queue| {
            let (mut writer, file) = gate();
            queue.push(read(&file, 0, 10, 7));
            for _ in 0..3 {
                queue.start();
                assert!(queue.poll().is_none());
            }
            writer.write_all(b"0123456789").unwrap();
            check(&queue.wait().unwrap(), b"0123456789", 0, 10);
            assert!(queue.wait().is_none());
        });
    }

    #[test]
    fn the_limits_are_kept_and_what_is_beyond_them_comes_back() {
        for (len, pushed, in_flight) in
            [(1000, 150, READS), (1 << 20, 20, 8), (3 << 20, 5, 2), (9 << 20, 3, 1), (0, 150, READS)]
        {
            each(read_next, |mut queue| {
                let (writer, file) = gate();
                (0..pushed).for_each(|tag| queue.push(read(&file, 0, len, tag)));
                queue.start();
                // Reads of no bytes end at once.
                if len > 0 {
                    assert_eq!(queue.reads.in_flight, in_flight);
                    let taken = queue.forget_queued();
                    let tags: Vec<u64> = taken.iter().map(|(tag, _)| *tag).collect();
                    assert_eq!(tags, (in_flight as u64..pushed).collect::<Vec<_>>());
                    assert!(taken.iter().all(|(_, into)| into.len() == len));
                    queue.push(read(&file, 0, len, pushed));
                }
                drop(writer);
                let ended = std::iter::from_fn(|| queue.wait()).map(|done| {
                    assert_eq!(done.read.unwrap(), 0);
                    done.tag
                });
                let mut ended: Vec<u64> = ended.collect();
                ended.sort_unstable();
                let all = if len > 0 { in_flight + 1 } else { 150 };
                assert_eq!(ended.len(), all);
            });
        }
    }

    #[test]
    fn another_thread_sees_the_end_also_when_the_first_is_gone() {
        each(read_next, |mut queue| {
            let (mut writer, file) = gate();
            let mut queue = thread::spawn(move || {
                (0..5).for_each(|tag| queue.push(read(&file, 0, 4, tag)));
                queue.start();
                assert!(queue.poll().is_none());
                queue
            })
            .join()
            .unwrap();
            let (sender, receiver) = channel();
            let waits = thread::spawn(move || {
                sender.send(()).unwrap();
                std::iter::from_fn(|| queue.wait()).collect::<Vec<_>>()
            });
            receiver.recv().unwrap();
            writer.write_all(b"abcdabcdabcdabcdabcd").unwrap();
            let ended = waits.join().unwrap();
            assert_eq!(ended.len(), 5);
            ended.iter().for_each(|done| check(done, b"abcd", 0, 4));
        });
    }

    /// The reads end during the drop, or a disk hangs. The end of a loader must not: its last reader drops the queue.
    #[test]
    fn a_drop_frees_no_memory_that_a_read_fills() {
        static BEGUN: AtomicUsize = AtomicUsize::new(0);
        fn read_and_tell(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
            BEGUN.fetch_add(1, SeqCst);
            read_next(file, out, offset)
        }
        /// Panics if it is dropped before the read can have ended.
        struct Lender(#[expect(dead_code, reason = "owns the memory")] Vec<u8>, Arc<AtomicBool>);
        impl Drop for Lender {
            fn drop(&mut self) {
                assert!(self.1.load(SeqCst), "freed");
            }
        }

        let check = |mut queue: Queue, hangs: bool| {
            let (mut writer, file) = gate();
            let written = Arc::new(AtomicBool::new(false));
            BEGUN.store(0, SeqCst);
            for tag in 0..10 {
                let mut memory = vec![0; 1000];
                let start = NonNull::from(&mut memory[..]).cast();
                let lender = Lender(memory, Arc::clone(&written));
                // SAFETY: the lender owns the memory, and nothing else reaches it.
                let into = unsafe { Buffer::lent(start, 1000, lender) };
                queue.push(Read { file: Arc::clone(&file), offset: 0, into, len: 1000, tag });
            }
            queue.start();
            assert!(queue.poll().is_none());
            // Wait until the threads have begun all ten reads: a drop discards reads that have not begun.
            while format!("{queue:?}").contains("Threads") && BEGUN.load(SeqCst) < 10 {
                thread::yield_now();
            }
            let (sender, receiver) = channel();
            let began = Instant::now();
            let drops = thread::spawn(move || {
                sender.send(()).unwrap();
                drop(queue);
                sender.send(())
            });
            receiver.recv().unwrap();
            // A drop that fails to wait would finish in this time, 20 ms at most: on a busy processor each yield may
            // take long.
            for _ in 0..10_000 {
                assert!(!drops.is_finished() || began.elapsed() >= LEAVE);
                thread::yield_now();
                if began.elapsed() > Duration::from_millis(20) {
                    break;
                }
            }
            if hangs {
                let ended = receiver.recv_timeout(Duration::from_secs(60));
                assert_eq!(ended, Ok(()), "the drop waits for the disk");
                assert!(Arc::strong_count(&file) > 1, "the reads have not ended");
            }
            written.store(true, SeqCst);
            writer.write_all(&[1; 10_000]).unwrap();
            drop(writer);
            let _ = drops.join().unwrap();
            let began = Instant::now();
            while Arc::strong_count(&file) > 1 && began.elapsed() < Duration::from_secs(60) {
                thread::yield_now();
            }
            assert_eq!(Arc::strong_count(&file), 1, "reads that have ended keep the file");
        };
        [false, true].into_iter().for_each(|hangs| each(read_and_tell, |queue| check(queue, hangs)));
    }

    #[test]
    fn a_forked_process_can_drop_its_copy_and_leaves_the_parents_alone() {
        each(read_next, |mut queue| {
            let (mut writer, file) = gate();
            let pushed = READS + 5;
            (0..pushed as u64).for_each(|tag| queue.push(read(&file, 0, 2, tag)));
            queue.start();
            assert!(queue.poll().is_none());
            let Some(child) = fork() else { leave(|| drop(queue)) };
            ends_well(child);
            // The parent's queue still works.
            writer.write_all(&b"xy".repeat(pushed)).unwrap();
            for _ in 0..pushed {
                check(&queue.wait().unwrap(), b"xy", 0, 2);
            }
            assert!(queue.wait().is_none());
        });
    }

    /// Only `io_uring` needs this test: the engine of threads does not notice signals.
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    #[test]
    fn signals_neither_end_a_wait_nor_lose_a_read() {
        static HANDLED: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        extern "C" fn count(_: libc::c_int) {
            HANDLED.fetch_add(1, SeqCst);
        }
        // SAFETY: all zeros are a valid `sigaction`; in particular SA_RESTART is off.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = count as extern "C" fn(libc::c_int) as usize;
        // SAFETY: the handler only counts in an atomic; a handler may do that.
        assert_eq!(unsafe { libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()) }, 0);
        let Ok(uring) = uring::Uring::new() else { return println!("not checked: no io_uring") };
        let mut queue = Queue::on(Box::new(uring));
        let (mut writer, file) = gate();
        // SAFETY: takes no pointer.
        let waiting = unsafe { libc::syscall(libc::SYS_gettid) };
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..3 {
                    let enough = HANDLED.load(SeqCst) + 25;
                    while HANDLED.load(SeqCst) < enough {
                        // SAFETY: takes no pointer.
                        let sent = unsafe {
                            libc::syscall(libc::SYS_tgkill, std::process::id(), waiting, libc::SIGUSR2)
                        };
                        assert_eq!(sent, 0);
                        thread::yield_now();
                    }
                    writer.write_all(b"z").unwrap();
                }
            });
            for tag in 0..3 {
                queue.push(read(&file, 0, 1, tag));
                check(&queue.wait().unwrap(), b"z", 0, 1);
            }
        });
    }

    /// Tests with system calls that are refused, as in containers.
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    mod refused {
        use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

        use super::*;

        /// Refuses system calls from now on, for this thread and those that it starts. Returns `false` if the system
        /// has no filters, as in QEMU.
        #[must_use]
        fn refuse(calls: &[libc::c_long], errno: libc::c_int) -> bool {
            let action = SeccompAction::Errno(errno.try_into().unwrap());
            let arch = std::env::consts::ARCH.try_into().unwrap();
            let rules = calls.iter().map(|&call| (call, Vec::new())).collect();
            let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, arch).unwrap();
            let program: BpfProgram = filter.try_into().unwrap();
            match seccompiler::apply_filter(&program) {
                Err(seccompiler::Error::Seccomp(error) | seccompiler::Error::Prctl(error))
                    if error.raw_os_error() == Some(libc::ENOSYS) =>
                {
                    println!("not checked: no seccomp");
                    false
                }
                done => {
                    done.unwrap();
                    true
                }
            }
        }

        /// Runs a test in a separate thread, because filters cannot be removed.
        fn alone(test: impl FnOnce() + Send + 'static) {
            thread::spawn(test).join().unwrap();
        }

        #[test]
        fn without_io_uring_threads_read() {
            for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter] {
                alone(move || {
                    if !refuse(&[call], libc::EPERM) {
                        return;
                    }
                    let (_folder, file, bytes) = data(100);
                    let mut queue = Queue::default();
                    queue.push(read(&file, 1, 10, 0));
                    assert!(format!("{queue:?}").contains("Threads"), "{queue:?}");
                    check(&queue.wait().unwrap(), &bytes, 1, 10);
                    reads_a_file(queue);
                });
            }
        }

        #[test]
        fn when_calls_are_refused_later_nothing_is_lost() {
            alone(|| {
                let Ok(uring) = uring::Uring::new() else { return println!("not checked: no io_uring") };
                let mut queue = Queue::on(Box::new(uring));
                let (_folder, file, bytes) = data(5000);
                let (mut writer, socket) = gate();
                queue.push(read(&socket, 0, 3, 0));
                queue.start();
                if !refuse(&[libc::SYS_io_uring_enter], libc::EPERM) {
                    return;
                }
                (1..100).for_each(|tag| queue.push(read(&file, tag, 1000, tag)));
                assert!(queue.poll().is_none());
                // The 99 reads that the kernel has not taken stay queued until the one that it has taken ends.
                assert_eq!((queue.reads.in_flight, queue.reads.queued.len()), (1, 99));
                writer.write_all(b"abc").unwrap();
                check(&queue.wait().unwrap(), b"abc", 0, 3);
                let mut tags = vec![];
                while let Some(done) = queue.wait() {
                    check(&done, &bytes, done.tag, 1000);
                    tags.push(done.tag);
                }
                tags.sort_unstable();
                assert_eq!(tags, (1..100).collect::<Vec<_>>());
                assert!(format!("{queue:?}").contains("Threads"), "{queue:?}");

                // Dropping the queue also drops a read that was only pushed.
                queue.push(read(&file, 0, 10, 0));
                drop(queue);
                assert_eq!(Arc::strong_count(&file), 1);
            });
        }

        #[test]
        fn without_threads_the_caller_reads() {
            alone(|| {
                if !refuse(&[libc::SYS_clone3, libc::SYS_clone], libc::EPERM) {
                    return;
                }
                assert!(thread::Builder::new().spawn(|| ()).is_err());
                reads_a_file(Queue::on(Box::new(Threads::new(read_at))));
            });
        }
    }
}
