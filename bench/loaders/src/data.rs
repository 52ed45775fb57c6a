//! The files, with known contents.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use twinbuf::{BoxError, LastBatch};
use twinbuf_bench_harness::data::{MIB, whole};

use crate::ours;
use crate::work::{self, Kind, Work};

/// The files of one kind.
pub struct Files {
    pub kind: Kind,
    pub data: PathBuf,
    pub order: PathBuf,
}

impl Files {
    /// Creates them in `folder`: the data, with about `mib` MiB, unless they exist, and the order.
    pub fn make(folder: &Path, kind: Kind, mib: u64) -> Result<Self, BoxError> {
        let data = folder.join(format!("{}-{mib}.bin", kind.name()));
        let order = data.with_extension("order");
        let records = kind.records(mib * MIB);
        let len = kind.header() + (records - 1) * kind.stride() + kind.record_bytes() as u64;
        if fs::metadata(&data).ok().map(|found| found.len()) != Some(len) {
            eprintln!("making {}", data.display());
            whole(&data, |file| fill(file, kind, records))?;
        }
        let files = Self { kind, data, order };
        let work = files.work(true);
        let plan = ours::plan(&work, records).last_batch(LastBatch::Keep).build()?;
        whole(&files.order, |file| {
            for batch in (0..plan.steps(0)).filter_map(|step| plan.batch(0, step)) {
                batch.runs().flatten().try_for_each(|record| file.write_all(&record.to_le_bytes()))?;
            }
            Ok(())
        })?;
        Ok(files)
    }

    /// One epoch of them.
    pub fn work(&self, shuffled: bool) -> Work {
        Work {
            kind: self.kind,
            data: self.data.clone(),
            order: shuffled.then(|| self.order.clone()),
            batch: self.kind.batch(),
            epochs: 1,
            train: std::time::Duration::ZERO,
            verify: false,
        }
    }
}

fn fill(file: &mut BufWriter<File>, kind: Kind, records: u64) -> std::io::Result<()> {
    let mut random = fastrand::Rng::with_seed(7);
    // The part of a record that it does not share with the next one.
    let mut own = vec![0; kind.stride() as usize];
    if kind == Kind::Tokens {
        let tokens = u32::try_from(records * (kind.stride() / 2) + 1).map_err(std::io::Error::other)?;
        // According to `HEADERS_INFO` in llm.c's `dev/data/data_common.py`; the rest is not used.
        let mut header = vec![0; kind.header() as usize];
        for (field, value) in header.chunks_exact_mut(4).zip([20_240_520, 1, tokens]) {
            field.copy_from_slice(&value.to_le_bytes());
        }
        file.write_all(&header)?;
    }
    for record in 0..records {
        random.fill(&mut own);
        own[..8].copy_from_slice(&record.to_le_bytes());
        file.write_all(&own)?;
    }
    // The last window's last token.
    file.write_all(&own[..kind.record_bytes() - own.len()])
}

/// The expected digest and sum of an epoch of `work`: see [`Outcome`](crate::work::Outcome).
pub fn expected(work: &Work) -> Result<(u64, u64), BoxError> {
    let bytes = fs::read(&work.data)?;
    let kind = work.kind;
    let (mut digest, mut sum) = (0_u64, 0_u64);
    for record in work.order()? {
        digest = work::digest(digest, record);
        let start = usize::try_from(kind.header() + record * kind.stride())?;
        let bytes = &bytes[start..][..kind.record_bytes()];
        sum += match kind {
            Kind::Images => bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>(),
            Kind::Tokens => {
                bytes.as_chunks().0.iter().map(|&token| u64::from(u16::from_le_bytes(token))).sum()
            }
        };
    }
    Ok((digest, sum))
}
