//! Loads a `safetensors` file into memory on the device, one allocation a tensor: read by four threads into page-locked
//! slots, the next one while the one before is copied.
//!
//! `cargo run --release -p twinbuf-cuda --example stage -- model.safetensors`. Without a driver it prints one line and
//! exits with 2.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use twinbuf_cuda::cudarc::driver::{CudaSlice, CudaStream};
use twinbuf_cuda::{Stager, context};
use twinbuf_mmap::Tensors;

/// The weights of a model, by name. Work on `stream` finds them.
pub(crate) fn load(
    path: &Path,
    stream: &Arc<CudaStream>,
) -> Result<BTreeMap<String, CudaSlice<u8>>, Box<dyn Error>> {
    let model = Tensors::open([path])?;
    let files: Vec<&Path> = model.paths().collect();
    let mut weights = BTreeMap::new();
    for tensor in model.all().iter().filter(|tensor| !tensor.is_empty()) {
        weights.insert(tensor.name().to_owned(), stream.alloc_zeros::<u8>(usize::try_from(tensor.len())?)?);
    }
    let mut stager = Stager::new(stream.context()).slot_bytes(32 << 20).fill_threads(4).build()?;
    stager.scope(stream, |to| -> Result<(), Box<dyn Error>> {
        for (name, dst) in &mut weights {
            let range = model.get(name)?.range();
            let read = |at: usize, out: &mut [u8]| {
                let mut file = File::open(files[range.file])?;
                file.seek(SeekFrom::Start(range.bytes.start + at as u64))?;
                file.read_exact(out)
            };
            to.upload_with(read, dst.as_view_mut())?;
        }
        Ok(())
    })?;
    Ok(weights)
}

fn run() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("wanted a path: stage model.safetensors")?;
    let (stream, began) = (context(0)?.default_stream(), Instant::now());
    let weights = load(Path::new(&path), &stream)?;
    stream.synchronize()?;
    println!("{} tensors in {:.2?}", weights.len(), began.elapsed());
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(2);
    }
}
