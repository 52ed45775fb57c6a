//! The tensors of a model by name: `safetensors`, their index, and GGUF. Only headers and indexes are read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::safetensors::Header;
use super::tensor::{Tensor, find};
use super::{LONGEST, gguf};
use crate::Error;
use crate::file::DataFile;
use crate::ranges::{Places, Shard, Shards};

/// The tensors of a model, by name. Requires the feature `safetensors`.
///
/// The files may be `safetensors` files, GGUF files, or the `model.safetensors.index.json` of a model in several files.
/// Opening reads only headers and indexes. A clone is another handle to the same files.
///
/// Do not write to the files while they are open. Reading bytes that a truncation removed fails with
/// [`Error::Truncated`].
///
/// ```
/// use twinbuf_mmap::{DType, Tensors};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let header = r#"{"layers.0.up":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},
///                  "layers.0.scale":{"dtype":"F8_E8M0","shape":[],"data_offsets":[12,13]}}"#;
/// let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// file.extend(header.bytes());
/// file.extend([0; 13]);
/// std::fs::write(&path, &file)?;
///
/// let model = Tensors::open([&path])?;
/// let up = model.get("layers.0.up")?;
/// assert_eq!((up.dtype(), up.shape(), up.len()), (Some(DType::Bf16), &[2, 3][..], 12));
/// let scale = model.get("layers.0.scale")?; // no `DType`: bytes
/// assert_eq!((scale.dtype(), scale.format_type(), scale.len()), (None, "F8_E8M0", 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Tensors(Arc<Model>);

struct Model {
    /// The first path that was given, for errors.
    path: PathBuf,
    shards: Vec<Shard>,
    /// Sorted by name.
    tensors: Vec<Tensor>,
}

impl Tensors {
    /// Opens a model. Each path is a `safetensors` file, a GGUF file, or an index of `safetensors` files. The name
    /// of an index ends in `.json`.
    ///
    /// An index names files in its own folder. From each of these files, the model contains only the tensors that
    /// the index lists for the file. Tensors of every element type of the formats can be opened, except GGUF types of
    /// unknown size.
    ///
    /// # Errors
    ///
    /// - [`Error::NoPaths`]: the list of paths is empty.
    /// - [`Error::NotFound`], [`Error::PermissionDenied`], [`Error::NotAFile`], [`Error::Open`],
    ///   [`Error::Read`], [`Error::Truncated`]: a file, or a file named by an index, could not be
    ///   opened or read.
    /// - [`Error::Format`]: a header or an index is invalid, or a file is a pointer of Git LFS; tensors overlap, or two
    ///   have the same name; a GGUF tensor does not consist of whole blocks, or the size of its type is unknown; or the
    ///   tensors end past the end of the file, or, for `safetensors`, before it.
    /// - [`Error::MissingParts`]: a GGUF file is a part of a model, and not all parts were given.
    /// - [`Error::NoTensor`]: an index lists a tensor that its file does not have.
    pub fn open(paths: impl IntoIterator<Item: AsRef<Path>>) -> Result<Self, Error> {
        let mut files: Vec<(PathBuf, Option<BTreeSet<String>>)> = Vec::new();
        let mut first = None;
        for path in paths {
            let path = path.as_ref();
            first.get_or_insert_with(|| path.to_owned());
            if path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json")) {
                files.extend(index(path)?.into_iter().map(|(path, names)| (path, Some(names))));
            } else {
                files.push((path.to_owned(), None));
            }
        }
        let path = first.ok_or(Error::NoPaths)?;
        let (mut shards, mut tensors, mut parts) = (Shards::new(files.len()), Vec::new(), Vec::new());
        for (path, names) in files {
            let file = shards.open(&path)?;
            let found = match &*file.header(0, 4.min(usize::try_from(file.len).unwrap_or(4)))? {
                gguf::MAGIC => {
                    let (found, part) = gguf::tensors(&file, shards.all.len())?;
                    parts.push((path, part));
                    found
                }
                _ => Header::read(&file, shards.all.len())?.tensors,
            };
            match names {
                Some(names) => tensors.extend(listed(&file, found, &names)?),
                None => tensors.extend(found),
            }
            let bytes = 0..file.len;
            shards.push(file, Places::Strided(0), bytes, 0);
        }
        whole(&parts)?;
        let shards = shards.all;
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some([first, twice]) = tensors.windows(2).find(|two| two[0].name == two[1].name) {
            let [first, file] = [first, twice].map(|tensor| &shards[tensor.range.file].file);
            let place = match &first.path {
                path if *path == file.path => " twice".to_owned(),
                path => format!(", as in {path:?}"),
            };
            return Err(file.bad_header(0, "each name once", format!("{:?}{place}", twice.name)));
        }
        Ok(Self(Arc::new(Model { path, shards, tensors })))
    }

    /// Returns the tensor with this name.
    ///
    /// # Errors
    ///
    /// [`Error::NoTensor`] if there is none. The error lists the names of the model's tensors.
    pub fn get(&self, name: &str) -> Result<&Tensor, Error> {
        self.find(name).map(|index| &self.0.tensors[index])
    }

    /// Returns all tensors, sorted by name.
    #[must_use]
    pub fn all(&self) -> &[Tensor] {
        &self.0.tensors
    }

    /// Returns the paths of the files, in the order of the arguments of [`open`](Self::open). The files of an index
    /// are sorted by name.
    pub fn paths(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.0.shards.iter().map(Shard::path)
    }

    pub(crate) fn find(&self, name: &str) -> Result<usize, Error> {
        find(self.all(), name, &self.0.path)
    }

    pub(crate) fn shards(&self) -> &[Shard] {
        &self.0.shards
    }
}

impl fmt::Debug for Tensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Model { path, shards, tensors } = &*self.0;
        f.debug_struct("Tensors")
            .field("path", path)
            .field("files", &shards.len())
            .field("tensors", &tensors.len())
            .finish()
    }
}

/// Checks that all parts of each model in several files were given. The parts of a model have the same file name, but for
/// its end. A part without this end may be of any model.
fn whole(parts: &[(PathBuf, gguf::Part)]) -> Result<(), Error> {
    // The end of a part's file name, as llama.cpp writes it (`llama_split_path`).
    let end = |number: u64, of: u64| format!("-{:05}-of-{of:05}.gguf", number + 1);
    let model = |path: &PathBuf, part: &gguf::Part| {
        let name = path.file_name()?.to_string_lossy();
        name.strip_suffix(&end(part.number, part.of)).map(str::to_owned)
    };
    let mut given: BTreeMap<(u64, Option<String>), BTreeSet<u64>> = BTreeMap::new();
    for (path, part) in parts {
        given.entry((part.of, model(path, part))).or_default().insert(part.number);
    }
    for (path, part) in parts.iter().filter(|(_, part)| part.of > 1) {
        let (of, name, path_name) = (part.of, model(path, part), path.to_string_lossy());
        let numbers = given.iter().filter(|((other, model), _)| {
            *other == of && (name.is_none() || model.is_none() || *model == name)
        });
        let has = |number: &u64| numbers.clone().any(|(_, numbers)| numbers.contains(number));
        let file = |other: u64| match path_name.strip_suffix(&end(part.number, of)) {
            Some(front) => PathBuf::from(front.to_owned() + &end(other, of)),
            None => PathBuf::from(format!("part {} of {of}", other + 1)),
        };
        let missing: Vec<PathBuf> = (0..of).filter(|other| !has(other)).map(file).collect();
        if !missing.is_empty() {
            return Err(Error::MissingParts { path: path.clone(), wanted: of, missing });
        }
    }
    Ok(())
}

/// Returns the tensors of a file that an index lists for it. Fails if the file does not have all of them.
fn listed(file: &DataFile, mut found: Vec<Tensor>, names: &BTreeSet<String>) -> Result<Vec<Tensor>, Error> {
    found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    for name in names {
        find(&found, name, &file.path)?;
    }
    found.retain(|tensor| names.contains(&*tensor.name));
    Ok(found)
}

/// Reads an index. Returns the files that it names, each with the names of its tensors.
fn index(path: &Path) -> Result<Vec<(PathBuf, BTreeSet<String>)>, Error> {
    let file = DataFile::open(path)?;
    let len = file.header_len(0, LONGEST, file.len)?;
    let text = file.header(0, len)?;
    let mut index: Value = serde_json::from_slice(&text).map_err(|error| {
        let lines = text.split_inclusive(|&byte| byte == b'\n').take(error.line().saturating_sub(1));
        let offset = lines.map(<[u8]>::len).sum::<usize>() + error.column().saturating_sub(1);
        file.bad_header(offset.min(len) as u64, "the index of a model, in JSON", error.to_string())
    })?;
    let Some(Value::Object(map)) = index.get_mut("weight_map").map(Value::take) else {
        return Err(file.bad_header(0, "`weight_map`, from names of tensors to names of files", "none"));
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (name, part) in map {
        let part = part.as_str().unwrap_or_default();
        // Accept only a plain file name: an index from elsewhere must not choose files outside its folder.
        let mut parts = Path::new(part).components();
        let (Some(Component::Normal(_)), None) = (parts.next(), parts.next()) else {
            let found = format!("{part:?} for {name:?}");
            return Err(file.bad_header(0, "the name of a file in the folder of the index", found));
        };
        files.entry(part.to_owned()).or_default().insert(name);
    }
    if files.is_empty() {
        return Err(file.bad_header(0, "at least one tensor in `weight_map`", "none"));
    }
    Ok(files.into_iter().map(|(file, names)| (folder.join(file), names)).collect())
}
