//! What the system does to a process: signals, and the names of its threads.

#![cfg(unix)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::channel;

use common::{Gated, in_order};
use twinbuf::Loader;
use twinbuf::loader::LoaderBuilder;

#[test]
fn signals_during_a_wait_neither_end_it_nor_lose_a_batch() {
    static HANDLED: AtomicU32 = AtomicU32::new(0);
    extern "C" fn count(_: libc::c_int) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: all zeros are a valid `sigaction`; in particular SA_RESTART is off, so waits see EINTR.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = count as extern "C" fn(libc::c_int) as usize;
    // SAFETY: the handler only counts in an atomic; a handler may do that.
    assert_eq!(unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) }, 0);
    // SAFETY: takes no pointer.
    let caller = unsafe { libc::pthread_self() };

    let (open, gate) = channel();
    let mut loader = Loader::builder(Gated(gate), in_order(4, 1)).build().unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..4 {
                // Each batch comes only after the waiting caller has handled 25 signals.
                let enough = HANDLED.load(Ordering::Relaxed) + 25;
                while HANDLED.load(Ordering::Relaxed) < enough {
                    // SAFETY: the caller's thread lives as long as this scope.
                    assert_eq!(unsafe { libc::pthread_kill(caller, libc::SIGUSR1) }, 0);
                    std::thread::yield_now();
                }
                open.send(()).unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        let steps: Vec<_> = loader.epoch(0).map(|batch| batch.unwrap().step()).collect();
        assert_eq!(steps, [0, 1, 2, 3]);
    });
    assert!(done.load(Ordering::Relaxed) && HANDLED.load(Ordering::Relaxed) >= 100);
}

/// The names of this process's threads, as the system reports them.
#[cfg(target_os = "linux")]
fn thread_names() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok()).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn threads_have_the_name_of_their_loader() {
    let build = |name: Option<&str>| {
        let (open, gate) = channel();
        let builder = Loader::builder(Gated(gate), in_order(4, 1));
        let mut loader = name.into_iter().fold(builder, LoaderBuilder::name).build().unwrap();
        // A thread sets its name before it reads.
        let epoch = loader.epoch(0);
        open.send(()).unwrap();
        epoch.take(1).for_each(drop);
        // In this order: the read ends before the loader does.
        (open, loader)
    };
    let _loaders = [build(Some("valid")), build(None), build(Some("a-very-long-name"))];
    let names = thread_names();
    for wanted in ["valid-read\n", "twinbuf-read\n", "a-very-lon-read\n"] {
        assert!(names.iter().any(|name| name == wanted), "{names:?}");
    }
}
