//! Layers of a model that is larger than memory: computed on while the next one is read. `run.sh` starts each way in a control
//! group; see the README one folder up.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{channel, sync_channel};

use memmap2::{Advice, Mmap};
use safetensors::SafeTensors;
use twinbuf::mmap::ReadMode;
use twinbuf::{BoxError, stream};
use twinbuf_bench_weights::{Run, compute, open};

const HELP: &str = "\
weights make FILE LAYERS BYTES             writes a model of random numbers, BYTES a layer
weights touch MEBIBYTES                    uses as much memory and gives it back
weights WAY FILE PASSES REPEATS LIMIT      computes on it, with LIMIT MiB of memory for a stream:
    stream    twinbuf: the next layer is read while this one is used
    load      the same, without computing
    compute   computes as much, on one layer that stays in memory
    map       in place, in a mapping
    willneed  the same, and the next layer is asked for (MADV_WILLNEED)
    read      each layer is read, at the place that the crate `safetensors` tells, then computed on
    thread    a thread reads the next layer into the other of two buffers";

fn main() -> Result<(), BoxError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match *args {
        ["make", file, layers, bytes] => make(file.as_ref(), layers.parse()?, bytes.parse()?),
        ["touch", mib] => {
            let mut memory = vec![0u8; mib.parse::<usize>()? << 20];
            memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
            std::hint::black_box(memory);
            Ok(())
        }
        [way, file, passes, repeats, limit] => {
            measure(way, file.as_ref(), passes.parse()?, repeats.parse()?, limit.parse::<u64>()? << 20)
        }
        _ => Err(HELP.into()),
    }
}

/// Layers of one tensor each.
fn make(path: &Path, layers: usize, bytes: usize) -> Result<(), BoxError> {
    let tensor = |layer: usize| {
        let (start, end, count) = (layer * bytes, (layer + 1) * bytes, bytes / 4);
        format!(r#""layers.{layer}.up":{{"dtype":"F32","shape":[{count}],"data_offsets":[{start},{end}]}}"#)
    };
    let mut header = format!("{{{}}}", (0..layers).map(tensor).collect::<Vec<_>>().join(","));
    header += &"       "[..header.len().next_multiple_of(8) - header.len()];
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..layers * bytes / 4 {
        file.write_all(&(random.f32() - 0.5).to_le_bytes())?;
    }
    file.into_inner().map_err(|error| error.into_error())?.sync_all()?;
    Ok(())
}

fn measure(way: &str, path: &Path, passes: usize, repeats: usize, limit: u64) -> Result<(), BoxError> {
    let mut x = 1.0;
    let mut run = Run::start();
    match way {
        "stream" | "load" => {
            let layers = stream(open(path)?.1).memory_limit(limit).read_mode(ReadMode::Direct);
            let mut layers = if passes > 1 { layers.cycle() } else { layers }.build()?;
            let last = layers.groups().len();
            for pass in 1..=passes {
                // The last pass is followed by none.
                let until = if pass == passes { last } else { usize::MAX };
                for layer in layers.pass().take(until) {
                    let layer = layer?;
                    if way == "stream" {
                        x = compute(layer.tensor("up")?.cast()?, repeats, x);
                    }
                }
                run.end_of_pass();
            }
            let report = layers.report();
            eprintln!("kept {} of {last} layers, {}", layers.kept(), report.choices[0]);
        }
        "compute" => {
            let places = places(path)?;
            let mut memory = vec![0.0f32; places[0].1.len() / 4];
            memory.iter_mut().for_each(|weight| *weight = fastrand::f32() - 0.5);
            run = Run::start();
            for _ in 0..passes {
                x = places.iter().fold(x, |x, _| compute(&memory, repeats, x));
                run.end_of_pass();
            }
            run.print(way, 0);
            return Ok(());
        }
        "map" | "willneed" => {
            let places = places(path)?;
            // SAFETY: nobody truncates the file while it is mapped.
            let map = unsafe { Mmap::map(&File::open(path)?)? };
            for pass in 1..=passes {
                for at in 0..places.len() {
                    if way == "willneed" && (pass < passes || at + 1 < places.len()) {
                        let next = &places[(at + 1) % places.len()].1;
                        for piece in next.clone().step_by(1 << 20) {
                            let page = piece / 4096 * 4096;
                            map.advise_range(Advice::WillNeed, page, (1 << 20).min(next.end - page))?;
                        }
                    }
                    x = compute(bytemuck::cast_slice(&map[places[at].1.clone()]), repeats, x);
                }
                run.end_of_pass();
            }
        }
        "read" => {
            let (places, file) = (places(path)?, File::open(path)?);
            let mut memory = vec![0.0f32; places[0].1.len() / 4];
            for _ in 0..passes {
                for (_, place) in &places {
                    let layer = &mut memory[..place.len() / 4];
                    file.read_exact_at(bytemuck::cast_slice_mut(layer), place.start as u64)?;
                    x = compute(layer, repeats, x);
                }
                run.end_of_pass();
            }
        }
        "thread" => {
            let (places, file) = (places(path)?, File::open(path)?);
            let (full, filled) = sync_channel::<std::io::Result<Vec<f32>>>(1);
            let (free, recycled) = channel();
            for _ in 0..2 {
                free.send(vec![0.0f32; places[0].1.len() / 4])?;
            }
            let all: Vec<Range<usize>> = places.iter().map(|place| place.1.clone()).collect();
            let reader = std::thread::spawn(move || {
                for place in (0..passes).flat_map(|_| &all) {
                    let Ok(mut memory) = recycled.recv() else { return };
                    let read =
                        file.read_exact_at(bytemuck::cast_slice_mut(&mut memory[..]), place.start as u64);
                    if full.send(read.map(|()| memory)).is_err() {
                        return;
                    }
                }
            });
            for _ in 0..passes {
                for _ in &places {
                    let memory = filled.recv()??;
                    x = compute(&memory, repeats, x);
                    // The thread has ended after the last one.
                    let _ = free.send(memory);
                }
                run.end_of_pass();
            }
            reader.join().map_err(|_| "the reader panicked")?;
        }
        _ => return Err(HELP.into()),
    }
    run.print(way, x.to_bits());
    Ok(())
}

/// The layers and their bytes in the file, by the crate that most programs use for it.
fn places(path: &Path) -> Result<Vec<(u32, Range<usize>)>, BoxError> {
    // SAFETY: nobody truncates the file while it is mapped.
    let map = unsafe { Mmap::map(&File::open(path)?)? };
    let (length, metadata) = SafeTensors::read_metadata(&map)?;
    let mut places = Vec::new();
    for (name, tensor) in metadata.tensors() {
        let (start, end) = tensor.data_offsets;
        let layer = name.split('.').nth(1).ok_or("a layer")?.parse()?;
        places.push((layer, 8 + length + start..8 + length + end));
    }
    places.sort_by_key(|place| place.0);
    Ok(places)
}
