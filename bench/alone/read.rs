//! Cached records, by a reader and by one `pread` for each run of them, in turns.
//!
//! `cargo bench --bench read`. Linux, and a target folder on a disk. Each round's ratio is to the `pread`s of the same round,
//! so a disturbance hits both.

#[cfg(target_os = "linux")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `cargo test --all-targets` runs benchmarks too, without this argument.
    if std::env::args().any(|argument| argument == "--bench") { linux::run() } else { Ok(()) }
}

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
mod linux {
    use std::error::Error;
    use std::fs::File;
    use std::io::Write;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Instant;

    use twinbuf_mmap::{BatchIndices, Buffer, Plan, ReadMode, Reader, Records, Shuffle};

    const ROUNDS: u64 = 11;

    pub(super) fn run() -> Result<(), Box<dyn Error>> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let path = folder.path().join("data");
        let mut file = File::create(&path)?;
        let block: Vec<u8> = (0..=250).cycle().take(1 << 20).collect();
        (0..256).try_for_each(|_| file.write_all(&block))?;
        file.sync_all()?;
        cached(&path)
    }

    /// Batches of shuffled records that are in the page cache, in the pages in which a reader's own hints have brought them:
    /// by a reader, against one `pread` for each run.
    fn cached(path: &Path) -> Result<(), Box<dyn Error>> {
        let file = File::open(path)?;
        let sizes = [256, 1024, 2048, 3072, 4096, 6144, 8192, 16_384, 65_536, 1 << 20];
        // Slots of 128 KiB and of 2 MiB, if that is 8 to 4096 records; else of as many.
        for (record, bytes) in sizes.into_iter().flat_map(|record| [(record, 128 << 10), (record, 2 << 20)]) {
            let batch = (bytes / record).clamp(8, 4096);
            let records = Arc::new(Records::options().partial(true).open([path], record)?);
            let plan = Plan::builder(records.len()).batch(batch as u64).shuffle(Shuffle::Full).build()?;
            let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto)?;
            let mut out = Buffer::new(batch * record).ok_or("no memory")?;
            records.evict()?;
            let order = plan.clone();
            reader.begin((0..plan.steps(1)).map_while(move |step| order.batch(1, step)));
            for step in 0..plan.steps(1) {
                reader.read(&plan.batch(1, step).ok_or("no batch")?, &mut out)?;
            }
            let steps = plan.steps(0).min((64 << 20) / (batch * record) as u64);
            let batches: Vec<BatchIndices> = (0..steps).filter_map(|step| plan.batch(0, step)).collect();
            let mut times = [const { Vec::new() }; 2];
            for round in 0..=ROUNDS {
                for (by, times) in times.iter_mut().enumerate() {
                    let begun = Instant::now();
                    for batch in &batches {
                        if by == 1 {
                            reader.read(batch, &mut out)?;
                        } else {
                            let mut rest = &mut out[..];
                            for run in batch.runs() {
                                let (part, behind) =
                                    rest.split_at_mut(record * usize::try_from(run.end - run.start)?);
                                file.read_exact_at(part, run.start * record as u64)?;
                                rest = behind;
                            }
                        }
                    }
                    // The first round warms up.
                    if round > 0 {
                        times.push(begun.elapsed().as_secs_f64() / steps as f64);
                    }
                }
            }
            print(&format!("{batch} cached records of {record} B"), &times);
        }
        Ok(())
    }

    /// The median time of each way, and the quartiles of its ratio to the first.
    fn print(what: &str, times: &[Vec<f64>; 2]) {
        let quartiles = |mut values: Vec<f64>| {
            values.sort_unstable_by(f64::total_cmp);
            [1, 2, 3].map(|part| values[part * (values.len() - 1) / 4])
        };
        for (way, of) in ["pread", "reader"].iter().zip(times) {
            let [.., median, _] = quartiles(of.clone());
            let ratios = of.iter().zip(&times[0]).map(|(time, base)| time / base).collect();
            let [low, ratio, high] = quartiles(ratios);
            let micros = median * 1e6;
            println!("{what:<36} {way:<8} {micros:>10.1} us  {ratio:.2} [{low:.2}, {high:.2}]");
        }
    }
}
