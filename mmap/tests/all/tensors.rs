//! Tensors of models: every byte of every type by its name, and faults that are typed errors.

#[path = "../fuzz_bodies/tensors.rs"]
#[allow(dead_code, reason = "`headers` has the rest")]
mod body;

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::asked::write;
use twinbuf_mmap::{Buffer, DType, Error, ReadMode, Reader, Tensor, Tensors};

/// A `safetensors` file with these tensors: name, type, shape, bytes. Byte `i` of the data is `i * 7 + seed`.
fn model<N: Display, S: AsRef<[usize]>>(
    seed: usize,
    tensors: impl IntoIterator<Item = (N, &'static str, S, usize)>,
) -> Vec<u8> {
    twinbuf_testing::safetensors(tensors, (seed..).step_by(7).map(|byte| byte.to_le_bytes()[0]))
}

fn index(folder: &Path, map: &str) -> PathBuf {
    write(folder, "model.safetensors.index.json", format!(r#"{{"weight_map":{{{map}}}}}"#))
}

/// Checks that a file was refused for its format, and that the message has one of `wanted` in it: texts with `|` between.
#[track_caller]
fn refused(found: Result<Tensors, Error>, wanted: &str) {
    let error = found.unwrap_err();
    let message = error.to_string();
    let has = wanted.split('|').any(|wanted| message.contains(wanted));
    assert!(matches!(error, Error::Format { .. }) && has, "{error:?}");
}

#[test]
fn few_groups_without_bytes_are_taken_ahead_of_a_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "model.safetensors", model(0, [("0.w", "F32", vec![0, 7], 0)]));
    let groups = Tensors::open([&path]).unwrap().groups_by(|_| Some(0)).unwrap();
    let reader = Reader::of_groups(groups, ReadMode::Auto, 0).unwrap();
    let taken = Arc::new(AtomicUsize::new(0));
    let counts = taken.clone();
    reader.begin(std::iter::repeat_n(0, 1 << 20).inspect(move |_| {
        counts.fetch_add(1, Relaxed);
    }));
    for _ in 0..100 {
        assert_eq!(reader.read(&0, &mut []).unwrap(), 0);
    }
    // A page of the prefetch window for each.
    let taken = taken.load(Relaxed);
    assert!((100..=100 + (32 << 20) / 4096).contains(&taken), "{taken} groups");
}

#[test]
fn types_that_rust_lacks_are_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [
        ("f4", "F4", vec![3, 2], 3),
        ("f6", "F6_E2M3", vec![4], 3),
        ("f6.b", "F6_E3M2", vec![8], 6),
        ("scale", "F8_E8M0", vec![], 1),
        ("fnuz", "F8_E4M3FNUZ", vec![2], 2),
        ("e4m3", "F8_E4M3", vec![2], 2),
        ("empty", "F32", vec![0, 7], 0),
        ("one", "F64", vec![], 8),
        ("bf16", "BF16", vec![2, 2], 8),
    ];
    let path = write(folder.path(), "model.safetensors", model(3, tensors));
    let model = Tensors::open([&path]).unwrap();
    for (name, dtype, format_type, shape, len) in [
        ("f4", None, "F4", &[3, 2][..], 3),
        ("scale", None, "F8_E8M0", &[], 1),
        ("e4m3", Some(DType::F8E4M3), "F8_E4M3", &[2], 2),
        ("empty", Some(DType::F32), "F32", &[0, 7], 0),
        ("one", Some(DType::F64), "F64", &[], 8),
    ] {
        let found = model.get(name).unwrap();
        assert_eq!(
            (found.dtype(), found.format_type(), found.shape(), found.len()),
            (dtype, format_type, shape, len)
        );
    }
    // `one` and `bf16` begin at odd places of the file, and at multiples of their size in memory.
    let header = u64::from_le_bytes(std::fs::read(&path).unwrap()[..8].try_into().unwrap());
    assert_eq!(model.get("one").unwrap().range().bytes.start % 8, (8 + header + 17) % 8);
    body::read(&model);
}

/// Written by llama.cpp's own package, and compared with what it reads.
#[test]
fn every_type_of_gguf() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let model = Tensors::open([fixtures.join("types.gguf")]).unwrap();
    body::read(&model);
    let groups = model.groups_by(|name| Some(name.to_owned())).unwrap();
    let reader = Reader::of_groups(groups.clone(), ReadMode::Auto, 0).unwrap();
    let expected = std::fs::read_to_string(fixtures.join("gguf.txt")).unwrap();
    assert_eq!(expected.lines().count(), model.all().len());
    for line in expected.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let group = model.all().iter().position(|tensor| tensor.name() == fields[0]).expect("the name");
        let mut memory = Buffer::new(groups.bytes(group)).unwrap();
        reader.read(&group, &mut memory).unwrap();
        let (tensor, at) = groups.tensors(group).next().unwrap();
        let hex: String = memory[at].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!((tensor.format_type(), &*hex), (fields[1], fields[3]), "{}", fields[0]);
        // The package shows bytes as the last axis of a type that is blocks.
        let shape: Vec<String> = tensor.shape().iter().map(ToString::to_string).collect();
        assert_eq!(shape.join(","), fields[2], "{}", fields[0]);
    }
}

#[test]
fn a_model_in_several_files_by_its_index() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [("l.0.a", "F32", [2], 8), ("l.0.b", "U8", [3], 3)];
    write(folder.path(), "x-1.safetensors", model(0, tensors));
    let tensors = [("l.1.a", "F32", [2], 8), ("unlisted", "U8", [1], 1)];
    write(folder.path(), "x-2.safetensors", model(9, tensors));
    let map = r#""l.1.a":"x-2.safetensors","l.0.b":"x-1.safetensors","l.0.a":"x-1.safetensors""#;
    let model = Tensors::open([index(folder.path(), map)]).unwrap();
    let names: Vec<&str> = model.all().iter().map(Tensor::name).collect();
    assert_eq!((names, model.paths().len()), (vec!["l.0.a", "l.0.b", "l.1.a"], 2));
    body::read(&model);
    let groups = model.groups([vec!["l.1.a", "l.0.b"], vec!["l.0.a", "l.0.a"]]).unwrap();
    let names = |group| groups.tensors(group).map(|(tensor, _)| tensor.name()).collect::<Vec<_>>();
    assert_eq!((names(0), names(1), names(2)), (vec!["l.1.a", "l.0.b"], vec!["l.0.a", "l.0.a"], vec![]));
    let error = model.groups([["l.2.a"]]).unwrap_err();
    assert!(matches!(&error, Error::NoTensor { wanted, .. } if wanted == "l.2.a"), "{error}");
}

#[test]
fn faults_of_an_index_are_typed() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    assert!(matches!(Tensors::open([""; 0]), Err(Error::NoPaths)));
    let missing = Tensors::open([index(at, r#""a":"gone.safetensors""#)]);
    assert!(matches!(missing, Err(Error::NotFound { path }) if path == at.join("gone.safetensors")));
    for name in ["../x", "/etc/passwd", "a/b", "", ".", ".."] {
        refused(Tensors::open([index(at, &format!(r#""a":"{name}""#))]), "bad header at byte 0: ");
    }
    refused(Tensors::open([index(at, "")]), "bad header at byte 0: wanted at least one tensor");
    let json = write(at, "x.json", b"{\"weight_map\":\n  {\"a\" 7}}");
    refused(Tensors::open([json]), "bad header at byte 22: ");
    write(at, "x.safetensors", model(0, [("a", "U8", [1], 1)]));
    let error = Tensors::open([index(at, r#""a":"x.safetensors","b":"x.safetensors""#)]).unwrap_err();
    let Error::NoTensor { path, wanted, found } = error else { panic!("{error}") };
    assert_eq!((path, &*wanted, found), (at.join("x.safetensors"), "b", vec!["a".to_owned()]));
    // Two files with the same name, of each format.
    for file in [model(0, [("a", "U8", [1], 1)]), gguf(&[("a", &[4], 24, 0)], 64)] {
        let both = ["x", "y"].map(|name| write(at, name, &file));
        let wanted = "bad header at byte 0: wanted each name once, found \"a\", as in";
        refused(Tensors::open(&both), &format!("{wanted} {:?}", both[0]));
    }
}

#[test]
fn faults_of_safetensors_are_typed() {
    let folder = tempfile::tempdir().unwrap();
    let open = |bytes: &[u8]| Tensors::open([write(folder.path(), "x.safetensors", bytes)]);
    // Two tensors that overlap.
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 6]].concat();
    refused(open(&file), "bad header at byte 8: ");
    let good = model(0, [("a", "U8", [9], 9)]);
    for len in 0..good.len() {
        let header = good.len() - 9;
        refused(open(&good[..len]), if len < header { "ends inside its header" } else { "cut off or grown" });
    }
    refused(open(&[0xFF; 20]), "too long a header, by the length at byte 0: ");
}

/// A tensor of a GGUF file: name, axes, type, offset.
type Described<'a> = (&'a str, &'a [u64], u32, u64);

/// A GGUF file with these tensors. `data` bytes follow.
fn gguf(tensors: &[Described<'_>], data: usize) -> Vec<u8> {
    gguf_with(&[], tensors, data)
}

/// The same with metadata: a key, the type and the bytes of its value. The data starts at a multiple of 64.
fn gguf_with(metadata: &[(&str, u32, &[u8])], tensors: &[Described<'_>], data: usize) -> Vec<u8> {
    let name = |name: &str| [&(name.len() as u64).to_le_bytes(), name.as_bytes()].concat();
    let counts = [tensors.len() as u64, metadata.len() as u64].map(u64::to_le_bytes).concat();
    let mut file = [&b"GGUF\x03\0\0\0"[..], &counts].concat();
    for (key, kind, value) in metadata {
        file.extend([&name(key), &kind.to_le_bytes()[..], value].concat());
    }
    for (of, axes, kind, offset) in tensors {
        file.extend([name(of), u32::try_from(axes.len()).unwrap().to_le_bytes().to_vec()].concat());
        file.extend(axes.iter().flat_map(|axis| axis.to_le_bytes()));
        file.extend([&kind.to_le_bytes()[..], &offset.to_le_bytes()].concat());
    }
    file.resize(file.len().next_multiple_of(if metadata.is_empty() { 32 } else { 64 }) + data, 1);
    file
}

#[test]
fn faults_of_gguf_are_typed() {
    let folder = tempfile::tempdir().unwrap();
    let open = |bytes: &[u8]| Tensors::open([write(folder.path(), "x.gguf", bytes)]);
    let good = gguf(&[("a", &[4], 24, 0), ("b", &[], 24, 32), ("c", &[5, 0], 0, 32)], 33);
    let model = open(&good).unwrap();
    assert_eq!((model.get("b").unwrap().shape(), model.get("c").unwrap().shape()), (&[][..], &[0, 5][..]));
    body::read(&model);
    for len in 4..good.len() {
        refused(open(&good[..len]), "ends inside its header|cut off or grown");
    }
    let with = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    // The first tensor begins at byte 24, and its number of axes is at 33.
    for (file, wanted) in [
        (
            gguf(&[("a", &[40], 24, 0), ("b", &[4], 24, 32)], 64),
            "bad header at byte 57: wanted tensors that do not overlap",
        ),
        (gguf(&[("w", &[4], 24, 0), ("w", &[4], 24, 32)], 64), "wanted each name once, found \"w\" twice"),
        (gguf(&[("a", &[4], 24, 8)], 64), "bad header at byte 24: "),
        (gguf(&[("a", &[1; 5], 24, 0)], 64), "bad header at byte 33: wanted at most 4 axes"),
        (gguf(&[("", &[1], 24, 0)], 64), "bad header at byte 24: wanted a tensor with a name"),
        (gguf(&[("a", &[4], 77, 0)], 64), "unsupported type at byte 45, "),
        (gguf(&[("a", &[u64::MAX, 3], 2, 0)], 64), "no records in this shape"),
        (gguf(&[("a", &[33], 2, 0)], 64), "no records in this shape"),
        (gguf(&[("a", &[1 << 50], 24, 0)], 64), "cut off or grown"),
        (with(4, &[1]), "unknown version at byte 4: "),
        (with(4, &[0, 0, 0, 3]), "unknown version at byte 4: "),
        // Counts and lengths that no file has.
        (with(8, &[0xFF; 8]), "ends inside its header|too long a header|bad header"),
        (with(16, &[0xFF; 8]), "ends inside its header|too long a header|bad header"),
        (with(24, &[0xFF; 8]), "too long a header, by the length at byte 24: "),
    ] {
        refused(open(&file), wanted);
    }
    // A type number that no version has: nothing is said about text.
    let message = open(&gguf(&[("a", &[4], 99, 0)], 64)).unwrap_err().to_string();
    assert!(message.contains("GGUF type 99") && !message.contains("text"), "{message}");
}

/// Numbers in the metadata: each of any size, and none that a program could not hold or count with.
#[test]
fn numbers_of_gguf_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let open = |pairs: &[(&str, u32, &[u8])], offset: u64| {
        let file = gguf_with(pairs, &[("w", &[4], 24, offset)], 128);
        Tensors::open([write(folder.path(), "m.gguf", &file)])
    };
    let wanted =
        "bad header at byte 75: wanted at most 65535 parts, and a number below theirs, found number ";
    for (no, count, found) in [
        (0, u64::from(u32::MAX), "0 of 4294967295"),
        (0, 65_536, "0 of 65536"),
        (u64::MAX, u64::MAX, "18446744073709551615 of 18446744073709551615"),
        (u64::MAX, 2, "18446744073709551615 of 2"),
        (2, 2, "2 of 2"),
    ] {
        let pairs = [("split.no", 10, &no.to_le_bytes()[..]), ("split.count", 10, &count.to_le_bytes())];
        refused(open(&pairs, 0), &format!("{wanted}{found}"));
    }
    for (no, count) in [(0_u64, 0_u64), (7, 1)] {
        open(&[("split.no", 10, &no.to_le_bytes()), ("split.count", 10, &count.to_le_bytes())], 0).unwrap();
    }
    for (kind, align) in [(10, &64_u64.to_le_bytes()[..]), (2, &64_u16.to_le_bytes()), (0, &[64])] {
        open(&[("general.alignment", kind, align)], 64).unwrap();
        refused(open(&[("general.alignment", kind, align)], 32), "a multiple of the alignment, found 32");
    }
}

/// A part of a model in several files is refused, with the names of the others; all of them, in any order, are the model.
#[test]
fn a_split_gguf_is_complete_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let named = |model: &str, no: u16, count: u16| {
        let metadata = [
            ("split.no", 2, &no.to_le_bytes()[..]),
            ("split.count", 2, &count.to_le_bytes()),
            ("split.tensors.count", 5, &i32::from(count).to_le_bytes()),
        ];
        let file = gguf_with(&metadata, &[(&format!("{model}{no}"), &[4], 24, 0)], 64);
        write(folder.path(), &format!("{model}-{:05}-of-{count:05}.gguf", no + 1), &file)
    };
    let part = |no, count| named("m", no, count);
    let parts: Vec<PathBuf> = (0..3).map(|no| part(no, 3)).collect();
    let whole = Tensors::open([&parts[2], &parts[0], &parts[1]]).unwrap();
    assert_eq!(whole.all().len(), 3);
    for (given, missing) in [
        (vec![0], vec!["m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]),
        (vec![1], vec!["m-00001-of-00003.gguf", "m-00003-of-00003.gguf"]),
        (vec![0, 2], vec!["m-00002-of-00003.gguf"]),
    ] {
        let error = Tensors::open(given.iter().map(|&at: &usize| &parts[at])).unwrap_err();
        let Error::MissingParts { path, wanted, missing: found } = &error else { panic!("{error}") };
        let missing: Vec<PathBuf> = missing.into_iter().map(|name| folder.path().join(name)).collect();
        assert_eq!((path, *wanted, found), (&parts[given[0]], 3, &missing));
        assert!(error.to_string().contains("m-0000"), "{error}");
    }
    // Two models, the second of which has as many parts, or more; and what is left of two.
    for (count, given) in [(3, 1), (3, 2), (4, 3)] {
        let others: Vec<PathBuf> = (0..given).map(|no| named("n", no, count)).collect();
        for first in [&parts[..], &parts[2..]] {
            let Err(Error::MissingParts { path, wanted, missing }) =
                Tensors::open(first.iter().chain(&others))
            else {
                panic!("{given} of {count}")
            };
            let whole = first.len() == 3;
            assert_eq!(path, if whole { others[0].clone() } else { parts[2].clone() });
            assert_eq!(
                (wanted, missing.len()),
                if whole { (count.into(), usize::from(count - given)) } else { (3, 2) }
            );
        }
    }
    let both = (0..3).map(|no| named("n", no, 3)).chain(parts.iter().cloned());
    assert_eq!(Tensors::open(both.collect::<Vec<_>>()).unwrap().all().len(), 6);
    // Alone it is a whole model; and under another name its parts cannot be named as files.
    assert_eq!(Tensors::open([part(0, 1)]).unwrap().all().len(), 1);
    let renamed = folder.path().join("first.gguf");
    std::fs::copy(&parts[0], &renamed).unwrap();
    assert_eq!(Tensors::open([&parts[1], &renamed, &parts[2]]).unwrap().all().len(), 3);
    let message = Tensors::open([&renamed]).unwrap_err().to_string();
    assert!(message.contains("part 2 of 3") && message.contains("part 3 of 3"), "{message}");
}

/// Past the page cache and through it, with runs that are short and long and at odd places.
#[test]
fn all_ways_to_read_give_the_same_bytes() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let long = (5 << 20) + 1234;
    let tensors = (0..24).map(|at| {
        let len = [700, 65_537, long, 1][at / 6] + at;
        (format!("l.{}.{at}", at % 3), "U8", [len], len)
    });
    let path = write(folder.path(), "model.safetensors", model(5, tensors));
    let file = std::fs::read(&path).unwrap();
    let model = Tensors::open([&path]).unwrap();
    let bytes = |tensor: &Tensor| {
        let bytes = &tensor.range().bytes;
        usize::try_from(bytes.start).unwrap()..usize::try_from(bytes.end).unwrap()
    };
    let groups = model.groups_by(|name| name.split('.').nth(1).map(str::to_owned)).unwrap();
    assert_eq!(groups.len(), 3);
    for mode in [ReadMode::Auto, ReadMode::Pread, ReadMode::Direct] {
        let reader = match Reader::of_groups(groups.clone(), mode, 0) {
            Err(error) if mode == ReadMode::Direct => {
                eprintln!("not checked: {error}");
                continue;
            }
            reader => reader.unwrap(),
        };
        for group in [0, 1, 2, 1, 0] {
            let mut memory = Buffer::new(groups.bytes(group)).unwrap();
            reader.read(&group, &mut memory).unwrap();
            for (tensor, at) in groups.tensors(group) {
                assert!(memory[at] == file[bytes(tensor)], "{mode:?} {}", tensor.name());
            }
        }
        // Parts of tensors, straight to their places.
        for tensor in model.all() {
            let mut memory = vec![0; bytes(tensor).len()];
            reader.read_bytes(0, tensor.range().bytes.start, &mut memory).unwrap();
            assert!(memory == file[bytes(tensor)], "{mode:?} {}", tensor.name());
        }
        let mut small = [0; 10];
        let missing = reader.read_bytes(1, 0, &mut small);
        assert!(matches!(missing, Err(Error::NoSuchRecord { wanted: 1, found: 1 })));
        let before = reader.stats().bytes;
        let cut = reader.read_bytes(0, file.len() as u64 - 9, &mut small);
        assert!(matches!(cut, Err(Error::Truncated { .. })));
        for start in [1 << 40, i64::MAX as u64 - 11, i64::MAX as u64 - 3, 1 << 63, u64::MAX - 3, u64::MAX] {
            let Err(Error::Truncated { offset, found: 0, .. }) = reader.read_bytes(0, start, &mut small)
            else {
                panic!("{mode:?} {start}")
            };
            assert_eq!(offset, start.min(1 << 62));
        }
        assert_eq!(reader.stats().bytes, before, "{mode:?}");
        assert!(matches!(reader.read(&0, &mut small), Err(Error::BufferTooSmall { found: 10, .. })));
        assert!(matches!(reader.read(&3, &mut small), Err(Error::NoSuchRecord { wanted: 3, found: 3 })));
        if mode == ReadMode::Direct {
            assert_eq!((reader.choice().cached, reader.choice().data > 0), (0, true));
        }
    }
}

/// Groups of one small tensor: later ones are asked for while the first is read, and no byte is read twice.
#[test]
fn small_groups_are_read_ahead() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let names: Vec<String> = (0..300).map(|at| format!("expert.{at:03}")).collect();
    let tensors = names.iter().map(|name| (name, "U8", [20_480], 20_480));
    let path = write(folder.path(), "model.safetensors", model(5, tensors));
    let file = std::fs::read(&path).unwrap();
    let model = Tensors::open([&path]).unwrap();
    let groups = model.groups(names.iter().map(|name| [name])).unwrap();
    let reader = match Reader::of_groups(groups.clone(), ReadMode::Direct, 0) {
        Err(error) => return eprintln!("not checked: {error}"),
        Ok(reader) => reader,
    };
    let mut memory = Buffer::new(groups.bytes(0).max(groups.bytes(299)).max(1 << 20)).unwrap();
    let mut check = |group: usize| {
        reader.read(&group, &mut memory).unwrap();
        let (tensor, at) = groups.tensors(group).next().unwrap();
        let start = usize::try_from(tensor.range().bytes.start).unwrap();
        assert!(memory[at] == file[start..start + 20_480], "{group}");
    };
    check(7);
    assert!(reader.stats().disk < 100_000, "none was announced");
    // In the file's order, backwards, and twice in a row.
    for order in [(0..300).collect::<Vec<_>>(), (0..300).rev().collect(), (0..300).chain(0..300).collect()] {
        let before = reader.stats().disk;
        reader.begin(order.clone());
        check(order[0]);
        assert!(reader.stats().disk - before > 2_000_000, "later ones are asked for");
        order[1..].iter().for_each(|&group| check(group));
        // A group that comes again soon is read once.
        let data = 300 * 20_480;
        let read = reader.stats().disk - before;
        // Whole blocks, some of which two groups share.
        assert!((data..data + 300 * 8192).contains(&read), "{read} of {data}");
    }
    // Others than those that were announced.
    reader.begin(0..300);
    [0, 299, 5, 298, 6].into_iter().for_each(&mut check);
}
