//! The memory of loaders and streams: slots of the host, or of a device, and a limit for one loader or stream, or for
//! several together.

use std::fmt;
use std::mem;
use std::ops::DerefMut;
use std::ptr::NonNull;
use std::sync::Arc;

use twinbuf_mmap::Buffer;

use super::options::Options;
use super::ring::{BothSides, Ring, Slots};
use crate::error::Error;
use crate::observe::trace::LoaderTrace;
use crate::sync::{Mutex, lock};
use crate::thread::OfProcess;

/// The memory that receives batches and groups of tensors: [`Host`], or `Cuda` with the feature `cuda`. A loader can be
/// built for no other, so no other crate implements this trait.
pub trait Backend: Places + fmt::Debug + 'static {
    /// The ring of slots, filled with units of type `U`.
    type Ring<U: Send + 'static>: Ring<Unit = U, Slot: DerefMut<Target = [u8]>>;
}

/// Makes the slots of a backend.
pub trait Places: Sized {
    /// Returns the number of slots on a device.
    fn device_depth(&self) -> usize {
        0
    }

    /// Makes the two sides of a ring.
    fn sides<U: Send + 'static>(self, memory: Memory<'_>) -> Result<BothSides<Self::Ring<U>>, Error>
    where
        Self: Backend;
}

/// A filled slot of a backend.
pub(crate) type Item<B, U> = <<B as Backend>::Ring<U> as Ring>::Item;

/// The slots that a backend makes.
pub struct Memory<'m> {
    /// Bytes of a slot.
    pub(crate) slot: usize,
    /// Host slots.
    pub(crate) depth: usize,
    /// The memory of the host slots, if there is some already.
    pub(crate) lent: Option<Vec<Buffer>>,
    /// The sum of the memory, spelled out for errors.
    pub(crate) sum: &'m dyn fmt::Display,
    /// The trace that shows the copies to a device.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "for a device"))]
    pub(crate) trace: Option<Arc<LoaderTrace>>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "for a device"))]
    pub(crate) options: &'m Options,
}

/// The default backend: batches and groups stay in host memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Backend for Host {
    type Ring<U: Send + 'static> = Slots<Buffer, U>;
}

impl Places for Host {
    fn sides<U: Send + 'static>(self, memory: Memory<'_>) -> Result<BothSides<Slots<Buffer, U>>, Error> {
        let Memory { slot, depth, lent, sum, .. } = memory;
        let slots = lent.or_else(|| Buffer::several(&vec![slot; depth]));
        Ok(Slots::ring(slots.ok_or_else(|| too_large(sum))?))
    }
}

/// The least memory of a slot: a page of 4 KiB.
pub(crate) const LEAST: usize = 4096;

/// Checks that `count` slots of `bytes` bytes each fit into the memory of the machine and
/// into a ring. `option` is the option that sets their number, and `sum` describes them.
///
/// Swap space and a limit of the process's control group do not count: the first would be slower than no overlap, and the
/// second can change.
pub(crate) fn check_memory(
    option: &'static str,
    count: usize,
    bytes: usize,
    sum: &dyn fmt::Display,
) -> Result<(), Error> {
    /// The most slots of a ring.
    const MOST: usize = 1 << 31;
    let (all, memory) = (count as u128 * bytes as u128, machine_memory());
    if count <= MOST && all <= u128::from(memory) {
        return Ok(());
    }
    let wanted = format!("at most {MOST} slots, in at most {memory} bytes of memory");
    Err(Error::option(option, wanted, format!("{all} bytes: {sum}")))
}

/// The bytes of memory of this machine, or `isize::MAX` if the system does not tell or is neither Linux nor macOS.
fn machine_memory() -> u64 {
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    // SAFETY: sysconf reads constants of the system; it takes no pointer and any name is allowed.
    let [pages, page] = [libc::_SC_PHYS_PAGES, libc::_SC_PAGESIZE].map(|name| unsafe { libc::sysconf(name) });
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    let [pages, page] = [-1_i64; 2];
    let all = u64::try_from(pages).ok().zip(u64::try_from(page).ok());
    let most = isize::MAX.unsigned_abs() as u64;
    all.map_or(most, |(pages, page)| pages.saturating_mul(page).min(most))
}

/// The error of slots that do not fit the memory. `sum` describes them.
pub(crate) fn too_large(sum: &dyn fmt::Display) -> Error {
    Error::option("depth", "slots that fit the memory", sum.to_string())
}

debug!([] Memory['_], |memory| slot: memory.slot, depth: memory.depth);

/// A limit, in bytes, on the memory of one or more loaders and streams. See
/// [`LoaderBuilder::memory_limit`](crate::loader::LoaderBuilder::memory_limit).
///
/// A `u64` passed as a limit applies to one of them. Clones of one `MemoryLimit` are the same limit: those that
/// receive them share it, for example training and validation.
///
/// ```
/// use twinbuf::loader::MemoryLimit;
/// # use twinbuf::{BoxError, Loader, Plan, Records};
/// # fn f(data: Records, plan: Plan, held_out: Records, valid_plan: Plan) -> Result<(), BoxError> {
/// let limit = MemoryLimit::new(1 << 30);
/// let train = Loader::builder(data, plan).memory_limit(&limit).build()?;
/// let valid = Loader::builder(held_out, valid_plan).memory_limit(&limit).build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct MemoryLimit {
    bytes: u64,
    taken: Arc<Mutex<u64>>,
}

impl MemoryLimit {
    /// Creates a limit of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self { bytes, taken: Arc::default() }
    }

    /// Returns the number of bytes in use: by loaders and streams, by their batches and groups, and by buffers from
    /// [`Batch::into_buffer`](crate::Batch::into_buffer).
    #[must_use]
    pub fn taken(&self) -> u64 {
        *lock(&self.taken)
    }

    /// Bytes that are not taken.
    #[cfg(feature = "safetensors")]
    pub(crate) fn left(&self) -> u64 {
        self.bytes.saturating_sub(self.taken())
    }

    /// Takes this many bytes until the result is dropped. `sum` describes their use in the error.
    pub(crate) fn take(self, wanted: u64, sum: &dyn fmt::Display) -> Result<Taken, Error> {
        let mut taken = lock(&self.taken);
        let Some(all) = taken.checked_add(wanted).filter(|&all| all <= self.bytes) else {
            let (sum, limit) = (sum.to_string(), self.bytes);
            return Err(Error::Memory { sum, wanted, limit, taken: *taken });
        };
        *taken = all;
        drop(taken);
        Ok(Taken { limit: self, bytes: wanted })
    }

    /// Returns the limit of this process's environment: the same one as for the loader before, if that asked for the
    /// same number of bytes. A forked process has another limit, because it cannot give back what its parent took.
    pub(crate) fn of_process(bytes: u64) -> Self {
        static LIMIT: OfProcess<Option<MemoryLimit>> = OfProcess::new();
        let mut limit = LIMIT.lock();
        limit.take_if(|limit| limit.bytes != bytes);
        limit.get_or_insert_with(|| Self::new(bytes)).clone()
    }
}

impl From<u64> for MemoryLimit {
    fn from(bytes: u64) -> Self {
        Self::new(bytes)
    }
}

impl From<&Self> for MemoryLimit {
    fn from(limit: &Self) -> Self {
        limit.clone()
    }
}

/// The part of a limit that a loader, a stream or a kept batch has.
#[derive(Debug)]
pub(crate) struct Taken {
    limit: MemoryLimit,
    bytes: u64,
}

/// Takes the memory out of a slot, which gets new memory. Until the result is dropped, it has a part of the limit that
/// the slots were taken from. After an error the memory stays in the slot.
pub(crate) fn take_out(slot: &mut Buffer, slots: Option<&Taken>) -> Result<Buffer, Error> {
    let (bytes, what) = (slot.len(), "new memory for the slot of a batch that is kept");
    let taken = slots.map(|slots| slots.limit.clone().take(bytes as u64, &what)).transpose()?;
    let memory =
        Buffer::untouched(bytes).ok_or_else(|| too_large(&format_args!("one more of {bytes} bytes")))?;
    let mut own = mem::replace(slot, memory);
    let Some(taken) = taken else { return Ok(own) };
    let start = NonNull::from(&mut own[..]).cast();
    // SAFETY: the new buffer owns `own`, which owns the bytes. Moving `own` does not move them, and nothing else reaches
    // it.
    Ok(unsafe { Buffer::lent(start, bytes, (own, taken)) })
}

impl Drop for Taken {
    fn drop(&mut self) {
        *lock(&self.limit.taken) -= self.bytes;
    }
}
