//! `twinbuf inspect`: the contents of files, how much of them is in memory, and the system's read-ahead.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use twinbuf::mmap::{HINT_CHUNK, Residency};
use twinbuf::{BoxError, Records};

use crate::data::{Format, Shape, parts, tells};
use crate::text;

/// Shows what files hold: format, records, and how much of them is in the page cache
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    shape: Shape,
    /// Write JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Found {
    #[serde(serialize_with = "text::path")]
    path: PathBuf,
    format: Format,
    file_bytes: u64,
    arrays: Vec<Array>,
    page_cache: Cache,
    device: Option<Device>,
}

/// The records of a whole file, or of one of its arrays or tensors.
#[derive(Serialize)]
struct Array {
    tensor: Option<String>,
    #[serde(flatten)]
    content: Content,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Content {
    Records(Layout),
    /// The reason why it cannot be read as records.
    None {
        error: String,
    },
}

#[derive(Serialize)]
struct Layout {
    records: u64,
    record_bytes: u64,
    dtype: String,
    shape: Vec<usize>,
    bytes: u64,
    /// Bytes behind the last record, which do not fill one. 0 for one of several arrays or tensors.
    bytes_left: u64,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Cache {
    Counted {
        pages: u64,
        resident: u64,
    },
    /// The reason why it is unknown.
    Unknown {
        unknown: String,
    },
}

/// The limits that the block device of a file reports, in KiB.
#[derive(Serialize)]
struct Device {
    #[serde(serialize_with = "text::path")]
    folder: PathBuf,
    read_ahead_kib: u64,
    largest_request_kib: Option<u64>,
}

pub(crate) fn run(options: &Options) -> Result<String, BoxError> {
    let found = options.files.iter().map(|path| look(path, &options.shape)).collect::<Result<Vec<_>, _>>()?;
    if options.json {
        return Ok(serde_json::to_string_pretty(&found)? + "\n");
    }
    let mut out = String::new();
    for file in &found {
        file.print(&mut out)?;
    }
    if found.len() > 1 {
        let bytes = found.iter().map(|file| file.file_bytes).fold(0, u64::saturating_add);
        writeln!(out, "{}, {}", text::count(found.len() as u64, "file"), text::bytes(bytes))?;
    }
    Ok(out)
}

fn look(path: &Path, shape: &Shape) -> Result<Found, BoxError> {
    let file_bytes = Records::open([path], 1)?.bytes();
    let format = shape.format(path)?;
    let arrays = if format.parts().is_some() {
        parts(path, format, shape.cut()?)?
            .map(|(name, records)| Array {
                // One tensor that is a single number does not make the others fail.
                content: match records {
                    Ok(records) => Content::Records(Layout::of(&records, 0)),
                    Err(error) => Content::None { error: text::chain(&error) },
                },
                tensor: Some(name),
            })
            .collect()
    } else {
        let records = shape.open(&[path.to_path_buf()], format, "")?;
        // Not from the bytes of all records: those of a sequence overlap.
        let end = records
            .locate(records.len() - 1)
            .map_or(file_bytes, |last| last.offset + records.record_bytes() as u64);
        let left = file_bytes.saturating_sub(end);
        vec![Array { tensor: None, content: Content::Records(Layout::of(&records, left)) }]
    };
    Ok(Found {
        path: path.into(),
        format,
        file_bytes,
        arrays,
        page_cache: cache(path)?,
        device: device(path),
    })
}

impl Layout {
    fn of(records: &Records, bytes_left: u64) -> Self {
        Self {
            records: records.len(),
            record_bytes: records.record_bytes() as u64,
            dtype: records.dtype().to_string(),
            shape: records.shape().to_vec(),
            bytes: records.bytes(),
            bytes_left,
        }
    }

    fn print(&self) -> String {
        let Self { records, record_bytes, dtype, shape, bytes, bytes_left } = self;
        let mut line = text::count(*records, "record");
        let _ = match shape[..] {
            // For plain bytes, the length alone is enough.
            [_] if dtype == "u8" => write!(line, " of {record_bytes} B"),
            [] => write!(line, " of one {dtype}, {record_bytes} B"),
            _ => write!(line, " of {dtype} {shape:?}, {record_bytes} B"),
        };
        let _ = write!(line, ", together {}", text::bytes(*bytes));
        if *bytes_left > 0 {
            let _ = write!(line, "; left over: {}", text::count(*bytes_left, "byte"));
        }
        line
    }
}

impl Found {
    fn print(&self, out: &mut String) -> Result<(), std::fmt::Error> {
        writeln!(out, "{}", text::printable(&self.path.to_string_lossy()))?;
        writeln!(out, "  format      {}, {}", self.format.name(), text::bytes(self.file_bytes))?;
        for Array { tensor, content } in &self.arrays {
            let line = match content {
                Content::Records(layout) => layout.print(),
                Content::None { error } => format!("no records: {}", text::printable(error)),
            };
            match (tensor, self.format.parts()) {
                (Some(name), Some(part)) => writeln!(out, "  {part:<11} {}: {line}", text::printable(name))?,
                _ => writeln!(out, "  records     {line}")?,
            }
        }
        if let (true, Some(part)) = (self.arrays.is_empty(), self.format.parts()) {
            writeln!(out, "  {part:<11} none")?;
        }
        match &self.page_cache {
            Cache::Counted { pages, resident } => {
                let percent = text::percent(*resident as f64, *pages as f64);
                writeln!(out, "  page cache  {resident} of {pages} pages ({percent:.1} %)")?;
            }
            Cache::Unknown { unknown } => writeln!(out, "  page cache  unknown: {unknown}")?,
        }
        match &self.device {
            Some(Device { folder, read_ahead_kib, largest_request_kib }) => {
                let largest =
                    largest_request_kib.map_or(String::new(), |kib| format!(", largest request {kib} KiB"));
                writeln!(
                    out,
                    "  device      read-ahead {read_ahead_kib} KiB{largest} ({})",
                    folder.display()
                )?;
                // One hint can start the larger of the two; see `twinbuf::mmap::HINT_CHUNK`.
                let most = (*read_ahead_kib).max(largest_request_kib.unwrap_or(0));
                let piece = HINT_CHUNK as u64 >> 10;
                if most < piece {
                    let advice = "make the limits larger";
                    writeln!(
                        out,
                        "              WARNING: page hints of {piece} KiB are cut to {most} KiB: {advice}"
                    )?;
                }
            }
            None => writeln!(out, "  device      unknown: no block device of this file in /sys")?,
        }
        Ok(())
    }
}

/// How much of a file is in the page cache, if the system reports it.
fn cache(path: &Path) -> Result<Cache, BoxError> {
    let unknown = |why: &str| Ok(Cache::Unknown { unknown: why.to_string() });
    if !tells(path) {
        return unknown("the system tells it only to those who own the file or may write to it");
    }
    match Records::open([path], 1)?.residency() {
        Ok(Residency { pages, resident }) => Ok(Cache::Counted { pages, resident }),
        Err(error) => unknown(&text::chain(&error)),
    }
}

/// Finds the device by its number: `queue` has both limits, also for partitions; `bdi` has one, also for NFS
/// and FUSE.
#[cfg(target_os = "linux")]
fn device(path: &Path) -> Option<Device> {
    use std::os::linux::fs::MetadataExt;
    let number = |file: PathBuf| fs::read_to_string(file).ok()?.trim().parse().ok();
    let dev = fs::metadata(path).ok()?.st_dev();
    // Split like glibc's `gnu_dev_major` and `gnu_dev_minor`.
    let (major, minor) = (dev >> 8 & 0xfff | dev >> 32 & !0xfff, dev & 0xff | dev >> 12 & !0xff);
    let block = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    [
        block.join("queue"),
        block.join("../queue"),
        block.join("bdi"),
        format!("/sys/class/bdi/{major}:{minor}").into(),
    ]
    .into_iter()
    .find_map(|folder| {
        let read_ahead_kib = number(folder.join("read_ahead_kb"))?;
        let largest_request_kib = number(folder.join("max_sectors_kb"));
        // The real path, without links and `..`.
        let folder = folder.canonicalize().unwrap_or(folder);
        Some(Device { folder, read_ahead_kib, largest_request_kib })
    })
}

#[cfg(not(target_os = "linux"))]
fn device(_: &Path) -> Option<Device> {
    None
}
