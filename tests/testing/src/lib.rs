//! What the tests of several crates share: the extent of a test, random numbers, files of several formats, and an allocator
//! that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Chooses the extent of a test: its number of seeds, cases or rounds, or the bound of a model. `few` finds every listed
/// mutant (`tools/mutate*.py`); `TWINBUF_TEST_WHOLE=1`, as in `.ci/run`, takes `all`.
#[must_use]
pub fn extent<T>(few: T, all: T) -> T {
    if std::env::var_os("TWINBUF_TEST_WHOLE").is_some_and(|value| value == "1") { all } else { few }
}

/// `SplitMix64` (Steele, Lea and Flood, OOPSLA 2014): any seed is good.
#[derive(Clone, Copy, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    #[allow(clippy::should_implement_trait, reason = "it has no end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`; slightly biased, which does not matter in tests.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Whether it happens, in so many percent of the cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of several.
    pub fn choose<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[usize::try_from(self.below(from.len() as u64)).expect("below the length")]
    }
}

/// A file of one array, as `numpy.save` writes it: the type in numpy's words, the lengths of the axes, the bytes.
pub fn npy(descr: &str, shape: &[usize], data: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let axes: String = shape.iter().map(|axis| format!("{axis}, ")).collect();
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({axes}), }}");
    let mut file = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    file.extend(format!("{header:117}\n").bytes());
    file.extend(data);
    file
}

/// Bytes that differ from place to place.
#[must_use]
pub fn bytes(count: usize, from: u32) -> Vec<u8> {
    (from..).flat_map(|word| word.wrapping_mul(2_654_435_761).to_le_bytes()).take(count).collect()
}

/// The offsets of records of these lengths, as `numpy.save` writes them. The last record ends with the file, at `bytes`.
pub fn offsets(bytes: u64, lengths: impl IntoIterator<Item = u64>) -> Vec<u8> {
    let ends = lengths.into_iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    let offsets: Vec<u64> =
        [0].into_iter().chain(ends.take_while(|&end| end < bytes)).chain([bytes]).collect();
    npy("<u8", &[offsets.len()], offsets.into_iter().flat_map(u64::to_le_bytes))
}

/// An index of sequences as Megatron-LM's `_IndexWriter` writes it: a token's code and size, lengths, documents.
pub fn megatron(code: u8, size: usize, lengths: &[i32], documents: &[i64]) -> Vec<u8> {
    let mut file = b"MMIDIDX\0\0".to_vec();
    file.extend(1_u64.to_le_bytes());
    file.push(code);
    file.extend((lengths.len() as u64).to_le_bytes());
    file.extend((documents.len() as u64).to_le_bytes());
    file.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    let pointers = lengths.iter().scan(0_i64, |end, &length| {
        let pointer = *end;
        *end += i64::from(length) * i64::try_from(size).expect("few bytes");
        Some(pointer)
    });
    file.extend(pointers.flat_map(i64::to_le_bytes));
    file.extend(documents.iter().flat_map(|document| document.to_le_bytes()));
    file
}

/// A `safetensors` file: the name, type, shape and size of each tensor; then as much of `data` as they have bytes, from a
/// multiple of 8 on.
pub fn safetensors<N: std::fmt::Display, S: AsRef<[usize]>>(
    tensors: impl IntoIterator<Item = (N, &'static str, S, usize)>,
    data: impl IntoIterator<Item = u8>,
) -> Vec<u8> {
    let (mut entries, mut end) = (Vec::new(), 0);
    for (name, dtype, shape, bytes) in tensors {
        let (shape, start) = (shape.as_ref(), end);
        end += bytes;
        let entry =
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#);
        entries.push(entry);
    }
    let mut header = format!("{{{}}}", entries.join(",")).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data.into_iter().take(end));
    file
}

/// A zip archive like one of `numpy.savez`, without checksums, of names, methods (0 is stored, 8 is Deflate) and
/// bytes: local headers with their members, the directory, its end.
pub fn zip(members: &[(&str, u16, &[u8])]) -> Vec<u8> {
    let number = |number: usize| u32::try_from(number).expect("a short file");
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, method, bytes) in members {
        // Version, flags, method, time, date; then checksum, both lengths, those of the name and of the extra field.
        let mut common = [20, 0, *method, 0, 33].map(u16::to_le_bytes).concat();
        common.extend([0, number(bytes.len()), number(bytes.len())].map(u32::to_le_bytes).concat());
        common.extend(number(name.len()).to_le_bytes());
        // Comment, disk and attributes; then where the local header is.
        let place = [&[0; 10][..], &number(file.len()).to_le_bytes()].concat();
        directory.extend([b"PK\x01\x02\x14\x00", &common[..], &place, name.as_bytes()].concat());
        file.extend([b"PK\x03\x04", &common[..], name.as_bytes(), bytes].concat());
    }
    let [start, len] = [file.len(), directory.len()].map(|at| number(at).to_le_bytes());
    let count = u16::try_from(members.len()).expect("few members").to_le_bytes();
    [&file[..], &directory, b"PK\x05\x06\0\0\0\0", &count, &count, &len, &start, &[0; 2]].concat()
}

/// The system's allocator, with counters. For a test program that sets it as its `global_allocator`.
#[derive(Debug)]
pub struct Counting;

/// The allocations of all threads.
pub static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static OF_THREAD: Cell<u64> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

/// Runs `work`, and returns the number of allocations on this thread, and the bytes of the largest.
pub fn allocated(work: impl FnOnce()) -> (u64, usize) {
    let before = OF_THREAD.get();
    LARGEST.set(0);
    work();
    (OF_THREAD.get() - before, LARGEST.get())
}

fn count(layout: Layout) {
    // Relaxed: the counters order nothing.
    ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    OF_THREAD.set(OF_THREAD.get() + 1);
    LARGEST.set(LARGEST.get().max(layout.size()));
}

// SAFETY: every call is forwarded to the system's allocator. The counters of a thread are initialized at compile time and have
// no destructor, so counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) };
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
}
