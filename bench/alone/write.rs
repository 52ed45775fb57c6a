//! Rows that a loop makes, written by the writer and by what people use, in turns.
//!
//! `cargo bench --bench write [MIB]`. Unix with GNU `dd`, and a target folder on a disk; all ways sync. The
//! loop computes for no time, for half of the time that the disk takes, or for as long. Each round's ratio is to
//! max(compute, the disk) of the same round: `dd` past the page cache, the faster of two runs.

#[cfg(unix)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `cargo test --all-targets` runs benchmarks too, without this argument.
    if std::env::args().any(|argument| argument == "--bench") { unix::run() } else { Ok(()) }
}

#[cfg(not(unix))]
fn main() {}

#[cfg(unix)]
mod unix {
    use std::error::Error;
    use std::fs::{self, File};
    use std::io::{self, BufWriter, Write};
    use std::path::Path;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use twinbuf::write::Writer;

    const ROUNDS: usize = 5;
    const WAYS: [&str; 4] = ["writer in place", "writer copies", "BufWriter", "write_all"];

    type Done = Result<(), Box<dyn Error>>;

    pub(super) fn run() -> Done {
        let mib = std::env::args().filter_map(|argument| argument.parse().ok()).next().unwrap_or(512);
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let path = folder.path().join("data");
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        println!("{mib} MiB, {ROUNDS} rounds; load {load}");
        println!("  row  compute  way               wall s  / max(compute, dd)  CPU s a GiB  dd s");
        for row in [1 << 10, 64 << 10, 768 << 10] {
            let rows = (mib << 20) / row;
            for share in [0.0, 0.5, 1.0] {
                let mut results = [const { Vec::new() }; 4];
                for _ in 0..ROUNDS {
                    let disk = dd(&path, mib)?.min(dd(&path, mib)?);
                    let compute = disk.mul_f64(share);
                    let least = disk.max(compute).as_secs_f64();
                    for (way, results) in results.iter_mut().enumerate() {
                        let (start, before) = (Instant::now(), cpu());
                        write(way, &path, row, rows, compute)?;
                        let (wall, cpu) = (start.elapsed().as_secs_f64(), (cpu() - before).as_secs_f64());
                        let cpu = (cpu - compute.as_secs_f64()) / (row * rows) as f64 * (1_u64 << 30) as f64;
                        results.push([wall / least, wall, cpu, disk.as_secs_f64()]);
                        fs::remove_file(&path)?;
                    }
                }
                for (way, results) in WAYS.iter().zip(&mut results) {
                    results.sort_by(|a, b| a[0].total_cmp(&b[0]));
                    let [ratio, wall, cpu, disk] = results[ROUNDS / 2];
                    let row = row >> 10;
                    println!(
                        "{row:>4}K  {share:>7}  {way:<16} {wall:>7.3}  {ratio:>18.2}  {cpu:>11.2}  {disk:>4.2}"
                    );
                }
            }
        }
        Ok(())
    }

    /// The time of `dd` past the page cache, with a sync.
    fn dd(path: &Path, mib: usize) -> Result<Duration, Box<dyn Error>> {
        let start = Instant::now();
        let mut dd = Command::new("dd");
        dd.arg("if=/dev/zero").arg(format!("of={}", path.display())).arg(format!("count={}", mib / 4));
        let done = dd.args(["bs=4M", "oflag=direct", "conv=fsync"]).stderr(Stdio::null()).status()?;
        let time = start.elapsed();
        fs::remove_file(path)?;
        if done.success() { Ok(time) } else { Err("dd failed".into()) }
    }

    /// Makes a row. The computation spins for its part of the time.
    fn make(row: &mut [u8], number: usize, start: Instant, until: Duration) {
        row.fill((number % 251).try_into().unwrap_or(0));
        while start.elapsed() < until {
            std::hint::spin_loop();
        }
    }

    fn write(way: usize, path: &Path, row: usize, rows: usize, compute: Duration) -> Done {
        // Without the time of waits: a loop computes as long whatever it waits for.
        let each = compute / u32::try_from(rows)?;
        let make = |bytes: &mut [u8], number| make(bytes, number, Instant::now(), each);
        match way {
            0 => {
                let mut out = Writer::raw(path, row).build()?;
                for number in 0..rows {
                    make(out.slot(1)?, number);
                    out.commit(1);
                }
                out.finish()?;
            }
            1 => {
                copies(Writer::raw(path, row).build()?, row, rows, make)?.finish()?;
            }
            2 => {
                let out = BufWriter::with_capacity(4 << 20, File::create(path)?);
                copies(out, row, rows, make)?.into_inner()?.sync_all()?;
            }
            _ => copies(File::create(path)?, row, rows, make)?.sync_all()?,
        }
        Ok(())
    }

    /// Makes each row in one piece of memory and writes it.
    fn copies<W: Write>(
        mut out: W,
        row: usize,
        rows: usize,
        make: impl Fn(&mut [u8], usize),
    ) -> io::Result<W> {
        let mut memory = vec![0; row];
        for number in 0..rows {
            make(&mut memory, number);
            out.write_all(&memory)?;
        }
        Ok(out)
    }

    /// The processor time of this process.
    fn cpu() -> Duration {
        // SAFETY: all zeros are a valid `rusage`.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the struct is a live local.
        unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
        let time =
            |time: libc::timeval| Duration::from_secs_f64(time.tv_sec as f64 + time.tv_usec as f64 / 1e6);
        time(usage.ru_utime) + time(usage.ru_stime)
    }
}
