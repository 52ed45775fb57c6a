//! A model of 16 files with 18 867 tensors, the shape of Qwen3-30B-A3B: how long it takes to open, and the memory of its index.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use twinbuf::BoxError;
use twinbuf::stream::Tensors;

/// Bytes that are allocated, and the most that ever were.
static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

struct Counted;

// SAFETY: every call is passed to `System`, and `System` keeps the contract.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Relaxed) + layout.size();
        MOST.fetch_max(now, Relaxed);
        // SAFETY: the caller's promise is that of `System.alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the pointer came from `System.alloc` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTED: Counted = Counted;

const FILES: usize = 16;
const LAYERS: usize = 48;
const EXPERTS: usize = 128;

/// The names of Qwen3-30B-A3B, and the shape of each.
fn names() -> Vec<(String, [usize; 2])> {
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), [151_936, 2048]),
        ("lm_head.weight".to_owned(), [151_936, 2048]),
    ];
    all.push(("model.norm.weight".to_owned(), [1, 2048]));
    for layer in 0..LAYERS {
        let front = format!("model.layers.{layer}");
        for expert in 0..EXPERTS {
            for (part, shape) in [("down", [2048, 768]), ("gate", [768, 2048]), ("up", [768, 2048])] {
                all.push((format!("{front}.mlp.experts.{expert}.{part}_proj.weight"), shape));
            }
        }
        for part in ["input_layernorm", "post_attention_layernorm", "mlp.gate"] {
            all.push((format!("{front}.{part}.weight"), [1, 2048]));
        }
        for part in ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"] {
            all.push((format!("{front}.self_attn.{part}.weight"), [128, 2048]));
        }
    }
    all
}

/// Writes the headers, and leaves the data out: nothing but the length of a file is looked at.
fn make(folder: &Path) -> Result<(), BoxError> {
    let names = names();
    let mut map = String::new();
    for (file, names) in names.chunks(names.len().div_ceil(FILES)).enumerate() {
        let name = format!("model-{:05}-of-{FILES:05}.safetensors", file + 1);
        let (mut header, mut end) = (String::from(r#"{"__metadata__":{"format":"pt"}"#), 0);
        for (tensor, [rows, columns]) in names {
            let bytes = rows * columns * 2;
            let range = format!("{end},{}", end + bytes);
            write!(
                header,
                r#","{tensor}":{{"dtype":"BF16","shape":[{rows},{columns}],"data_offsets":[{range}]}}"#
            )?;
            write!(map, r#","{tensor}":"{name}""#)?;
            end += bytes;
        }
        header.push('}');
        let path = folder.join(name);
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat())?;
        std::fs::File::options().write(true).open(&path)?.set_len((8 + header.len() + end) as u64)?;
    }
    let index = format!(r#"{{"metadata":{{"total_size":1}},"weight_map":{{{}}}}}"#, &map[1..]);
    std::fs::write(folder.join("model.safetensors.index.json"), index)?;
    Ok(())
}

pub(crate) fn measure(folder: &Path) -> Result<(), BoxError> {
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        std::fs::create_dir_all(folder)?;
        make(folder)?;
    }
    let (folder, index) = (folder.canonicalize()?, index.canonicalize()?);
    let mut times = Vec::new();
    for _ in 0..11 {
        let before = NOW.load(Relaxed);
        MOST.store(before, Relaxed);
        let start = Instant::now();
        let model = Tensors::open([&index])?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        if times.len() == 11 {
            let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
            let [kept, most] = [&NOW, &MOST].map(|bytes| mib(bytes.load(Relaxed) - before));
            let open = std::fs::read_dir("/proc/self/fd")?.filter_map(Result::ok);
            let open =
                open.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|path| path.starts_with(&folder)));
            println!("tensors {} files {} open {}", model.all().len(), model.paths().len(), open.count());
            println!("index_mib {kept:.2} while_opening_mib {most:.2}");
        }
    }
    times.sort_by(f64::total_cmp);
    println!("first_to_last_ms {:.1} median_ms {:.1} {:.1}", times[0], times[5], times[10]);
    Ok(())
}
