//! Arrays of numpy's `.npz`: a zip archive of `.npy` files. The crate `rawzip` finds them, and no more is read.

use std::io;
use std::ops::Range;
use std::path::Path;

use rawzip::{CompressionMethod, ReaderAt, ZipLocator};

use super::{Array, excerpt, npy, open};
use crate::file::{DataFile, Opened, read_at};
use crate::{Cut, Error, FormatError, Options, Records};

impl Records {
    /// Opens the array named `name` in each of the files, which `numpy.savez` wrote. A row is one entry of its first axis.
    ///
    /// Feature `npz`. An array lies in the file as it is, and its rows are read in place. `numpy.savez_compressed` leaves
    /// no such rows: its arrays are refused. Their checksums, which cover whole arrays, are not checked.
    ///
    /// # Errors
    ///
    /// Those of [`open_npy`](Self::open_npy), where offsets are those in the `.npz`; and
    ///
    /// - [`FormatError::BadHeader`]: no zip archive, or one that was cut off;
    /// - [`FormatError::NoTensor`], which has the names of the arrays that are there;
    /// - [`FormatError::Compressed`].
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
    pub fn open_npz<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        name: &str,
        cut: Cut,
    ) -> Result<Self, Error> {
        Self::options().open_npz(paths, name, cut)
    }
}

impl Options {
    /// As [`Records::open_npz`], with these options.
    ///
    /// # Errors
    ///
    /// Those of [`Records::open_npz`].
    pub fn open_npz<P: AsRef<Path>>(
        self,
        paths: impl IntoIterator<Item = P>,
        name: &str,
        cut: Cut,
    ) -> Result<Records, Error> {
        open(self, paths, cut, |file| array(file, name))
    }
}

fn array(file: &DataFile, name: &str) -> Result<Array, Error> {
    npy::parse(file, &member(file, name)?)
}

/// Where the bytes of an array lie in the file.
fn member(file: &DataFile, name: &str) -> Result<Range<u64>, Error> {
    /// What `numpy.savez` appends to names.
    const END: &str = ".npy";
    let mut buffer = vec![0; rawzip::RECOMMENDED_BUFFER_SIZE];
    let opened = file.file()?;
    let archive = ZipLocator::new()
        .locate_in_reader(Source(&opened), &mut buffer, file.len)
        .map_err(|(_, error)| broken(file, &error))?;
    let (mut found, mut names) = (None, Vec::new());
    let mut entries = archive.entries(&mut buffer);
    while let Some(entry) = entries.next_entry().map_err(|error| broken(file, &error))? {
        let path = entry.file_path();
        let bytes: &[u8] = path.as_ref();
        let member = String::from_utf8_lossy(bytes);
        let Some(array) = member.strip_suffix(END) else { continue };
        if array == name {
            // Of two with one name Python takes the later.
            found = Some((entry.wayfinder(), entry.compression_method(), entry.flags().is_encrypted()));
        }
        names.push(array.to_owned());
    }
    let Some((place, method, encrypted)) = found else {
        names.sort_unstable();
        let (path, wanted) = (file.path.clone(), name.to_owned());
        return Err(FormatError::NoTensor { path, wanted, found: names }.into());
    };
    if method != CompressionMethod::STORE || encrypted {
        let method = method.name().map_or_else(|| format!("method {}", method.as_u16()), str::to_owned);
        let found = if encrypted { "encryption".to_owned() } else { method };
        let path = file.path.clone();
        return Err(FormatError::Compressed { path, name: name.to_owned(), found }.into());
    }
    let entry = archive.get_entry(place).map_err(|error| broken(file, &error))?;
    let (start, end) = entry.compressed_data_range();
    if start > end || end > file.len {
        let (path, wanted, found) = (file.path.clone(), end, file.len);
        return Err(FormatError::HeaderCutOff { path, wanted, found }.into());
    }
    Ok(start..end)
}

/// The archive cannot be understood, or could not be read.
fn broken(file: &DataFile, error: &rawzip::Error) -> Error {
    let path = file.path.clone();
    match error.kind() {
        // Past the end: what the archive says of itself is wrong.
        rawzip::ErrorKind::IO(source) if source.kind() != io::ErrorKind::UnexpectedEof => {
            // The library's error cannot be taken apart, and io::Error cannot be cloned.
            let source = match source.raw_os_error() {
                Some(number) => io::Error::from_raw_os_error(number),
                None => io::Error::new(source.kind(), source.to_string()),
            };
            return Error::Read { path, offset: 0, source };
        }
        _ => {}
    }
    let found = excerpt(error.to_string().as_bytes());
    FormatError::BadHeader { path, offset: 0, wanted: "a zip archive as `numpy.savez` writes it", found }
        .into()
}

/// The file, as the library reads it.
struct Source<'a>(&'a Opened<'a>);

impl ReaderAt for Source<'_> {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        loop {
            match read_at(self.0, out, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }
}
