//! Layers of a model that is larger than memory: computed on while the next one is read. `run.sh` starts each way in a control
//! group; see the README one folder up.

mod open;

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use memmap2::{Advice, Mmap};
use twinbuf::stream::{ReadMode, Tensors};
use twinbuf::{BoxError, stream};

const HELP: &str = "\
weights make FILE LAYERS MEBIBYTES         writes a model of random numbers
weights WAY FILE PASSES REPEATS LIMIT      computes on it, with LIMIT MiB of memory for a stream:
    stream    twinbuf: the next layer is read past the page cache while this one is used
    load      the same, without computing
    compute   computes as much, on one layer that stays in memory
    map       in place, in a mapping
    willneed  the same, and the next layer is asked for (MADV_WILLNEED)
    serial    each layer is read, then computed on
weights open FOLDER                        a model of 16 files with 18 867 tensors: time and memory";

fn main() -> Result<(), BoxError> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match *args {
        ["make", file, layers, mib] => make(file.as_ref(), layers.parse()?, mib.parse::<usize>()? << 20),
        ["open", folder] => open::measure(folder.as_ref()),
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
    let header = format!("{{{}}}", (0..layers).map(tensor).collect::<Vec<_>>().join(","));
    let header = format!("{header:width$}", width = header.len().next_multiple_of(8));
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

/// What a layer does to a number that goes through all of them. Each weight is used `repeats` times while it is in the first
/// cache, as by a matrix product.
fn compute(weights: &[f32], repeats: usize, mut x: f32) -> f32 {
    for block in weights.chunks(4096) {
        for _ in 0..repeats {
            let mut sums = [0.0f32; 16];
            for part in block.chunks_exact(16) {
                for (sum, weight) in sums.iter_mut().zip(part) {
                    *sum += weight * x;
                }
            }
            x = 0.5 + sums.iter().sum::<f32>() * 1e-3;
        }
    }
    x
}

fn measure(way: &str, path: &Path, passes: usize, repeats: usize, limit: u64) -> Result<(), BoxError> {
    let model = Tensors::open([path])?;
    let layer = |name: &str| name.split('.').nth(1)?.parse::<u32>().ok();
    let groups = model.groups_by(layer)?;
    let mut places = vec![0..0; groups.len()];
    for tensor in model.all() {
        let at = |offset| usize::try_from(offset).unwrap();
        let bytes = &tensor.range().bytes;
        places[layer(tensor.name()).unwrap() as usize] = at(bytes.start)..at(bytes.end);
    }
    let mut x = 1.0;
    let mut passes_read = Vec::new();
    let mut ends = Vec::new();
    let before = read_bytes();
    let start = Instant::now();
    match way {
        "stream" | "load" => {
            let mode = if std::env::var_os("AUTO").is_some() { ReadMode::Auto } else { ReadMode::Direct };
            let layers = stream(groups).memory_limit(limit).read_mode(mode);
            let mut layers = if passes > 1 { layers.cycle() } else { layers }.build()?;
            let mut first = None;
            for pass in 0..passes {
                let before = layers.report().reading.disk;
                // The last pass is followed by none.
                let mut left = model.all().len();
                for layer in layers.pass() {
                    left -= 1;
                    let layer = layer?;
                    first.get_or_insert_with(|| start.elapsed());
                    if way == "stream" {
                        x = compute(layer.tensor("up")?.cast()?, repeats, x);
                    }
                    if pass + 1 == passes && left == 0 {
                        break;
                    }
                }
                passes_read.push(layers.report().reading.disk - before);
                ends.push(start.elapsed());
            }
            let first = first.unwrap_or_default().as_secs_f64();
            eprintln!("kept {} of {} first {first:.4}", layers.kept(), layers.groups().len());
        }
        "compute" => {
            let mut memory = vec![0.0f32; places[0].len() / 4];
            memory.iter_mut().for_each(|weight| *weight = fastrand::f32() - 0.5);
            let start = Instant::now();
            for _ in 0..passes * places.len() {
                x = compute(&memory, repeats, x);
            }
            return print(way, start.elapsed(), x, before, &ends, &[]);
        }
        "map" | "willneed" => {
            // SAFETY: nobody truncates the file while it is mapped.
            let map = unsafe { Mmap::map(&File::open(path)?)? };
            for pass in 0..passes {
                for at in 0..places.len() {
                    if way == "willneed" && (pass + 1 < passes || at + 1 < places.len()) {
                        let next = &places[(at + 1) % places.len()];
                        for piece in next.clone().step_by(1 << 20) {
                            let page = piece / 4096 * 4096;
                            map.advise_range(Advice::WillNeed, page, (1 << 20).min(next.end - page))?;
                        }
                    }
                    let (front, weights, back) = floats(&map[places[at].clone()]);
                    assert!(front.is_empty() && back.is_empty());
                    x = compute(weights, repeats, x);
                }
                ends.push(start.elapsed());
            }
        }
        "serial" => {
            let mut file = File::open(path)?;
            let mut memory = vec![0.0f32; places[0].len() / 4];
            for _ in 0..passes {
                std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(places[0].start as u64))?;
                for _ in 0..places.len() {
                    file.read_exact(bytes(&mut memory))?;
                    x = compute(&memory, repeats, x);
                }
                ends.push(start.elapsed());
            }
        }
        _ => return Err(HELP.into()),
    }
    // Without what is read ahead for a pass that does not come.
    let wall = ends.last().copied().unwrap_or_else(|| start.elapsed());
    print(way, wall, x, before, &ends, &passes_read)
}

fn print(
    way: &str,
    wall: Duration,
    x: f32,
    before: Option<u64>,
    ends: &[Duration],
    passes_read: &[u64],
) -> Result<(), BoxError> {
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    let disk = read_bytes().zip(before).map_or("-".to_owned(), |(now, before)| mib(now - before));
    let ends: Vec<String> = ends.iter().map(|end| format!("{:.3}", end.as_secs_f64())).collect();
    let passes: Vec<String> = passes_read.iter().map(|&bytes| mib(bytes)).collect();
    println!(
        "{way} wall {:.4} x {:08x} disk_mib {disk} ends {} passes_mib {}",
        wall.as_secs_f64(),
        x.to_bits(),
        ends.join(","),
        passes.join(",")
    );
    Ok(())
}

/// Bytes that this process has had read from disks.
fn read_bytes() -> Option<u64> {
    let io = std::fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix("read_bytes: "))?.parse().ok()
}

fn floats(bytes: &[u8]) -> (&[u8], &[f32], &[u8]) {
    // SAFETY: every pattern of 32 bits is a number.
    unsafe { bytes.align_to() }
}

fn bytes(numbers: &mut [f32]) -> &mut [u8] {
    // SAFETY: every pattern of 32 bits is a number, and a byte has no alignment.
    unsafe { numbers.align_to_mut().1 }
}
