//! Groups of tensors that are used together, for example the layers of a model, and their layout in memory.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::ranges::Extent;
use crate::{Error, Tensor, Tensors};

/// The block size for which extents are aligned: an extent of tensors at multiples of their element
/// sizes starts as far into a block of memory as into a block of the file. A disk with blocks of
/// this size or less can then write whole blocks to their final places.
pub(crate) const BLOCK: usize = 4096;

/// The alignment in memory of a tensor whose offset in the file is not a multiple of its element size.
const ALIGN: usize = 64;

/// The largest gap between two tensors in a file that is read together with them: one block, because a disk reads whole
/// blocks.
const GAP: u64 = BLOCK as u64;

/// Groups of tensors that are read and used together, in the order of use, for example the layers of a model.
///
/// [`Tensors::groups_by`] and [`Tensors::groups`] make groups. A `Groups` value is only a description; it reads no
/// tensor data. Cloning it is cheap.
///
/// In memory, each tensor of a group starts at a multiple of its element size. Tensors of a group that are adjacent in
/// a file, at multiples of their element sizes, stay adjacent in memory and are read together.
#[derive(Clone)]
pub struct Groups {
    tensors: Tensors,
    groups: Arc<[Group]>,
}

/// The tensors of one group, and their places in memory.
struct Group {
    /// The index of each tensor in the model, and its offset in the group's memory. In the caller's order.
    tensors: Vec<(usize, usize)>,
    extents: Vec<Extent>,
    /// The size of the group in memory, in bytes.
    bytes: usize,
}

impl Tensors {
    /// Groups tensors by a key computed from the name. The groups are sorted by key. The tensors of a group are
    /// sorted by their position in the files. A tensor whose key is `None` is omitted.
    ///
    /// ```
    /// # fn f(model: &twinbuf_mmap::Tensors) -> Result<(), twinbuf_mmap::Error> {
    /// // "model.layers.17.mlp.up_proj.weight" is of layer 17.
    /// let layer = |name: &str| name.strip_prefix("model.layers.")?.split('.').next()?.parse::<u32>().ok();
    /// let layers = model.groups_by(layer)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] if the size of a group exceeds the address space.
    pub fn groups_by<K: Ord>(&self, mut key: impl FnMut(&str) -> Option<K>) -> Result<Groups, Error> {
        let mut groups: BTreeMap<K, Vec<usize>> = BTreeMap::new();
        for (index, tensor) in self.all().iter().enumerate() {
            if let Some(key) = key(tensor.name()) {
                groups.entry(key).or_default().push(index);
            }
        }
        for tensors in groups.values_mut() {
            self.sort(tensors);
        }
        Groups::new(self, groups.into_values())
    }

    /// Makes groups from lists of tensor names. A tensor may be in several groups.
    ///
    /// # Errors
    ///
    /// - [`Error::NoTensor`]: the model has no tensor with this name.
    /// - [`Error::TooLarge`]: the size of a group exceeds the address space.
    pub fn groups<G>(&self, lists: impl IntoIterator<Item = G>) -> Result<Groups, Error>
    where
        G: IntoIterator<Item: AsRef<str>>,
    {
        let find = |list: G| list.into_iter().map(|name| self.find(name.as_ref())).collect();
        let lists: Vec<Vec<usize>> = lists.into_iter().map(find).collect::<Result<_, _>>()?;
        Groups::new(self, lists)
    }

    /// Sorts indices of tensors by the positions of the tensors in the files.
    fn sort(&self, tensors: &mut [usize]) {
        tensors.sort_by_key(|&index| {
            let range = self.all()[index].range();
            (range.file, range.bytes.start, range.bytes.end)
        });
    }
}

impl Groups {
    fn new(tensors: &Tensors, lists: impl IntoIterator<Item = Vec<usize>>) -> Result<Self, Error> {
        let groups: Result<Vec<_>, _> = lists.into_iter().map(|list| Group::new(tensors, list)).collect();
        Ok(Self { tensors: tensors.clone(), groups: groups?.into() })
    }

    /// Returns the number of groups.
    #[must_use]
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Returns `true` if there are no groups.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Returns the size of a group in memory, in bytes, including the gaps before and between its
    /// tensors. Returns 0 if the index is out of range.
    #[must_use]
    pub fn bytes(&self, group: usize) -> usize {
        self.groups.get(group).map_or(0, |group| group.bytes)
    }

    /// Returns the tensors of a group, each with its byte range in the group's memory. Returns an empty iterator if
    /// the index is out of range.
    #[must_use]
    pub fn tensors(&self, group: usize) -> impl ExactSizeIterator<Item = (&Tensor, Range<usize>)> {
        let tensors = self.groups.get(group).map_or(&[][..], |group| &group.tensors);
        tensors.iter().map(|&(index, at)| {
            let tensor = &self.tensors.all()[index];
            // The length fits a usize, because the whole group does.
            (tensor, at..at + usize::try_from(tensor.len()).unwrap_or(0))
        })
    }

    /// The model whose tensors are grouped.
    pub(crate) const fn model(&self) -> &Tensors {
        &self.tensors
    }

    /// Returns the extents to read for a group. `None` if there is no such group.
    pub(crate) fn extents_of(&self, group: usize) -> Option<&[Extent]> {
        self.groups.get(group).map(|group| &*group.extents)
    }

    /// The number of bytes that are read for all groups together.
    pub(crate) fn data(&self) -> u64 {
        let extents = self.groups.iter().flat_map(|group| &group.extents);
        extents.fold(0, |sum, extent| sum.saturating_add(extent.len()))
    }
}

impl Group {
    fn new(model: &Tensors, list: Vec<usize>) -> Result<Self, Error> {
        let mut sorted = list.clone();
        model.sort(&mut sorted);
        sorted.dedup();
        let mut places = BTreeMap::new();
        let (mut extents, mut end): (Vec<(Extent, bool)>, usize) = (Vec::new(), 0);
        for index in sorted {
            let tensor = &model.all()[index];
            let range = tensor.range();
            let too_large = || Error::TooLarge { path: model.shards()[range.file].file.path.clone() };
            if tensor.is_empty() {
                // An empty tensor is placed at 0, which is aligned for any type.
                places.insert(index, 0);
                continue;
            }
            let start = range.bytes.start;
            let in_place = start % tensor.dtype().map_or(1, |dtype| dtype.size() as u64) == 0;
            let joins =
                |last: &Extent| last.file == range.file && start <= last.bytes.end.saturating_add(GAP);
            match extents.last_mut() {
                Some((last, true)) if in_place && joins(last) => {
                    let bytes = last.bytes.start..last.bytes.end.max(range.bytes.end);
                    *last = Extent::new(last.file, bytes, last.to);
                }
                _ => {
                    let (align, skip) = if in_place { (BLOCK, start % BLOCK as u64) } else { (ALIGN, 0) };
                    // The remainder is less than `BLOCK`, so it fits a usize.
                    let skip = usize::try_from(skip).unwrap_or(0);
                    let to = end.checked_next_multiple_of(align).and_then(|to| to.checked_add(skip));
                    let to = to.ok_or_else(too_large)?;
                    extents.push((Extent::new(range.file, range.bytes.clone(), to), in_place));
                }
            }
            let (last, _) = &extents[extents.len() - 1];
            let len = usize::try_from(last.len()).map_err(|_| too_large())?;
            end = last.to.checked_add(len).ok_or_else(too_large)?;
            // The offset is less than `len`, so it fits a usize.
            places.insert(index, last.to + usize::try_from(start - last.bytes.start).unwrap_or(0));
        }
        let tensors = list.into_iter().map(|index| (index, places[&index])).collect();
        let extents = extents.into_iter().map(|(extent, _)| extent).collect();
        Ok(Self { tensors, extents, bytes: end })
    }
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Groups").field("tensors", &self.tensors).field("len", &self.len()).finish()
    }
}
