//! What the system does to a process: signals, the names of its threads, and the memory that is left to it.

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

/// What does not fit the page cache is read past it, with buffers of the reader's own. Without that memory, a part of the model
/// would be read from the disk in each pass though it fits.
#[test]
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn a_stream_counts_the_buffers_of_its_reader_once() {
    use twinbuf::mmap::{Groups, Reader};
    const GROUP: usize = 256 << 20;
    // A file without blocks that is larger than most machines' memory.
    let tensors = (0..2048).map(|group| (group, "U8", [GROUP], GROUP));
    let (_dir, path) = common::written("model.safetensors", twinbuf_testing::safetensors(tensors, []));
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() + 2048 * GROUP as u64).unwrap();
    let groups =
        twinbuf::stream::Tensors::open([&path]).unwrap().groups_by(|name| name.parse::<u32>().ok()).unwrap();
    let choice = twinbuf::stream(groups).build().unwrap().report().choices[0];
    let slots = 2 * GROUP as u64;
    // With more memory, or where no file is read past the page cache, all of it is read through that. With little memory, the
    // buffers are smaller.
    let is_judged = |left: &u64| choice.cached < choice.data && *left > 2 * slots;
    let Some(left) = choice.left.filter(is_judged) else { return };
    let most = left - left / 16 - slots - Reader::<Groups>::MEMORY;
    // Bytes of no group, such as the header, are in the page cache too.
    assert!((most - (1 << 20)..=most).contains(&choice.cached), "wanted {most}, found {choice:?}");
}
