//! The files to read: random bytes, created once, removed from the page cache when a run requires it.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use memmap2::{Advice, MmapMut};
use twinbuf::mmap::Residency;
use twinbuf::{BoxError, Records};

use crate::sys;

pub const MIB: u64 = 1 << 20;

/// Bytes of a record.
pub const RECORD: usize = 4096;

/// Space left free on the disk.
const SPARE: u64 = 1 << 30;

/// A file of `mib` MiB of random bytes in `folder`. It is kept for the next run.
pub fn random(folder: &Path, mib: u64) -> Result<PathBuf, BoxError> {
    let path = folder.join(format!("random-{mib}.bin"));
    if fs::metadata(&path).is_ok_and(|found| found.len() == mib * MIB) {
        return Ok(path);
    }
    let (room, wanted) = (sys::room(folder)?, mib * MIB + SPARE);
    if room < wanted {
        return Err(format!("{}: wanted room for {wanted} bytes, found {room}", folder.display()).into());
    }
    eprintln!("making {}", path.display());
    whole(&path, |file| {
        let mut random = fastrand::Rng::with_seed(mib);
        let mut block = vec![0; MIB as usize];
        (0..mib).try_for_each(|_| {
            random.fill(&mut block);
            file.write_all(&block)
        })
    })?;
    Ok(path)
}

/// Writes to a temporary file and renames it, so a killed run leaves no file that looks complete.
pub fn whole(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let unfinished = path.with_extension("part");
    let mut file = BufWriter::with_capacity(MIB as usize, File::create(&unfinished)?);
    fill(&mut file)?;
    file.into_inner()?.sync_all()?;
    fs::rename(&unfinished, path)
}

/// Memory as other programs leave it: full of single pages of files. New data in the page cache then finds no free huge
/// pages and few adjacent pages.
pub struct Used {
    holes: File,
    len: u64,
    next: AtomicU64,
}

static USED: OnceLock<Used> = OnceLock::new();

/// From now on [`make_cold`] leaves memory in the state that [`Used`] describes.
pub fn use_memory(folder: &Path) -> Result<(), BoxError> {
    let len = 2 * sys::memory()? / MIB * MIB;
    let path = folder.join(format!("sparse-{}.bin", std::process::id()));
    let holes = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    // It takes no disk space, and is gone when the program ends.
    fs::remove_file(&path)?;
    holes.set_len(len)?;
    USED.get_or_init(|| Used { holes, len, next: 0.into() }).fill(len / 2)
}

impl Used {
    /// Reads this many bytes of holes, page by page, each far from the previous one: they come as single pages.
    fn fill(&self, bytes: u64) -> Result<(), BoxError> {
        const PAGE: u64 = 4096;
        let pages = self.len / PAGE;
        let mut page = [0; PAGE as usize];
        for _ in 0..bytes.div_ceil(PAGE) {
            // A multiplier coprime to the number of pages visits all of them.
            let number = self.next.fetch_add(1, Relaxed) % pages;
            let place = u128::from(number) * 1_000_000_007 % u128::from(pages);
            self.holes.read_exact_at(&mut page, u64::try_from(place)? * PAGE)?;
        }
        Ok(())
    }
}

/// The file as records of [`RECORD`] bytes.
pub fn open(path: &Path) -> Result<Arc<Records>, BoxError> {
    Ok(Arc::new(Records::open([path], RECORD)?))
}

/// Removes the file from the page cache, and fails if more than one page in 10 000 stays.
pub fn make_cold(records: &Records) -> Result<(), BoxError> {
    let mut found = Residency::default();
    // Some pages stay for a while: those still on their way from the disk, such as the kernel's read-ahead of the
    // previous run, and those that a Python loader has mapped until it is collected. So this tries for ten seconds.
    for _ in 0..500 {
        records.evict()?;
        found = records.residency()?;
        if found.resident * 10_000 <= found.pages {
            return match USED.get() {
                Some(used) => used.fill(2 * records.bytes()),
                None => back(records.bytes()),
            };
        }
        thread::sleep(Duration::from_millis(20));
    }
    let path = records.shards()[0].path().display();
    Err(format!("{path}: wanted no page in the page cache, found {} of {}", found.resident, found.pages)
        .into())
}

/// Allocates this much memory and frees it at once: the pages for the file are then backed by the host.
///
/// A virtual machine may report free memory to its host two seconds after it became free (`mm/page_reporting.c` in the
/// kernel's source), and the host then takes it away. Reading into such pages is several times slower, as if the disk
/// were slow. A reader that bypasses the page cache, into an existing buffer, would not notice.
fn back(bytes: u64) -> Result<(), BoxError> {
    let mut memory = MmapMut::map_anon(usize::try_from(bytes)?)?;
    // Only for speed.
    let _ = memory.advise(Advice::HugePage);
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    Ok(())
}

/// Loads the file into the page cache, and fails if less than 99 % of it is there then.
pub fn make_warm(records: &Records) -> Result<(), BoxError> {
    let path = records.shards()[0].path();
    let mut block = vec![0; MIB as usize];
    let mut file = File::open(path)?;
    while file.read(&mut block)? > 0 {}
    let found = records.residency()?;
    if found.resident * 100 < found.pages * 99 {
        let path = path.display();
        return Err(
            format!("{path}: wanted all {} pages in memory, found {}", found.pages, found.resident).into()
        );
    }
    Ok(())
}
