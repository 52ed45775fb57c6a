//! The types that test code and the driver exchange. Both compile this file.

/// How a violation begins in a report, and how the report's last line begins.
pub(crate) const VIOLATION: &str = "violation: ";
pub(crate) const END: &str = "end: ";

/// Calls of one name fail.
pub(crate) const TARGET_API: u32 = 0;
/// Calls of any name.
pub(crate) const TARGET_CALL: u32 = 1;
/// Work of one kind, or of any.
pub(crate) const TARGET_WORK: u32 = 2;
/// The kinds of work.
pub(crate) const KINDS: [&str; 7] = ["h2d", "d2h", "d2d", "memset", "kernel", "host", "any"];

/// The C form of [`Failure`](crate::Failure), without its name.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawFailure {
    /// `TARGET_API`, `TARGET_CALL` or `TARGET_WORK`.
    pub(crate) target: u32,
    pub(crate) code: u32,
    pub(crate) nth: u64,
    pub(crate) times: u64,
    pub(crate) effect: u32,
}

/// The resources that the driver currently holds for its user, without modules and graphs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Retains of primary contexts that were not released, and created contexts that were not destroyed.
    pub contexts: u64,
    /// Streams that were created and not destroyed; default streams do not count.
    pub streams: u64,
    /// Events that were created and not destroyed.
    pub events: u64,
    /// Page-locked host allocations that were not freed.
    pub host_allocations: u64,
    /// Their bytes.
    pub host_bytes: u64,
    /// Device allocations whose free was not called (an asynchronous free counts from its call).
    pub device_allocations: u64,
    /// Their bytes.
    pub device_bytes: u64,
    /// The most host bytes held at one time since the start.
    pub peak_host_bytes: u64,
    /// The most device bytes held at one time since the start.
    pub peak_device_bytes: u64,
    /// Worker threads: one for each created stream, and one for each default stream that was used. The thread of a
    /// destroyed stream ends when its work is done: see [`Control::drain`](crate::Control::drain).
    pub threads: u64,
}

impl Live {
    /// The resources that were not freed: `self` without peaks and without threads. Threads are left out because a
    /// default stream's thread lasts for the whole run.
    #[must_use]
    pub fn leaked(self) -> Self {
        Self { peak_host_bytes: 0, peak_device_bytes: 0, threads: 0, ..self }
    }
}
