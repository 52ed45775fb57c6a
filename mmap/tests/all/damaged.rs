//! A file system with damaged blocks: past the page cache the same reads fail as by `pread`, with the same offsets, and no
//! other.
//!
//! Needs root, `mkfs.btrfs` and a loop device; says so where they are missing.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use twinbuf_mmap::{Buffer, Error, Plan, ReadMode, Reader, Records, Shuffle, Tensors};

const BLOCK: usize = 4096;
const BLOCKS: usize = 4096;
/// Those of the model's header.
const HEADER: usize = 4;

/// Where bytes are flipped, in blocks of each file: at the ends, next to each other, and far apart.
const DAMAGED: [u64; 7] = [0, 700, 701, 1500, 2047, 3333, 4095];

fn run(command: &str, arguments: &[&str]) -> bool {
    let quiet = Command::new(command).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}

/// A mounted image, until it is dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn new(image: &Path, at: &Path) -> Option<Self> {
        run("mount", &["-o", "loop", image.to_str()?, at.to_str()?]).then(|| Self(at.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run("umount", &["-l", self.0.to_str().unwrap_or_default()]);
    }
}

/// A block that no other has, also not in another file.
fn block(file: u64, number: u64) -> Vec<u8> {
    let word = |at: u64| (file << 40 | number << 16 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    (0..BLOCK as u64 / 8).flat_map(word).collect()
}

/// What each read came to: bytes, or the offset of the error.
fn outcomes(
    mut read: impl FnMut(usize, &mut [u8]) -> Result<usize, Error>,
    count: usize,
) -> Vec<Option<u64>> {
    let mut slot = Buffer::new(8 << 20).unwrap();
    let outcome = |number| match read(number, &mut slot) {
        Ok(_) => None,
        Err(Error::Read { offset, .. }) => Some(offset),
        Err(error) => panic!("{error}"),
    };
    (0..count).map(outcome).collect()
}

#[test]
fn only_what_is_damaged_fails() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [image, root] = ["image", "root"].map(|name| folder.path().join(name));
    fs::create_dir(&root).unwrap();
    fs::File::create(&image).unwrap().set_len(256 << 20).unwrap();
    let made = run("mkfs.btrfs", &["-q", image.to_str().unwrap()]);
    let Some(mounted) = made.then(|| Mounted::new(&image, &root)).flatten() else {
        return eprintln!("not checked: no root, no mkfs.btrfs or no loop device");
    };
    // One file of records, and one of tensors of 9 blocks and of 1100.
    let (records, model) = (root.join("records"), root.join("model.safetensors"));
    let mut file = fs::File::create(&records).unwrap();
    (0..BLOCKS as u64).for_each(|number| file.write_all(&block(1, number)).unwrap());
    drop(file);
    let (mut tensors, mut at) = (Vec::new(), 0);
    for number in 0..200 {
        let len = if number % 100 == 50 { 1100 * BLOCK } else { 9 * BLOCK };
        if at + len > (BLOCKS - HEADER) * BLOCK {
            break;
        }
        let end = at + len;
        tensors
            .push(format!(r#""t{number:03}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{at},{end}]}}"#));
        at = end;
    }
    let header = format!("{{{}}}", tensors.join(","));
    let header = format!("{header:0$}", HEADER * BLOCK - 8);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    (HEADER as u64..BLOCKS as u64).for_each(|number| bytes.extend(block(2, number)));
    bytes.truncate(HEADER * BLOCK + at);
    fs::write(&model, &bytes).unwrap();
    drop(mounted);
    let mut disk = fs::read(&image).unwrap();
    let places: Vec<usize> = (0..disk.len()).step_by(BLOCK).collect();
    let mut found = 0;
    for (file, number) in [1, 2].into_iter().flat_map(|file| DAMAGED.map(|number| (file, number))) {
        let block = block(file, number);
        // The front of the model is its header, and its last blocks are not written.
        if let Some(&place) = places.iter().find(|&&place| disk[place..place + BLOCK] == block) {
            disk[place + 77..place + 84].fill(0xEE);
            found += 1;
        }
    }
    assert!(found >= 2 * DAMAGED.len() - 2, "{found}");
    fs::write(&image, &disk).unwrap();
    let _mounted = Mounted::new(&image, &root).expect("the image again");

    // Records of 12 000 bytes, in batches of 16 and of 400.
    let records = Records::options().partial(true).open([&records], 12_000).unwrap();
    let orders = [
        Shuffle::None,
        Shuffle::Full,
        Shuffle::Chunks { records: 20 },
        Shuffle::Window { chunk_records: 20, window_chunks: 9 },
    ];
    let fails = |all: &[Option<u64>]| all.iter().flatten().count();
    for (shuffle, batch) in orders.into_iter().flat_map(|order| [(order, 16), (order, 400)]) {
        let plan = Plan::builder(records.len()).batch(batch).shuffle(shuffle).build().unwrap();
        let all = [ReadMode::Pread, ReadMode::Direct].map(|mode| {
            records.evict().unwrap();
            let reader = Reader::new(records.ranges(), &plan, mode).unwrap();
            reader.begin(crate::asked::epoch(&plan, 0));
            let read = |step, out: &mut [u8]| reader.read(&plan.batch(0, step as u64).unwrap(), out);
            outcomes(read, usize::try_from(plan.steps(0)).unwrap())
        });
        let some = fails(&all[0]);
        assert!(some > 0 && all[0].len() < 10 || some < all[0].len());
        assert_eq!(all[0], all[1], "{shuffle:?} {batch}");
        println!("{shuffle:?}, batches of {batch}: {some} of {} fail", all[0].len());
    }
    let model = Tensors::open([&model]).unwrap();
    let names: Vec<_> = model.all().iter().map(|tensor| [tensor.name().to_owned()]).collect();
    let groups = model.groups(names).unwrap();
    let all = [ReadMode::Pread, ReadMode::Direct].map(|mode| {
        let reader = Reader::of_groups(groups.clone(), mode, 0).unwrap();
        let count = groups.len();
        reader.begin(0..count);
        outcomes(|group, out| reader.read(&group, out), count)
    });
    assert_eq!(all[0], all[1], "tensors");
    println!("tensors: {} of {} fail", fails(&all[0]), all[0].len());
    assert!((2..9).contains(&fails(&all[0])));
}
