//! Arrays of numpy's `.npz`, a zip archive of `.npy` files. The crate `rawzip` is used only to find them.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;

use rawzip::{CompressionMethod, ReaderAt, ZipArchiveEntryWayfinder, ZipLocator};

use super::{npy, open};
use crate::file::{DataFile, read_at};
use crate::{Cut, Error, Options, Records};

impl Records {
    /// Opens the array `name` in each file that `numpy.savez` wrote. `cut` sets how rows become records; a row is
    /// one entry along the first axis. Requires the feature `npz`.
    ///
    /// The crate reads rows directly from the file. The call refuses arrays of `numpy.savez_compressed`, because
    /// they are compressed. It does not verify zip checksums.
    ///
    /// # Errors
    ///
    /// - [`Error::Format`]: the file is not a zip archive, or it is truncated; or the array is compressed or encrypted.
    /// - [`Error::NoTensor`]: the file has no array with this name. The error lists the names.
    /// - The errors of [`open_npy`](Self::open_npy). Offsets count from the start of the `.npz` file.
    ///
    /// ```no_run
    /// use twinbuf_mmap::{Cut, Records};
    ///
    /// // numpy.savez("train.npz", x=images, y=labels)
    /// let images = Records::open_npz(["train.npz"], "x", Cut::Rows)?;
    /// let labels = Records::open_npz(["train.npz"], "y", Cut::Rows)?;
    /// assert_eq!(images.len(), labels.len());
    /// # Ok::<(), twinbuf_mmap::Error>(())
    /// ```
    pub fn open_npz(
        paths: impl IntoIterator<Item: AsRef<Path>>,
        name: &str,
        cut: Cut,
    ) -> Result<Self, Error> {
        Self::options().open_npz(paths, name, cut)
    }

    /// Returns an iterator over all arrays of one file, sorted by name. Each item is the name and the opened array.
    /// The iterator opens an array when it reaches the array. The call reads the directory of the archive once.
    ///
    /// # Errors
    ///
    /// The call returns the errors of [`open_npz`](Self::open_npz) that concern the archive. The item of an array
    /// contains the others, and those of opening the file again.
    ///
    /// ```no_run
    /// use twinbuf_mmap::{Cut, Records};
    ///
    /// // numpy.savez("train.npz", x=images, y=labels)
    /// for (name, records) in Records::open_npz_each("train.npz", Cut::Rows)? {
    ///     println!("{name}: {} records", records?.len());
    /// }
    /// # Ok::<(), twinbuf_mmap::Error>(())
    /// ```
    pub fn open_npz_each<P: AsRef<Path>>(
        path: P,
        cut: Cut,
    ) -> Result<impl Iterator<Item = (String, Result<Self, Error>)>, Error> {
        let file = DataFile::open(path.as_ref())?;
        let archive = Archive::read(&file)?;
        let found: Vec<_> = archive.arrays.keys().map(|name| (name.clone(), archive.bytes(name))).collect();
        Ok(found.into_iter().map(move |(name, bytes)| {
            let records = bytes.and_then(|bytes| {
                // Check the bytes again: the file may have become shorter since the archive was read.
                let array = |file: &DataFile| npy::parse(file, &within(file, bytes.clone())?);
                open(Self::options(), [&file.path], cut, array)
            });
            (name, records)
        }))
    }
}

impl Options {
    /// Opens files as [`Records::open_npz`] does, with these options.
    ///
    /// # Errors
    ///
    /// The errors of [`Records::open_npz`].
    pub fn open_npz(
        self,
        paths: impl IntoIterator<Item: AsRef<Path>>,
        name: &str,
        cut: Cut,
    ) -> Result<Records, Error> {
        open(self, paths, cut, |file| npy::parse(file, &Archive::read(file)?.bytes(name)?))
    }
}

/// The directory of an archive, read as a whole.
struct Archive<'a> {
    file: &'a DataFile,
    zip: rawzip::ZipArchive<&'a DataFile>,
    /// The arrays by name: the place of each in the archive, or its compression or encryption. If two have the same name,
    /// the later one is taken, as in Python.
    arrays: BTreeMap<String, Result<ZipArchiveEntryWayfinder, String>>,
}

impl<'a> Archive<'a> {
    fn read(file: &'a DataFile) -> Result<Self, Error> {
        /// What `numpy.savez` appends to names.
        const END: &str = ".npy";
        // If the file has to be opened again, return that error as it is: rawzip keeps its text alone.
        file.file()?;
        let mut buffer = vec![0; rawzip::RECOMMENDED_BUFFER_SIZE];
        let zip = ZipLocator::new()
            .locate_in_reader(file, &mut buffer, file.len)
            .map_err(|(_, error)| broken(file, &error))?;
        let mut arrays = BTreeMap::new();
        let mut entries = zip.entries(&mut buffer);
        while let Some(entry) = entries.next_entry().map_err(|error| broken(file, &error))? {
            let path = entry.file_path();
            let bytes: &[u8] = path.as_ref();
            if let Some(name) = String::from_utf8_lossy(bytes).strip_suffix(END) {
                let place = match entry.compression_method() {
                    _ if entry.flags().is_encrypted() => Err("encryption".to_owned()),
                    CompressionMethod::STORE => Ok(entry.wayfinder()),
                    method => Err(method.name().map_or(format!("method {}", method.as_u16()), str::to_owned)),
                };
                arrays.insert(name.to_owned(), place);
            }
        }
        Ok(Self { file, zip, arrays })
    }

    /// Returns the range of an array's bytes in the file.
    fn bytes(&self, name: &str) -> Result<Range<u64>, Error> {
        let Self { file, zip, arrays } = self;
        let place = arrays.get(name).ok_or_else(|| {
            let (path, found) = (file.path.clone(), arrays.keys().cloned().collect());
            Error::NoTensor { path, wanted: name.to_owned(), found }
        })?;
        let place = place.as_ref().map_err(|found| {
            let wanted = format!("{name:?} stored");
            let advice = "save it with `numpy.savez(path, ...)`, not `numpy.savez_compressed`";
            file.bad("the array is compressed", None, wanted, found, advice)
        })?;
        let entry = zip.get_entry(*place).map_err(|error| broken(file, &error))?;
        let (start, end) = entry.compressed_data_range();
        within(file, start..end)
    }
}

/// Returns `bytes` if the file has them.
fn within(file: &DataFile, bytes: Range<u64>) -> Result<Range<u64>, Error> {
    let end = if bytes.start > bytes.end { u64::MAX } else { bytes.end };
    file.check_end(end, file.len).map(|()| bytes)
}

/// Converts an error of `rawzip`: the archive is malformed, or it could not be read.
fn broken(file: &DataFile, error: &rawzip::Error) -> Error {
    match error.kind() {
        // The system's error can be neither moved out of rawzip's error nor cloned, so make a new one of its parts.
        rawzip::ErrorKind::IO(source) if source.kind() != io::ErrorKind::UnexpectedEof => {
            let other = || io::Error::new(source.kind(), source.to_string());
            let source = source.raw_os_error().map_or_else(other, io::Error::from_raw_os_error);
            Error::Read { path: file.path.clone(), offset: 0, source }
        }
        // Any other error, and a read past the end of the file, means that the archive is malformed.
        _ => file.bad_header(0, "a zip archive as `numpy.savez` writes it", error.to_string()),
    }
}

impl ReaderAt for DataFile {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        let file = self.file().map_err(io::Error::other)?;
        loop {
            match read_at(&file, out, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }
}
