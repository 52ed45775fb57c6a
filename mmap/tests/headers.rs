//! Arbitrary bytes, and valid headers with a few bytes changed: no panic, no large allocation, and what opens
//! can be read.

#[path = "fuzz_bodies/headers.rs"]
mod body;
#[path = "fuzz_bodies/ragged.rs"]
mod ragged;
#[cfg(feature = "safetensors")]
#[path = "fuzz_bodies/tensors.rs"]
mod tensors;

use std::path::Path;

use body::headers;
use proptest::prelude::*;
use proptest::sample::Index;
use twinbuf_mmap::{Cut, DType, Error, Records};

#[global_allocator]
static ALLOCATOR: twinbuf_testing::Counting = twinbuf_testing::Counting;

/// Far more than the few KiB of the files here need.
const LARGE: usize = 1 << 20;

/// Fails if `check` takes a large piece of memory at once.
fn frugal(check: impl FnOnce()) {
    let (_, largest) = twinbuf_testing::allocated(check);
    assert!(largest < LARGE, "{largest} bytes at once");
}

fn llm_c(path: &Path, cut: Cut) -> Result<Records, Error> {
    Records::open_llm_c([path], cut)
}

fn npy(path: &Path, cut: Cut) -> Result<Records, Error> {
    Records::open_npy([path], cut)
}

#[cfg(feature = "safetensors")]
fn safetensors(path: &Path, cut: Cut) -> Result<Records, Error> {
    Records::open_safetensors([path], "deep", cut)
}

fn every_opener(bytes: &[u8]) {
    frugal(|| {
        headers(bytes, llm_c);
        headers(bytes, npy);
        headers(bytes, |path, cut| Records::open_headerless([path], DType::U32, cut));
        #[cfg(feature = "safetensors")]
        headers(bytes, safetensors);
    });
}

/// Files that are valid, each of another format or version.
const VALID: [&[u8]; 5] = [
    include_bytes!("fixtures/gpt_2.bin"),
    include_bytes!("fixtures/float32.npy"),
    include_bytes!("fixtures/v2.npy"),
    include_bytes!("fixtures/v3.npy"),
    include_bytes!("fixtures/many.safetensors"),
];

/// What is worth writing over a number or a bracket.
fn spice() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 1..5),
        Just(b"18446744073709551615".to_vec()),
        Just(vec![0xFF; 8]),
        Just(b"[[[[[[[[".to_vec()),
        Just(b"0".to_vec()),
        Just(b"-1".to_vec()),
        Just(b"'".to_vec()),
        Just(b"\"".to_vec()),
        Just(b",".to_vec()),
        Just(b"(".to_vec()),
        Just(b")".to_vec()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..1500)) {
        every_opener(&bytes);
    }

    /// The length of the header is right, so that its content is read.
    #[test]
    fn arbitrary_text_as_a_header(text in "[ -~\n]{0,80}", major in 1_u8..4) {
        let len = (text.len() as u64).to_le_bytes();
        let width = if major == 1 { 2 } else { 4 };
        headers(&[b"\x93NUMPY", &[major, 0][..], &len[..width], text.as_bytes()].concat(), npy);
        #[cfg(feature = "safetensors")]
        headers(&[&len[..], text.as_bytes()].concat(), safetensors);
    }

    #[test]
    fn valid_headers_with_changes(
        which in 0..VALID.len(),
        changes in prop::collection::vec((any::<Index>(), spice(), any::<bool>()), 1..4),
        cut in prop::option::of(any::<Index>()),
    ) {
        let mut bytes = VALID[which].to_vec();
        for (at, new, insert) in changes {
            // Most of the header, and not much more.
            let at = at.index(bytes.len().min(if which == 0 { 16 } else { 400 }));
            let end = if insert { at } else { bytes.len().min(at + new.len()) };
            bytes.splice(at..end, new);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        every_opener(&bytes);
    }
}

#[test]
fn valid_files_open() {
    let openers = [
        llm_c,
        npy,
        npy,
        npy,
        #[cfg(feature = "safetensors")]
        safetensors,
    ];
    for (bytes, open) in VALID.into_iter().zip(openers) {
        headers(bytes, |path, cut| {
            assert!(open(path, Cut::Rows).is_ok());
            open(path, cut)
        });
    }
}

/// A few bytes that claim a great length, in a sparse file that could have it.
#[cfg(unix)]
#[test]
fn lengths_that_a_sparse_file_makes_plausible() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("sparse");
    for start in [b"\x93NUMPY\x02\x00\xFF\xFF\xFF\xFF", b"\x01\xE1\xF5\x05\x00\x00\x00\x00{}  "] {
        std::fs::write(&path, start).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(5 << 30).unwrap();
        frugal(|| {
            assert!(npy(&path, Cut::Rows).is_err());
            #[cfg(feature = "safetensors")]
            assert!(matches!(
                safetensors(&path, Cut::Rows),
                Err(Error::Format { problem: "too long a header, by the length", offset: Some(0), .. })
            ));
        });
    }
}

/// An index that is right, for a data file of 100 bytes, as the body of the fuzz target takes it.
fn index(megatron: bool) -> Vec<u8> {
    let mut bytes = vec![u8::from(megatron), 100, 0];
    if megatron {
        bytes.extend(twinbuf_testing::megatron(8, 2, &[20, 0, 30], &[3]));
    } else {
        let offsets = [0_u64, 40, 40, 100].into_iter().flat_map(u64::to_le_bytes);
        bytes.extend(twinbuf_testing::npy("<u8", &[4], offsets));
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn indexes_with_a_few_bytes_changed(
        megatron: bool, changes in proptest::collection::vec((any::<Index>(), any::<u8>()), 0..4), cut in any::<Index>(),
        shorten: bool,
    ) {
        let mut bytes = index(megatron);
        for (at, byte) in &changes {
            let at = 1 + at.index(bytes.len() - 1);
            bytes[at] = *byte;
        }
        if shorten {
            bytes.truncate(cut.index(bytes.len()));
        }
        frugal(|| ragged::ragged(&bytes));
    }
}

/// Models that are right: GGUF of every type, `safetensors`, and an index.
#[cfg(feature = "safetensors")]
const MODELS: [(u8, &[u8]); 3] = [
    (0, include_bytes!("fixtures/types.gguf")),
    (0, include_bytes!("fixtures/many.safetensors")),
    (1, br#"{"metadata":{"total_size":2},"weight_map":{"a":"a","b":"b"}}"#),
];

#[cfg(feature = "safetensors")]
proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn models_with_a_few_bytes_changed(
        which in 0..MODELS.len(), changes in prop::collection::vec((any::<Index>(), spice()), 0..4),
        cut in any::<Index>(), shorten: bool,
    ) {
        let (kind, bytes) = MODELS[which];
        let mut bytes = [&[kind][..], bytes].concat();
        // Most of the bytes are data, so changes go to the header.
        let header = bytes.len().min(2400);
        for (at, new) in &changes {
            let at = 1 + at.index(header - 1);
            for (old, &new) in bytes[at..].iter_mut().zip(new) {
                *old = new;
            }
        }
        if shorten {
            bytes.truncate(cut.index(bytes.len()));
        }
        frugal(|| tensors::tensors(&bytes));
    }
}
