//! 64 processes, as a launcher starts them, read one data set: together every record once, in every order.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use twinbuf_mmap::{LastBatch, Plan, Records, Shuffle};

/// Set in the processes, to the folder of the data.
const CHILD: &str = "TWINBUF_RANKS_FOLDER";

const WORLD: u64 = 64;

const RECORD: usize = 24;

/// Records in each file: three batches of 7 for each rank, and 40 more, one each for the first ranks.
const FILES: [usize; 4] = [700, 1, 513, 170];

/// What another launcher may have set for this test.
const OTHERS: [&str; 4] = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"];

const ORDERS: [Shuffle; 4] = [
    Shuffle::None,
    Shuffle::Chunks { records: 5 },
    Shuffle::Window { chunk_records: 5, window_chunks: 3 },
    Shuffle::Full,
];

fn paths(folder: &Path) -> Vec<PathBuf> {
    (0..FILES.len()).map(|file| folder.join(file.to_string())).collect()
}

/// Records and what they hold, in no order: their number, and the sums of a hash of each and of its square.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sum {
    records: u64,
    hashes: u64,
    squares: u64,
}

impl Sum {
    fn add(&mut self, record: &[u8]) {
        let fnv = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = record.iter().fold(0xcbf2_9ce4_8422_2325, fnv);
        self.merge(Self { records: 1, hashes: hash, squares: hash.wrapping_mul(hash) });
    }

    fn merge(&mut self, other: Self) {
        self.records += other.records;
        self.hashes = self.hashes.wrapping_add(other.hashes);
        self.squares = self.squares.wrapping_add(other.squares);
    }
}

/// What one rank does: it prints a line for each order. It gets its rank from its environment.
fn rank(folder: &Path) {
    let records = Records::open(paths(folder), RECORD).unwrap();
    for (number, order) in ORDERS.into_iter().enumerate() {
        let plan = Plan::from_env(records.len()).unwrap();
        let plan = plan.batch(7).shuffle(order).last_batch(LastBatch::Keep).build().unwrap();
        let mut sum = Sum::default();
        let mut out = [0; 7 * RECORD];
        for step in 0..plan.steps(0) {
            let read = records.read(&plan.batch(3, step).unwrap(), &mut out).unwrap();
            out[..read].chunks_exact(RECORD).for_each(|record| sum.add(record));
        }
        let Sum { records, hashes, squares } = sum;
        println!("order {number}: {} of {}: {records} {hashes} {squares}", plan.rank(), plan.world());
    }
}

#[test]
fn together_they_read_every_record_once() {
    if let Some(folder) = std::env::var_os(CHILD) {
        return rank(Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    let mut whole = Sum::default();
    let mut number = 0_u64;
    for (path, records) in paths(folder.path()).iter().zip(FILES) {
        let mut bytes = Vec::new();
        for _ in 0..records {
            let record = [number, number.wrapping_mul(0x9E37_79B9_7F4A_7C15), !number].map(u64::to_le_bytes);
            whole.add(record.as_flattened());
            bytes.extend_from_slice(record.as_flattened());
            number += 1;
        }
        std::fs::write(path, bytes).unwrap();
    }

    if common::this_program().is_none() {
        return;
    }
    let children: Vec<_> = (0..WORLD)
        .map(|rank| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            for name in OTHERS {
                child.env_remove(name);
            }
            child.env("RANK", rank.to_string()).env("WORLD_SIZE", WORLD.to_string());
            child.env(CHILD, folder.path());
            child.args(["--exact", "together_they_read_every_record_once", "--nocapture"]);
            child.stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut sums = [Sum::default(); ORDERS.len()];
    for (rank, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "rank {rank}: {said}");
        for (order, sum) in sums.iter_mut().enumerate() {
            let start = format!("order {order}: {rank} of {WORLD}: ");
            let line = said.lines().find_map(|line| line.split_once(&start)).expect(&said).1;
            let numbers: Vec<u64> = line.split(' ').map(|number| number.parse().unwrap()).collect();
            let [records, hashes, squares] = numbers[..] else { panic!("{line}") };
            assert_eq!(records, if rank < 40 { 22 } else { 21 }, "rank {rank}, {:?}", ORDERS[order]);
            sum.merge(Sum { records, hashes, squares });
        }
    }
    for (sum, order) in sums.iter().zip(ORDERS) {
        assert_eq!(*sum, whole, "{order:?}");
    }
}
