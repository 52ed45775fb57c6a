//! The loader for C and for languages that call C: `include/twinbuf.h` is made from this crate.
//!
//! [README.md](https://github.com/twinbuf/twinbuf/blob/main/capi/README.md) describes it.
#![allow(non_camel_case_types, missing_debug_implementations, reason = "a header of C")]
#![allow(clippy::doc_markdown, clippy::not_unsafe_ptr_arg_deref, reason = "read and called by C alone")]

mod error;
mod table;

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::fmt::Display;
use std::mem::{MaybeUninit, offset_of};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};
use std::{array, ptr, slice};

use twinbuf::loader::{At, Epochs};
use twinbuf::mmap::{Buffer, Cut, ReadMode};
use twinbuf::{Batch, Checkpoint, Error, LastBatch, Loader, Plan, Records, Shuffle};

pub use crate::error::*;
use crate::table::Table;

/// The version of this header. A library with the same major version and at least this minor one runs programs built
/// with it.
pub const TWINBUF_VERSION_MAJOR: u32 = 0;
/// It grows when functions, fields or codes are added.
pub const TWINBUF_VERSION_MINOR: u32 = 1;
/// It grows with each release between these.
pub const TWINBUF_VERSION_PATCH: u32 = 0;
/// The version as one number, which grows with each release. twinbuf_version returns that of the library.
pub const TWINBUF_VERSION: u32 =
    TWINBUF_VERSION_MAJOR * 1_000_000 + TWINBUF_VERSION_MINOR * 1000 + TWINBUF_VERSION_PATCH;

/// The records of files. Any number of threads may use it, and any number of loaders.
pub struct twinbuf_records(());

/// Reads the batches of a plan ahead of their use. One thread at a time may use it, but for twinbuf_steps,
/// twinbuf_cancel and twinbuf_free.
pub struct twinbuf_loader(());

/// Records of `record_bytes` bytes behind `header` bytes.
pub const TWINBUF_FORMAT_RAW: u32 = 0;
/// The rows of `.npy` files.
pub const TWINBUF_FORMAT_NPY: u32 = 1;
/// The tokens of llm.c's files.
pub const TWINBUF_FORMAT_LLM_C: u32 = 2;

/// Files of records. An optional field that is 0 has its default, so begin with `{.size = sizeof(twinbuf_files)}`.
#[repr(C)]
pub struct twinbuf_files {
    /// The size of this struct in the program.
    pub size: usize,
    /// The paths. The files in this order are the data set. May be NULL if `count` is 0, which is TWINBUF_ERROR_FILE.
    pub paths: *const *const c_char,
    /// The number of paths.
    pub count: usize,
    /// TWINBUF_FORMAT_*.
    pub format: u32,
    /// Bytes of a record, at least 1, for TWINBUF_FORMAT_RAW.
    pub record_bytes: usize,
    /// Bytes at the start of each file that are skipped, for TWINBUF_FORMAT_RAW.
    pub header: u64,
    /// For the other formats: a record is `sequence + 1` rows or tokens, and begins `sequence` after the one before it.
    /// With 0 each row or token is a record.
    pub sequence: usize,
}

/// Through the page cache; on Linux, what does not fit in memory goes past it if the files allow that.
pub const TWINBUF_READ_AUTO: u32 = 0;
/// Through the page cache.
pub const TWINBUF_READ_PREAD: u32 = 1;
/// Past the page cache, on Linux. On other systems twinbuf_load returns TWINBUF_ERROR_FILE.
pub const TWINBUF_READ_DIRECT: u32 = 2;

/// The records that do not fill a step of all ranks are omitted.
pub const TWINBUF_LAST_DROP: u32 = 0;
/// They form a smaller last batch, divided among the ranks. A rank may then have a step fewer.
pub const TWINBUF_LAST_KEEP: u32 = 1;
/// They are filled up with the first records of the epoch's order.
pub const TWINBUF_LAST_WRAP: u32 = 2;

/// Which records form which batch, and how they are read. An optional field that is 0 has its default, so begin with
/// `{.size = sizeof(twinbuf_options)}`.
#[repr(C)]
pub struct twinbuf_options {
    /// The size of this struct in the program.
    pub size: usize,
    /// Records in a batch of this rank. At least 1.
    pub batch: u64,
    /// The first record.
    pub first: u64,
    /// The number of records from `first` on. Default: all.
    pub records: u64,
    /// Records in random order if it is not 0. Default: in the order of the files.
    pub shuffle: u32,
    /// TWINBUF_LAST_*: what becomes of the records that do not fill a step of all ranks.
    pub last_batch: u32,
    /// Only with `shuffle`: the shuffle is within a sliding window of so many chunks. Default: all records are
    /// shuffled.
    pub window: u64,
    /// Records in a chunk of the window. At least 1 with `window`, 0 without.
    pub chunk: u64,
    /// With `shuffle`: the same seed gives the same order, on any machine. Without it only 0 is allowed.
    pub seed: u64,
    /// This process: less than `world`.
    pub rank: u64,
    /// Processes that share the records. Default: 1.
    pub world: u64,
    /// If it is not 0, TWINBUF_DEPTH, TWINBUF_WORKERS and other variables of the environment that are set change the
    /// options.
    pub environment: u32,
    /// TWINBUF_READ_*.
    pub read_mode: u32,
    /// The number of reading threads. Default: 1.
    pub workers: usize,
    /// The number of slots. Default: as many as fit 2 MiB in whole pages of 4 KiB, 16 at most; if those are fewer than
    /// the workers plus 2, the workers plus 3. From 16 MiB each on, or with TWINBUF_MEMORY, the workers plus 2. 2 for
    /// one worker with slots of 16 MiB or more, and where TWINBUF_OVERLAP or TWINBUF_BREAKDOWN turns overlap off.
    pub depth: usize,
    /// How long a batch may hold the slot that the loader needs, from the first call of twinbuf_next that finds it
    /// held. Then twinbuf_next returns TWINBUF_ERROR_HELD. Default: 10000.
    pub held_timeout_ms: u64,
}

/// A batch: the slot itself. `size` must be set before twinbuf_next. The caller may write to its bytes, until it
/// releases it.
#[repr(C)]
pub struct twinbuf_batch {
    /// The size of this struct in the program.
    pub size: usize,
    /// The handle. Copies of this struct have the same.
    pub id: usize,
    /// The bytes of the records, one after the other. They begin at a page.
    pub data: *mut u8,
    /// The number of bytes.
    pub len: usize,
    /// The number of records.
    pub records: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The step within the epoch, from 0.
    pub step: u64,
}

/// Memory of the caller for a text, and where a text is.
#[repr(C)]
pub struct twinbuf_text {
    /// The size of this struct in the program.
    pub size: usize,
    /// May be NULL if `capacity` is 0.
    pub bytes: *mut c_char,
    /// The size of the memory, with room for a NUL.
    pub capacity: usize,
    /// The length of the text, without the NUL.
    pub len: usize,
}

/// What records hold. `size` must be set before twinbuf_describe.
#[repr(C)]
pub struct twinbuf_description {
    /// The size of this struct in the program.
    pub size: usize,
    /// The number of records.
    pub count: u64,
    /// Bytes of a record.
    pub record_bytes: u64,
    /// Bytes before the records of the first file.
    pub header: u64,
    /// The type of an element, little-endian, and a NUL: `bytes` for bytes without a type, otherwise `bool`, `u8` to
    /// `u64`, `i8` to `i64`, `f16`, `f32`, `f64`, `c64`, `c128`, or one that a later version adds.
    pub dtype: [c_char; 12],
    /// The number of dimensions of a record. 0: a record is one element.
    pub dimensions: u32,
    /// The elements of a record along each dimension, in C order; the first 8 dimensions.
    pub shape: [u64; 8],
}

/// A struct of the header, with its size as the first field.
///
/// # Safety
///
/// The type is `repr(C)`, its first field is a `usize`, and all its bytes may be 0 or anything else.
unsafe trait Versioned {
    /// A caller's struct has at least so many bytes: those of the first version.
    const LEAST: usize;
}

macro_rules! versioned {
    ($($type:ty: $last:ident $field:ty),*) => {$(
        // SAFETY: integers and pointers, which the library checks before it uses them; `size` is the first.
        unsafe impl Versioned for $type {
            const LEAST: usize = offset_of!($type, $last) + size_of::<$field>();
        }
    )*};
}

versioned!(twinbuf_files: sequence usize, twinbuf_options: held_timeout_ms u64, twinbuf_batch: step u64);
versioned!(twinbuf_text: len usize, twinbuf_description: shape [u64; 8]);

/// What a handle stands for.
enum Entry {
    Records(Arc<Records>),
    Loader(Arc<Shared>),
    Batch(Batch),
    /// A batch that left its slot.
    Kept(#[expect(dead_code, reason = "the caller has its address")] Buffer),
}

static HANDLES: Mutex<Table<Entry>> = Mutex::new(Table { places: Vec::new(), unused: Vec::new() });

/// Locks the table. A panic cannot leave it invalid.
fn handles() -> MutexGuard<'static, Table<Entry>> {
    HANDLES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The loader of a handle.
struct Shared {
    plan: Plan,
    held_timeout: Duration,
    state: Mutex<State>,
    /// Whether the next wait ends. No other memory depends on it, so its accesses are relaxed.
    cancelled: AtomicBool,
}

struct State {
    /// `None` if the loader is closed, while a call has taken it, and after that call has panicked.
    epochs: Option<Epochs<'static>>,
    /// How long the next slot had been held when the caller was last told so.
    told: Duration,
    /// Why there is no further batch, although the epochs are not over.
    failed: Option<Failure>,
}

/// What a loader returns that begins epochs, and what a batch of them comes as.
type Begun = Result<Epochs<'static>, Box<(Loader, Error)>>;
type Next = Poll<Option<Result<Batch, Error>>>;

impl State {
    /// Begins with what `begin` makes of the loader, without the rest of its present epochs.
    fn begin(&mut self, begin: impl FnOnce(Loader) -> Begun) -> Result<i32, Failure> {
        // The loader is closed until it is put back.
        let loader = self.epochs.take().and_then(Epochs::into_front).ok_or_else(closed)?;
        let (epochs, failed) = match begin(loader) {
            Ok(epochs) => (epochs, None),
            Err(both) => (both.0.into_epochs(0..0), Some(both.1.into())),
        };
        (self.epochs, self.failed) = (Some(epochs), failed.clone());
        failed.map_or(Ok(TWINBUF_OK), Err)
    }
}

/// Locks the loader, if no other thread uses it. After a panic under the lock, it counts as in use for ever.
fn lock(loader: &Shared) -> Result<MutexGuard<'_, State>, Failure> {
    let busy = "loader: another thread is inside one of its functions";
    loader.state.try_lock().map_err(|_| Failure::new(TWINBUF_ERROR_BUSY, busy))
}

fn closed() -> Failure {
    Failure::new(TWINBUF_ERROR_CLOSED, "loader: it was closed")
}

fn wrong(option: &str, wanted: &str, found: impl Display) -> Failure {
    Failure::new(TWINBUF_ERROR_OPTION, format!("`{option}`: wanted {wanted}, found {found}"))
}

/// Returns what a number from 0 to 2 stands for.
fn choose<T: Copy>(all: [T; 3], option: &str, number: u32) -> Result<T, Failure> {
    all.get(number as usize).copied().ok_or_else(|| wrong(option, "0 to 2", number))
}

fn records_of(records: *const twinbuf_records) -> Result<Arc<Records>, Failure> {
    handles().with(records.addr(), "records", |entry| {
        if let Some(Entry::Records(found)) = entry { Some(found.clone()) } else { None }
    })
}

fn loader_of(loader: *const twinbuf_loader) -> Result<Arc<Shared>, Failure> {
    handles().with(loader.addr(), "a loader", |entry| {
        if let Some(Entry::Loader(found)) = entry { Some(found.clone()) } else { None }
    })
}

fn check<T>(pointer: *const T, name: &str) -> Result<(), Failure> {
    let null = || Failure::new(TWINBUF_ERROR_NULL, format!("{name}: wanted a pointer, found NULL"));
    if pointer.is_null() { Err(null()) } else { Ok(()) }
}

/// Returns the bytes of a struct of the caller that this version has, and the number of those behind them.
///
/// # Safety
///
/// `pointer` is NULL, or valid for its `size`.
unsafe fn sizes<T: Versioned>(pointer: *const T, name: &str) -> Result<(usize, usize), Failure> {
    // No version is larger, so a size that was not set is found.
    const MOST: usize = 4096;
    check(pointer, name)?;
    // SAFETY: the first field is the size.
    let size = unsafe { pointer.cast::<usize>().read() };
    let ours = size_of::<T>();
    // A size that is no multiple of the alignment cuts a field.
    if (T::LEAST..=MOST).contains(&size) && size % align_of::<T>() == 0 {
        return Ok((size.min(ours), size.saturating_sub(ours)));
    }
    let wrong = format!("{name}: wanted its `size`, {ours} in this version, found {size}");
    Err(Failure::new(TWINBUF_ERROR_SIZE, wrong))
}

/// Copies a struct that the caller passed. Fields that the caller's version does not have become 0; those that this
/// version does not have must be 0.
///
/// # Safety
///
/// `pointer` is NULL, or valid for its `size`.
unsafe fn get<T: Versioned>(pointer: *const T, name: &str) -> Result<T, Failure> {
    // SAFETY: the caller's promise.
    let (known, unknown) = unsafe { sizes(pointer, name) }?;
    let bytes = pointer.cast::<u8>();
    // SAFETY: the struct has so many bytes.
    let unknown = unsafe { slice::from_raw_parts(bytes.wrapping_add(known), unknown) };
    if unknown.iter().any(|&byte| byte != 0) {
        let newer = format!("{name}: wanted 0 behind byte {known}, in fields that only a later version has");
        return Err(Failure::new(TWINBUF_ERROR_SIZE, newer));
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both have `known` bytes, and do not overlap.
    unsafe { ptr::copy_nonoverlapping(bytes, value.as_mut_ptr().cast(), known) };
    // SAFETY: any bytes are a value, by the contract of `Versioned`.
    Ok(unsafe { value.assume_init() })
}

/// Stores a result in a struct of the caller, but for the `size`. Fields that only the caller's version has become 0.
///
/// # Safety
///
/// `out` is NULL, or valid for its `size`.
unsafe fn put<T: Versioned>(out: *mut T, value: &T, name: &str) -> Result<i32, Failure> {
    const SIZE: usize = size_of::<usize>();
    // SAFETY: the caller's promise.
    let (known, unknown) = unsafe { sizes(out, name) }?;
    let (from, to) = (ptr::from_ref(value).cast::<u8>(), out.cast::<u8>());
    // SAFETY: both have `known` bytes, and do not overlap.
    unsafe { ptr::copy_nonoverlapping(from.wrapping_add(SIZE), to.wrapping_add(SIZE), known - SIZE) };
    // SAFETY: the caller's struct has so many bytes.
    unsafe { to.wrapping_add(known).write_bytes(0, unknown) };
    Ok(TWINBUF_OK)
}

/// Stores a handle of `entry` where the caller wants it: a number in the type of a pointer, which nothing follows.
///
/// # Safety
///
/// `out` is NULL, or valid for a write.
unsafe fn give<T>(out: *mut *mut T, entry: Entry) -> Result<i32, Failure> {
    let handle = ptr::without_provenance_mut(handles().insert(entry)?);
    // SAFETY: the caller's promise. What was there is not dropped: it may not be initialized.
    unsafe { out.write(handle) };
    Ok(TWINBUF_OK)
}

/// Writes a text and a NUL to the caller's memory.
///
/// # Safety
///
/// `out` is NULL or valid, and so is its memory.
unsafe fn write(text: serde_json::Result<String>, out: *mut twinbuf_text) -> Result<i32, Failure> {
    let text = text.map_err(|error| Failure::new(TWINBUF_ERROR_OTHER, error.to_string()))?;
    // SAFETY: the caller's promise.
    let (bytes, capacity) = unsafe { get(out, "text") }.map(|out| (out.bytes, out.capacity))?;
    // SAFETY: the caller's promise; `get` has found this field.
    unsafe { (*out).len = text.len() };
    if capacity <= text.len() {
        return Ok(TWINBUF_SHORT);
    }
    check(bytes, "text")?;
    // SAFETY: there is room for the text and the NUL, and the text is the library's own.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), bytes, text.len()) };
    // SAFETY: as above.
    unsafe { bytes.wrapping_add(text.len()).write(0) };
    Ok(TWINBUF_OK)
}

/// Opens files, and stores a handle in `*out`.
///
/// A pointer that is NULL is TWINBUF_ERROR_NULL, a wrong `size` TWINBUF_ERROR_SIZE, a wrong `format`, `record_bytes` or
/// `sequence` TWINBUF_ERROR_OPTION. No file at all, or one that is missing, not a regular file, too short or of another
/// format, or that ends with a part of a record, is TWINBUF_ERROR_FILE. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_open(files: *const twinbuf_files, out: *mut *mut twinbuf_records) -> i32 {
    door(|| {
        // SAFETY: the caller's pointer is NULL or valid.
        let files = unsafe { get(files, "files") }?;
        check(out, "out")?;
        let path = |at| {
            check(files.paths, "paths")?;
            // SAFETY: `at` is less than `count`.
            let path = unsafe { *files.paths.wrapping_add(at) };
            check(path, "path")?;
            // SAFETY: the caller's pointer is to a text that ends with NUL.
            Ok::<_, Failure>(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()))
        };
        let paths = (0..files.count).map(path).collect::<Result<Vec<_>, _>>()?;
        let cut = if files.sequence == 0 { Cut::Rows } else { Cut::sequence(files.sequence) };
        let records = match (files.format, files.record_bytes, files.sequence) {
            (TWINBUF_FORMAT_RAW, 0, _) => Err(wrong("record_bytes", "at least 1", 0))?,
            (TWINBUF_FORMAT_RAW, _, 1..) => Err(wrong("sequence", "0 for raw files", files.sequence))?,
            (TWINBUF_FORMAT_RAW, bytes, _) => Records::options().header(files.header).open(paths, bytes)?,
            (TWINBUF_FORMAT_NPY, ..) => Records::open_npy(paths, cut)?,
            (TWINBUF_FORMAT_LLM_C, ..) => Records::open_llm_c(paths, cut)?,
            (found, ..) => Err(wrong("format", "0 to 2", found))?,
        };
        // SAFETY: the caller's pointer is valid.
        unsafe { give(out, Entry::Records(Arc::new(records))) }
    })
}

/// Returns the version of the library: TWINBUF_VERSION of its own header.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_version() -> u32 {
    TWINBUF_VERSION
}

/// Stores what the records hold in `*out`: their number, size, element type and shape, and the length of the header.
///
/// A pointer that is NULL is TWINBUF_ERROR_NULL, a freed handle TWINBUF_ERROR_HANDLE, a wrong `size`
/// TWINBUF_ERROR_SIZE. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_describe(records: *const twinbuf_records, out: *mut twinbuf_description) -> i32 {
    door(|| {
        let data = records_of(records)?;
        let name = if data.is_typed() { data.dtype().to_string() } else { "bytes".to_string() };
        let dtype =
            array::from_fn(|at| name.as_bytes().get(at).map_or(0, |&byte| c_char::from_ne_bytes([byte])));
        let shape = array::from_fn(|at| data.shape().get(at).map_or(0, |&len| len as u64));
        let dimensions = u32::try_from(data.shape().len()).unwrap_or(u32::MAX);
        let header = data.locate(0).map_or(0, |first| first.offset);
        let (size, count, record_bytes) = (0, data.len(), data.record_bytes() as u64);
        let found = twinbuf_description { size, count, record_bytes, header, dtype, dimensions, shape };
        // SAFETY: the caller's pointer is NULL or valid.
        unsafe { put(out, &found, "out") }
    })
}

/// Returns the number of records, or a TWINBUF_ERROR_* less than 0.
///
/// NULL or a freed handle is an error. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_count(records: *const twinbuf_records) -> i64 {
    door(|| Ok(records_of(records)?.len().try_into().unwrap_or(i64::MAX)))
}

/// Makes a loader, starts its threads, and stores a handle in `*out`. The handle of the records may be freed
/// afterwards.
///
/// A pointer that is NULL is TWINBUF_ERROR_NULL, a freed handle TWINBUF_ERROR_HANDLE, a wrong `size`
/// TWINBUF_ERROR_SIZE. Options that do not fit the records or the memory, and an option or a variable with a wrong
/// value, are TWINBUF_ERROR_OPTION. Files that cannot be read, or not as `read_mode` asks, and a trace that cannot be
/// written are TWINBUF_ERROR_FILE; a thread that cannot start is TWINBUF_ERROR_OTHER. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_load(
    records: *const twinbuf_records,
    options: *const twinbuf_options,
    out: *mut *mut twinbuf_loader,
) -> i32 {
    door(|| {
        let records = records_of(records)?;
        // SAFETY: the caller's pointer is NULL or valid.
        let options = unsafe { get(options, "options") }?;
        check(out, "out")?;
        let plan = plan_of(&records, &options)?;
        let mode =
            choose([ReadMode::Auto, ReadMode::Pread, ReadMode::Direct], "read_mode", options.read_mode)?;
        let held = if options.held_timeout_ms == 0 { 10_000 } else { options.held_timeout_ms };
        let builder = Loader::builder(records, plan.clone()).read_mode(mode);
        // `wait` limits these waits: the loader would end the epochs, and the report would count more of them.
        let builder = builder.workers(options.workers.max(1)).held_timeout(Duration::MAX);
        let builder = if options.depth == 0 { builder } else { builder.depth(options.depth) };
        let builder = if options.environment == 0 { builder } else { builder.from_env()? };
        // No epochs, until `twinbuf_epochs` or `twinbuf_resume` begins some.
        let epochs = Some(builder.build()?.into_epochs(0..0));
        let none = "loader: wanted twinbuf_epochs or twinbuf_resume before twinbuf_next, found no epochs";
        let failed = Some(Failure::new(TWINBUF_ERROR_EPOCHS, none));
        let (state, cancelled) = (State { epochs, told: Duration::ZERO, failed }, AtomicBool::new(false));
        let (state, held_timeout) = (Mutex::new(state), Duration::from_millis(held));
        // SAFETY: the caller's pointer is valid.
        unsafe { give(out, Entry::Loader(Arc::new(Shared { plan, held_timeout, state, cancelled }))) }
    })
}

fn plan_of(records: &Records, options: &twinbuf_options) -> Result<Plan, Failure> {
    if options.first >= records.len() {
        return Err(wrong("first", &format!("less than the {} records", records.len()), options.first));
    }
    // The loader refuses a range that ends behind the records.
    let end =
        if options.records == 0 { records.len() } else { options.first.saturating_add(options.records) };
    if options.shuffle == 0 && options.window != 0 || options.window == 0 && options.chunk != 0 {
        return Err(wrong("window", "`shuffle` with it, and `chunk` only with it", options.window));
    }
    let shuffle = match (options.shuffle, options.window) {
        (0, _) => Shuffle::None,
        (_, 0) => Shuffle::Full,
        (_, _) => Shuffle::Window { chunk_records: options.chunk, window_chunks: options.window },
    };
    let last = choose([LastBatch::Drop, LastBatch::Keep, LastBatch::Wrap], "last_batch", options.last_batch)?;
    let plan = Plan::builder(0).records(options.first..end.max(options.first)).batch(options.batch);
    let plan = plan.rank(options.rank, options.world.max(1)).shuffle(shuffle).last_batch(last);
    let plan = if options.seed == 0 { plan } else { plan.seed(options.seed) };
    plan.build().map_err(|error| Failure::new(TWINBUF_ERROR_OPTION, error.to_string()))
}

/// Returns how many batches this rank has in an epoch that begins at its first step, or a TWINBUF_ERROR_* less than 0.
///
/// NULL or a freed handle is an error. Any thread may call it at any time, also after close.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_steps(loader: *const twinbuf_loader, epoch: u64) -> i64 {
    door(|| Ok(loader_of(loader)?.plan.steps(epoch).try_into().unwrap_or(i64::MAX)))
}

/// Begins with epoch `first`, and ends before epoch `end`: at once if that is not greater. With overlap, reading starts
/// at once. What is left of epochs begun earlier is not delivered.
///
/// NULL, after free: an error. After close, and during one: TWINBUF_ERROR_CLOSED. While another thread is inside
/// another function of this loader: TWINBUF_ERROR_BUSY.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_epochs(loader: *mut twinbuf_loader, first: u64, end: u64) -> i32 {
    door(|| {
        let shared = loader_of(loader)?;
        lock(&shared)?.begin(|loader| Ok(loader.into_epochs(first..end)))
    })
}

/// Begins where a checkpoint was taken, and ends before epoch `end`. The batch size and the number of ranks may be
/// others. `from` is what twinbuf_checkpoint wrote: its `bytes` and `len`.
///
/// NULL, after free, after close, two threads: as with twinbuf_epochs; a wrong `size`: TWINBUF_ERROR_SIZE. A text that
/// is not a checkpoint is TWINBUF_ERROR_CHECKPOINT, also after close, and changes nothing. A checkpoint of other
/// records or of another plan is TWINBUF_ERROR_CHECKPOINT too, unless the loader is closed. It ends the epochs begun
/// earlier: twinbuf_next returns this error until new epochs begin.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_resume(loader: *mut twinbuf_loader, from: *const twinbuf_text, end: u64) -> i32 {
    door(|| {
        let shared = loader_of(loader)?;
        // SAFETY: the caller's pointer is NULL or valid.
        let text = unsafe { get(from, "from") }?;
        check(text.bytes, "from")?;
        if text.len > isize::MAX as usize {
            return Err(wrong("from.len", "the length of a checkpoint", text.len));
        }
        // SAFETY: the caller's pointer is valid for so many bytes.
        let bytes = unsafe { slice::from_raw_parts(text.bytes.cast(), text.len) };
        let checkpoint: Checkpoint = serde_json::from_slice(bytes)
            .map_err(|error| Failure::new(TWINBUF_ERROR_CHECKPOINT, format!("not a checkpoint: {error}")))?;
        lock(&shared)?.begin(|loader| loader.into_epochs_from(&checkpoint, end))
    })
}

/// Writes the position after the last batch that was received, and a NUL: what twinbuf_resume reads. Stores its length,
/// without the NUL.
///
/// That of one rank serves all which stop after the same number of batches. With TWINBUF_LAST_KEEP a rank may have a
/// step fewer than rank 0: at the end of an epoch, only rank 0's serves all.
///
/// TWINBUF_SHORT if it does not fit: then nothing but the length is stored. Call it first with a `capacity` of 0 to
/// learn the length. NULL, a wrong `size`, after free, after close, two threads: as with twinbuf_resume.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_checkpoint(loader: *const twinbuf_loader, text: *mut twinbuf_text) -> i32 {
    door(|| {
        let checkpoint = lock(&*loader_of(loader)?)?.epochs.as_ref().ok_or_else(closed)?.checkpoint();
        // SAFETY: the caller's promise is that of this function.
        unsafe { write(serde_json::to_string(&checkpoint), text) }
    })
}

/// Waits for the next batch and stores it in `*batch`: TWINBUF_OK. TWINBUF_END if all batches of the epochs came; this
/// repeats. TWINBUF_PENDING if none is ready within `wait_ms` milliseconds. With 0 it does not wait, with UINT64_MAX it
/// waits without a limit. A read that the call does itself, of files in memory or with TWINBUF_OVERLAP=0, has no limit.
///
/// An error of a read comes after all batches that precede it in the epochs, and then from each call until new epochs
/// begin. So TWINBUF_END means that no batch is missing. TWINBUF_ERROR_HELD comes if a batch that was not released
/// holds the slot that the loader needs: see `held_timeout_ms`. TWINBUF_ERROR_CANCELLED comes after twinbuf_cancel.
/// These two end no epochs, and a later call goes on with the next batch. TWINBUF_ERROR_EPOCHS if no epochs were begun.
/// `*batch` changes only if a batch was received. NULL, a wrong `size`, after free, after close, two threads: an error
/// that ends no epochs.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_next(loader: *mut twinbuf_loader, batch: *mut twinbuf_batch, wait_ms: u64) -> i32 {
    door(|| {
        let shared = loader_of(loader)?;
        // SAFETY: the caller's pointer is NULL or valid.
        unsafe { sizes(batch, "batch") }?;
        let mut state = lock(&shared)?;
        let State { epochs, told, failed } = &mut *state;
        let epochs = epochs.as_mut().ok_or_else(closed)?;
        failed.clone().map_or(Ok(()), Err)?;
        let mut found = match wait(&shared, epochs, told, Duration::from_millis(wait_ms))? {
            Poll::Pending => return Ok(TWINBUF_PENDING),
            Poll::Ready(None) => return Ok(TWINBUF_END),
            Poll::Ready(Some(Ok(found))) => found,
            Poll::Ready(Some(Err(error))) => return Err(failed.insert(error.into()).clone()),
        };
        let (epoch, step, records) = (found.epoch(), found.step(), found.plan().len());
        let (data, len) = (found.as_mut_ptr(), found.len());
        // Without a handle this batch is lost, so no later one comes.
        let id =
            handles().insert(Entry::Batch(found)).inspect_err(|full| state.failed = Some(full.clone()))?;
        // SAFETY: the caller's pointer is valid.
        unsafe { put(batch, &twinbuf_batch { size: 0, id, data, len, records, epoch, step }, "batch") }
    })
}

/// Waits for the next batch, in pieces: a cancel ends the wait after the present one, and so does a slot that is held for
/// too long since the caller was `told` so.
fn wait(
    Shared { cancelled, held_timeout, .. }: &Shared,
    epochs: &mut Epochs<'static>,
    told: &mut Duration,
    most: Duration,
) -> Result<Next, Failure> {
    const PIECE: Duration = Duration::from_millis(20);
    let (mut left, mut start) = (most, None);
    loop {
        if cancelled.load(Ordering::Relaxed) && cancelled.swap(false, Ordering::Relaxed) {
            return Err(Failure::new(TWINBUF_ERROR_CANCELLED, "loader: twinbuf_cancel ended the wait"));
        }
        let piece = left.min(PIECE);
        let found = if piece.is_zero() { epochs.try_next() } else { epochs.next_timeout(piece) };
        if found.is_ready() {
            return Ok(found);
        }
        let held = epochs.held_for().unwrap_or_default();
        *told = held.min(*told); // another slot is held
        if held - *told >= *held_timeout {
            *told = held;
            let (next, slots) = (epochs.checkpoint(), epochs.report().settings.depth);
            let at = At { loader: None, epoch: next.epoch(), step: Some(next.step()) };
            return Err(Error::SlotHeld { at, option: "depth", slots }.into());
        }
        // Without a clock before the first piece, in which most batches come.
        left = most.saturating_sub(start.get_or_insert_with(|| Instant::now() - piece).elapsed());
        if left.is_zero() {
            return Ok(found);
        }
    }
}

/// Ends the wait of the thread that is in twinbuf_next, within 20 ms, or that of the next call without another error:
/// it returns TWINBUF_ERROR_CANCELLED, after the end and after new epochs too. No batch is lost, and a later call goes
/// on. Several calls before that count as one. A read that the waiting thread does itself is not cut short.
///
/// NULL, or after free: an error, so cancel before free. After close it does nothing. Any thread may call it at any
/// time.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_cancel(loader: *mut twinbuf_loader) -> i32 {
    door(|| {
        loader_of(loader)?.cancelled.store(true, Ordering::Relaxed);
        Ok(TWINBUF_OK)
    })
}

/// Takes a batch out of its slot, so that it may be kept for long: the loader gets other memory for the slot. The bytes
/// stay where they are.
///
/// A second time it does nothing. NULL, a wrong `size`, a batch that was released, or no memory: an error, and a batch
/// stays as it was. After close and free of the loader it works as before. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_keep(batch: *const twinbuf_batch) -> i32 {
    door(|| {
        // SAFETY: the caller's pointer is NULL or valid.
        let id = unsafe { get(batch, "batch") }?.id;
        handles().with(id, "a batch", |entry| {
            let (kept, done) = match entry.take_if(is_batch)? {
                Entry::Batch(batch) => match batch.into_buffer() {
                    Ok(buffer) => (Entry::Kept(buffer), Ok(TWINBUF_OK)),
                    Err(both) => (Entry::Batch(both.0), Err(both.1.into())),
                },
                kept => (kept, Ok(TWINBUF_OK)),
            };
            *entry = Some(kept);
            Some(done)
        })?
    })
}

/// Gives a batch back. Its bytes may not be used any more.
///
/// NULL and a wrong `size` are errors. A batch that was already released is TWINBUF_ERROR_HANDLE, also if it was
/// released through a copy of the struct. After close and free of the loader it works as before. Any thread may call
/// it; of two that release the same batch, one gets the error.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_release(batch: *const twinbuf_batch) -> i32 {
    // SAFETY: the caller's pointer is NULL or valid.
    door(|| end(unsafe { get(batch, "batch") }?.id, "a batch", is_batch))
}

fn is_batch(entry: &mut Entry) -> bool {
    matches!(entry, Entry::Batch(_) | Entry::Kept(_))
}

/// Ends a handle. What it stood for is dropped when the table is no longer locked.
fn end(id: usize, wanted: &str, is: impl FnOnce(&mut Entry) -> bool) -> Result<i32, Failure> {
    let _ended = handles().with(id, wanted, |entry| entry.take_if(is))?;
    Ok(TWINBUF_OK)
}

/// Writes a report of where the time went, as text, or as JSON if `json` is not 0, and a NUL. Stores its length.
///
/// TWINBUF_SHORT, NULL, a wrong `size`, after free, after close, two threads: as with twinbuf_checkpoint.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_report(loader: *const twinbuf_loader, json: i32, text: *mut twinbuf_text) -> i32 {
    door(|| {
        let report = lock(&*loader_of(loader)?)?.epochs.as_ref().ok_or_else(closed)?.report();
        let report = if json != 0 { serde_json::to_string(&report) } else { Ok(report.to_string()) };
        // SAFETY: the caller's promise is that of this function.
        unsafe { write(report, text) }
    })
}

/// Ends the threads of a loader. Waits at most `wait_ms` milliseconds for a read in progress, or as long as it takes
/// with UINT64_MAX; up to 1 s more for a thread that reads nothing, which only has to be woken. The handle stays valid
/// until twinbuf_free; batches stay valid until they are released.
///
/// TWINBUF_ERROR_TIMEOUT, with the file and the offset if they are known, if a read did not end: its thread is left
/// behind with what it uses. TWINBUF_ERROR_READ if a batch that was not received could not be read; TWINBUF_ERROR_FILE
/// if the trace could not be written. The loader is closed in each case. A second time: TWINBUF_ERROR_CLOSED. While
/// another thread is inside another function of this loader: TWINBUF_ERROR_BUSY, and the loader is not closed:
/// twinbuf_cancel first ends a wait there. NULL, after free: an error.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_close(loader: *mut twinbuf_loader, wait_ms: u64) -> i32 {
    door(|| {
        let shared = loader_of(loader)?;
        let loader = lock(&shared)?.epochs.take().and_then(Epochs::into_front).ok_or_else(closed)?;
        loader.close_timeout(Duration::from_millis(wait_ms))?;
        Ok(TWINBUF_OK)
    })
}

/// Ends the handle of records or of a loader. Loaders continue without the handle of their records. A loader that was
/// not closed is closed: this waits at most 10 s for a read in progress. While another thread is inside a function of
/// the loader, the loader ends when that thread leaves it.
///
/// NULL is no error and does nothing. A handle that was already freed, or a batch's, is TWINBUF_ERROR_HANDLE. Of two
/// threads that free the same handle, one gets the error.
#[unsafe(no_mangle)]
pub extern "C" fn twinbuf_free(handle: *mut c_void) -> i32 {
    door(|| {
        let is = |entry: &mut Entry| matches!(entry, Entry::Records(_) | Entry::Loader(_));
        if handle.is_null() { Ok(TWINBUF_OK) } else { end(handle.addr(), "records or a loader", is) }
    })
}
