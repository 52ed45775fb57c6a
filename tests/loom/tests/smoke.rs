//! x
use loom::sync::{Condvar, Mutex};
use loom::thread;
use twinbuf_core::sync::{AtomicU32, Ordering};
use twinbuf_core::{Ring, Wait};

#[derive(Debug)]
struct Parker { m: Mutex<()>, cv: Condvar }
impl Wait for Parker {
    fn relax(&self, _: u32) -> bool { false }
    fn wait(&self, word: &AtomicU32, expected: u32) {
        let mut g = self.m.lock().unwrap();
        while word.load(Ordering::Relaxed) == expected { g = self.cv.wait(g).unwrap(); }
    }
    fn wake(&self, _: &AtomicU32) { drop(self.m.lock().unwrap()); self.cv.notify_all(); }
}
#[test]
fn fifo() {
    let n = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let m = n.clone();
    let mut b = loom::model::Builder::new();
    b.preemption_bound = Some(3);
    b.check(move || {
        m.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (mut tx, rx) = Ring::with_wait([0, 0], Parker { m: Mutex::new(()), cv: Condvar::new() }).into_handles();
        let h = thread::spawn(move || { for i in 0..3 { tx.fill(|s| Ok::<(), ()>(*s = i)).unwrap(); } tx.finish(); });
        for i in 0..3 { assert_eq!(*rx.recv().unwrap(), i); }
        assert_eq!(rx.recv().err(), Some(twinbuf_core::RecvError::Finished));
        h.join().unwrap();
    });
    println!("{}", n.load(std::sync::atomic::Ordering::Relaxed));
}
#[test]
fn fifo_async() {
    let n = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let m = n.clone();
    let mut b = loom::model::Builder::new();
    b.preemption_bound = Some(2);
    b.check(move || {
        m.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (mut tx, rx) = Ring::with_wait([0], Parker { m: Mutex::new(()), cv: Condvar::new() }).into_handles();
        let h = thread::spawn(move || loom::future::block_on(async { for i in 0..2 { let mut s = tx.acquire_async().await.unwrap(); *s = i; s.commit().unwrap(); } tx.finish(); }));
        loom::future::block_on(async {for i in 0..2 { assert_eq!(*rx.recv_async().await.unwrap(), i); }
        assert_eq!(rx.recv_async().await.err(), Some(twinbuf_core::RecvError::Finished)); });
        h.join().unwrap();
    });
    println!("{}", n.load(std::sync::atomic::Ordering::Relaxed));
}
