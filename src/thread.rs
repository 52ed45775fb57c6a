//! Helpers for threads: values that must not be dropped in a forked process, or that each process has for itself, thread
//! names, and panic messages.

use std::any::Any;
use std::mem;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The maximum of [`workers`](crate::loader::LoaderBuilder::workers).
pub const MAX_WORKERS: usize = 64;

/// A value that is leaked instead of dropped in a forked process, that is, in another process than the one that created
/// it.
///
/// A forked process does not have the threads that the drop would wait for, and a lock that one of these threads held
/// at the fork is never released there.
#[derive(Debug)]
pub(crate) struct ForkGuard<T> {
    value: Option<T>,
    process: u32,
}

impl<T> ForkGuard<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// Whether this process is not the one that created the value.
    pub(crate) fn is_foreign(&self) -> bool {
        self.process != std::process::id()
    }

    /// Returns the value, or `None` in another process than the one that created it.
    pub(crate) fn into_inner(mut self) -> Option<T> {
        // The drop leaks it in another process.
        if self.is_foreign() { None } else { self.value.take() }
    }
}

impl<T> Deref for ForkGuard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("taken only by what consumes it")
    }
}

impl<T> DerefMut for ForkGuard<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("taken only by what consumes it")
    }
}

impl<T> Drop for ForkGuard<T> {
    fn drop(&mut self) {
        if self.is_foreign() {
            mem::forget(self.value.take());
        }
    }
}

/// A value behind a lock, for a `static`. Each process has its own: at a fork, a thread of the parent may hold the parent's
/// lock, and the forked process does not have that thread.
pub(crate) struct OfProcess<T>(AtomicPtr<ForkGuard<Mutex<T>>>);

impl<T: Default + Send + 'static> OfProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'static, T> {
        // Acquire: of a value that another thread made, its content too, which that thread released.
        let found = self.0.load(Ordering::Acquire);
        // SAFETY: null, or made below and never freed.
        if let Some(own) = unsafe { found.as_ref() }.filter(|found| !found.is_foreign()) {
            return own.lock().unwrap_or_else(PoisonError::into_inner);
        }
        let new = Box::into_raw(Box::new(ForkGuard::new(Mutex::default())));
        // If another thread of this process was first, `new` is leaked, and the next load finds the other one.
        let _ = self.0.compare_exchange(found, new, Ordering::Release, Ordering::Relaxed);
        self.lock()
    }
}

/// Returns the name of a thread: the name of its loader, cut to fit the 15 bytes that Linux keeps, and `row`, its work.
pub(crate) fn name(loader: Option<&str>, row: &str) -> String {
    const MOST: usize = 15;
    let row = row.replace(' ', "-");
    let loader = loader.unwrap_or("twinbuf").replace('\0', "");
    let room = MOST.saturating_sub(row.len() + 1);
    let end = (0..=room.min(loader.len())).rev().find(|&end| loader.is_char_boundary(end)).unwrap_or(0);
    format!("{}-{row}", &loader[..end])
}

/// The processors that this process may use.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs foreign code, a drop for example. Returns the message of its panic.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let message = message(&*panic);
        // The drop of the panic's value is foreign code too. If that panics, leak the value of that panic.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(panic))).map_err(mem::forget);
        message
    })
}

/// Returns the message of a panic.
pub(crate) fn message(panic: &(dyn Any + Send)) -> String {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    panic.downcast_ref::<&str>().copied().or(owned).unwrap_or("(a panic without a message)").to_string()
}
