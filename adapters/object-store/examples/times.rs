//! Times epochs over S3's protocol against the least possible, for record sizes, orders and numbers of workers.
//!
//! ```sh
//! cargo build --release --manifest-path server/Cargo.toml
//! cargo run --release --example times -- server/target/release/twinbuf-object-store-server /tmp/objects 8 128
//! ```
//!
//! Arguments: the server, a folder, the number of objects, MiB of each, and record sizes in KiB if
//! not all. The server delays each read by 30 ms. The model is requests in sequence of a worker ×
//! 30 ms + bytes / bandwidth. The bandwidth is that of plain sockets, without delay.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use twinbuf::{BoxError, Loader, Plan, Records, Shuffle};
use twinbuf_object_store::{Objects, Options};

const DELAY: u64 = 30;
const REQUESTS: u64 = 16;
/// Long enough for a figure, short enough for all of them.
const MOST: Duration = Duration::from_secs(4);

fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [server, folder, objects, mib, only @ ..] = &arguments[..] else {
        return Err("SERVER FOLDER OBJECTS MIB [KIB ...]".into());
    };
    let (objects, mib) = (objects.parse::<usize>()?, mib.parse::<usize>()?);
    let bucket = Path::new(folder).join("bucket/train");
    fs::create_dir_all(&bucket)?;
    for index in 0..objects {
        let path = bucket.join(index.to_string());
        if fs::metadata(&path).map_or(0, |meta| meta.len()) != (mib << 20) as u64 {
            fs::write(path, vec![index as u8; mib << 20])?;
        }
    }
    let mut plain = Server::start(server, folder, 0)?;
    let bandwidth = plain.bandwidth(objects)?;
    plain.stop()?;
    println!("the server alone: {:.0} MiB/s; load of the machine: {}", bandwidth / 1048576.0, load());
    println!(
        "| record | order | workers | batches | s | requests | MiB | wasted | time / model | with compute |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut server = Server::start(server, folder, DELAY)?;
    for kib in [4, 64, 512].into_iter().filter(|kib| only.is_empty() || only.contains(&kib.to_string())) {
        for (name, shuffle) in [
            ("in order", Shuffle::None),
            ("window", Shuffle::Window { chunk_records: (1024 / kib).max(1), window_chunks: 16 }),
            ("full", Shuffle::Full),
        ] {
            for workers in [1, 4, 16] {
                server.time(kib, name, shuffle, workers, bandwidth)?;
            }
        }
    }
    server.stop()
}

fn load() -> String {
    fs::read_to_string("/proc/loadavg").unwrap_or_default().trim().to_string()
}

struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(program: &str, folder: &str, delay: u64) -> Result<Self, BoxError> {
        let mut command = Command::new(program);
        let command = command.arg(folder).arg(delay.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut address = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut address)?;
        Ok(Self { child, address: address.trim().to_string() })
    }

    fn stop(&mut self) -> Result<(), BoxError> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Bytes a second of whole objects over plain sockets, four at a time. The first pass computes the ETags.
    fn bandwidth(&self, objects: usize) -> Result<f64, BoxError> {
        let get = |index: usize| -> io::Result<u64> {
            let mut socket = TcpStream::connect(&self.address)?;
            let host = &self.address;
            let head =
                format!("GET /bucket/train/{index} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
            socket.write_all(head.as_bytes())?;
            io::copy(&mut BufReader::with_capacity(1 << 20, socket), &mut io::sink())
        };
        let mut last = 0.0;
        for _ in 0..3 {
            let start = Instant::now();
            let bytes: u64 = std::thread::scope(|scope| {
                let threads = (0..4).map(|thread| {
                    scope.spawn(move || {
                        (thread..objects).step_by(4).map(|index| get(index).unwrap_or(0)).sum::<u64>()
                    })
                });
                threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap_or(0)).sum()
            });
            last = bytes as f64 / start.elapsed().as_secs_f64();
        }
        Ok(last)
    }

    fn time(
        &self,
        kib: u64,
        name: &str,
        shuffle: Shuffle,
        workers: u64,
        bandwidth: f64,
    ) -> Result<(), BoxError> {
        let record = (kib << 10) as usize;
        let endpoint = format!("http://{}", self.address);
        let flags = ["aws_allow_http", "aws_skip_signature"].map(|key| (key, "true"));
        let settings = [("aws_endpoint", &*endpoint), ("aws_region", "x")].into_iter().chain(flags);
        let settings = settings.map(|(key, value)| (key.to_string(), value.to_string())).collect();
        let options = Options { settings, requests: REQUESTS as usize, gap: 0, ..Options::default() };
        let data = Objects::open("s3://bucket/train/", options, |files| Records::open(files, record))?;
        let plan = Plan::builder(data.len()).batch((8192 / kib).clamp(16, 256)).shuffle(shuffle).build()?;
        let mut loader = Loader::builder(data.clone(), plan.clone()).workers(workers as usize).build()?;
        let (start, mut batches) = (Instant::now(), 0);
        for batch in loader.epoch(0) {
            batch?;
            batches += 1;
            if start.elapsed() > MOST {
                break;
            }
        }
        let (wall, stats) = (start.elapsed(), data.stats());
        drop(loader);
        // What was read ahead counts too: it took its time. `workers` batches load at a time.
        let sequence = stats.requests as f64 / (REQUESTS * workers) as f64;
        let rounds = sequence.max(batches as f64 / workers as f64) * DELAY as f64 / 1000.0;
        let model = rounds + stats.bytes as f64 / bandwidth;
        // With compute as long as the load of a batch: at best the longer of the two.
        let compute = wall / batches;
        let mut loader = Loader::builder(data.clone(), plan).workers(workers as usize).build()?;
        let start = Instant::now();
        let mut used = Duration::ZERO;
        for batch in loader.epoch(0).take(batches as usize) {
            let begin = Instant::now();
            batch?;
            std::thread::sleep(compute);
            used += begin.elapsed();
        }
        let both = start.elapsed().as_secs_f64() / used.max(wall).as_secs_f64();
        println!(
            "| {kib} KiB | {name} | {workers} | {batches} | {:.2} | {} | {:.0} | {:.1} % | {:.2} | {both:.2} |",
            wall.as_secs_f64(),
            stats.requests,
            stats.bytes as f64 / 1048576.0,
            (stats.bytes - stats.used) as f64 / stats.bytes as f64 * 100.0,
            wall.as_secs_f64() / model,
        );
        Ok(())
    }
}
