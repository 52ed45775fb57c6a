//! Reads a file in batches, computes an embedding of each record, and writes the embeddings to `emb.npy` behind the
//! loop: the next batch is read and earlier embeddings are written while the model runs.
//!
//! ```sh
//! cargo run --release --example embed -- any.file emb.npy
//! ```

use twinbuf::mmap::DType;
use twinbuf::write::Writer;
use twinbuf::{BoxError, LastBatch, Loader, Plan, Records};

/// Bytes of a record, and numbers of its embedding.
const RECORD: usize = 1024;
const WIDTH: usize = 64;

/// A model: the share of the record's bytes that have each value, modulo `WIDTH`.
fn embed(record: &[u8], embedding: &mut [f32]) {
    embedding.fill(0.0);
    for &byte in record {
        embedding[usize::from(byte) % WIDTH] += 1.0 / RECORD as f32;
    }
}

fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let (Some(from), Some(to)) = (arguments.next(), arguments.next()) else {
        return Err("usage: embed FILE EMBEDDINGS".into());
    };
    let data = Records::options().partial(true).open([from], RECORD)?;
    let plan = Plan::builder(data.len()).batch(256).last_batch(LastBatch::Keep).build()?;
    let mut loader = Loader::builder(data, plan).build()?;
    let mut out = Writer::npy(to, DType::F32, &[WIDTH]).build()?;
    for batch in loader.epochs(0..1) {
        let batch = batch?;
        let rows = batch.len() / RECORD;
        let embeddings = out.slot::<f32>(rows)?; // in the memory that is written
        for (record, embedding) in batch.chunks_exact(RECORD).zip(embeddings.chunks_exact_mut(WIDTH)) {
            embed(record, embedding);
        }
        out.commit(rows);
    }
    println!("{}\n{}", loader.report(), out.finish()?);
    Ok(loader.close()?)
}
