//! Any bytes as a model: refused with a typed error, or all tensors can be read.

use std::path::Path;

use twinbuf_mmap::{Buffer, ReadMode, Reader, Tensors};

/// The first byte chooses a file of tensors or an index with two good files, and the others are the file.
pub(crate) fn tensors(bytes: &[u8]) {
    let Some((&kind, bytes)) = bytes.split_first() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(if kind % 2 == 0 { "model" } else { "model.json" });
    std::fs::write(&path, bytes).expect("written");
    if kind % 2 == 1 {
        for name in ["a", "b"] {
            std::fs::write(folder.path().join(name), good(name)).expect("written");
        }
    }
    match Tensors::open([&path]) {
        Ok(model) => read(&model),
        Err(error) => {
            let message = error.to_string();
            assert!(!message.contains('\n'), "{message:?}");
        }
    }
}

/// A file with one tensor.
pub(crate) fn good(name: &str) -> Vec<u8> {
    let header = format!(r#"{{"{name}":{{"dtype":"F8_E8M0","shape":[],"data_offsets":[0,1]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.push(7);
    file
}

/// Reads every tensor, and compares it with the bytes of the file where it is said to be.
pub(crate) fn read(model: &Tensors) {
    let paths: Vec<&Path> = model.paths().collect();
    let files: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).expect("there")).collect();
    let place = |range: &twinbuf_mmap::ByteRange| {
        let at = |offset| usize::try_from(offset).expect("in the file");
        files[range.file][at(range.bytes.start)..at(range.bytes.end)].to_vec()
    };
    for tensor in model.all() {
        assert_eq!(place(tensor.range()).len() as u64, tensor.len());
        assert!(model.get(tensor.name()).is_ok_and(|found| found == tensor));
        if let Some(dtype) = tensor.dtype() {
            assert_eq!(tensor.shape().iter().product::<usize>() * dtype.size(), place(tensor.range()).len());
        }
    }
    // All at once, and every second one in two groups.
    let mut number = 0;
    let halves = |_: &str| {
        number += 1;
        Some(number % 2)
    };
    for groups in [model.groups_by(|_| Some(0)), model.groups_by(halves)] {
        let groups = groups.expect("they fit the memory, as the files do");
        let reader = Reader::of_groups(groups.clone(), ReadMode::Pread, 0).expect("open files");
        for group in 0..groups.len() {
            let mut memory = Buffer::new(groups.bytes(group)).expect("memory");
            assert_eq!(reader.read(&group, &mut memory).expect("the files are whole"), memory.len());
            for (tensor, at) in groups.tensors(group) {
                let size = tensor.dtype().map_or(1, twinbuf_mmap::DType::size);
                assert_eq!(memory[at.clone()].as_ptr().addr() % size, 0, "{}", tensor.name());
                assert_eq!(memory[at], place(tensor.range()), "{}", tensor.name());
            }
        }
    }
}
