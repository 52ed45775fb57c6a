//! Per-record transforms, applied between file and slot.

use std::fmt;

use bytemuck::{AnyBitPattern, NoUninit};
use twinbuf_mmap::transform as kernels;
pub use twinbuf_mmap::transform::Transform;
use twinbuf_mmap::{BatchIndices, DType};

use crate::error::BoxError;

/// What one record of a data set or of a field is: its bytes, and where they are known, the type of its elements and
/// their number along each axis.
///
/// Displayed as `f32 [3, 224, 224]`, or `150528 bytes` without a type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordType {
    bytes: usize,
    dtype: Option<DType>,
    shape: Vec<usize>,
    ragged: bool,
}

impl RecordType {
    /// Makes the type of records of `bytes` bytes that may be taken as anything.
    #[must_use]
    pub fn bytes(bytes: usize) -> Self {
        Self { bytes, dtype: None, shape: vec![bytes], ragged: false }
    }

    /// Makes the same type of records that differ in length: those of `self` are the longest.
    #[must_use]
    pub fn ragged(self) -> Self {
        Self { ragged: true, ..self }
    }

    /// Whether records differ in length.
    #[must_use]
    pub const fn is_ragged(&self) -> bool {
        self.ragged
    }

    /// Makes the type of records of `dtype` elements in this shape, in C order; an empty shape is one element.
    ///
    /// # Errors
    ///
    /// If memory cannot hold such a record.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>) -> Result<Self, BoxError> {
        let shape = shape.into();
        match shape.iter().try_fold(dtype.size(), |bytes, &axis| bytes.checked_mul(axis)) {
            Some(bytes) => Ok(Self { bytes, dtype: Some(dtype), shape, ragged: false }),
            None => Err(format!("wanted a record that fits the memory, found {dtype} {shape:?}").into()),
        }
    }

    /// Bytes in a record; in the longest, if they differ in length.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "the loader refuses records of 0 bytes")]
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Returns the type of the elements; `None` for bytes that may be taken as anything.
    #[must_use]
    pub const fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Elements along each axis, in C order: empty for a single number. Without a type, the number of bytes.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The same shape with elements of another type. Fails unless the elements are `wanted`, or have no type.
    fn convert(&self, wanted: DType, to: DType) -> Result<Self, BoxError> {
        let converted = match self.dtype {
            Some(found) if found != wanted => Err(format!("wanted records of {wanted}, found {self}").into()),
            Some(_) => Self::new(to, self.shape.clone()),
            // If records differ in length, each is checked when it is transformed.
            None if !self.ragged && self.bytes % wanted.size() != 0 => {
                let (wanted, found) = (wanted.size(), self.bytes);
                Err(kernels::TransformError::SourceLength { wanted, found }.into())
            }
            None => Self::new(to, [self.bytes / wanted.size()]),
        };
        converted.map(|record| Self { ragged: self.ragged, ..record })
    }
}

impl fmt::Display for RecordType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ragged {
            f.write_str("up to ")?;
        }
        match self.dtype {
            Some(dtype) => write!(f, "{dtype} {:?}", self.shape),
            None => write!(f, "{} bytes", self.bytes),
        }
    }
}

/// Turns records into records of another size, while their bytes are still in the CPU's cache.
///
/// [`Transform`] is one (numbers to normalised f32, planes), so is [`Convert`], and [`per_record`] makes one
/// of a function, [`map`] for records of any length. Transforms can follow each other: each call of
/// [`LoaderBuilder::transform`](crate::loader::LoaderBuilder::transform) adds one.
pub trait RecordTransform: Send {
    /// Returns what a record becomes: at least 1 byte. Called when the loader is built.
    ///
    /// # Errors
    ///
    /// If such records cannot be transformed: the loader is not built
    /// ([`Error::Transform`](crate::Error::Transform)).
    fn output(&self, record: &RecordType) -> Result<RecordType, BoxError>;

    /// Transforms `records`, one or more whole ones, to all of `out`.
    ///
    /// `out` begins at a multiple of 64 bytes plus a multiple of the size of a transformed record.
    ///
    /// # Errors
    ///
    /// Whatever is wrong with the records: it reaches the caller as
    /// [`Error::Transform`](crate::Error::Transform), in order, and ends the epoch. So does a panic.
    fn apply(&mut self, records: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<(), BoxError>;

    /// Transforms one record to the front of `out`, and returns how many bytes it became. Called in place of
    /// [`apply`](Self::apply) where records differ in length, before or after the transform. `out` has room for the longest
    /// record, unless [`slot_bytes`](crate::loader::LoaderBuilder::slot_bytes) left less.
    ///
    /// Default: calls `apply`; the record becomes what [`output`](Self::output) returns for one of its length.
    ///
    /// # Errors
    ///
    /// Same as [`apply`](Self::apply), and if `out` is too small.
    fn apply_one(&mut self, record: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<usize, BoxError> {
        let len = self.output(&RecordType::bytes(record.len()))?.len();
        self.apply(record, front(out, len)?, context)?;
        Ok(len)
    }

    /// Clones the transform for another thread of [`workers`](crate::loader::LoaderBuilder::workers).
    ///
    /// Each thread applies its own to the batches that it reads. Returns `None` unless implemented: then there can be
    /// only one worker. A transform that is [`Clone`] returns `Some(Box::new(self.clone()))`.
    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        None
    }
}

/// The records that a transform is applied to.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    batch: &'a BatchIndices,
}

/// The record that a transform is applied to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordContext {
    /// Its number in the data set.
    pub number: u64,
    /// The epoch.
    pub epoch: u64,
    /// The step within the epoch.
    pub step: u64,
    /// A random number for this record in this epoch, made from the plan's seed: the same after any resume, at any
    /// depth and on any rank. Seed a generator with it to make random augmentation repeatable.
    pub seed: u64,
}

impl<'a> Context<'a> {
    /// Makes the context of the records of a batch, or of a part of one. The loader does it; tests of a transform may.
    #[must_use]
    pub const fn new(batch: &'a BatchIndices) -> Self {
        Self { batch }
    }

    /// The only record.
    fn one(&self) -> Result<RecordContext, BoxError> {
        self.records().next().ok_or_else(|| "wanted the context of a record, found none".into())
    }

    /// Returns the records, in the order of their bytes.
    pub fn records(&self) -> impl Iterator<Item = RecordContext> + use<'a> {
        let batch = self.batch;
        let (epoch, step, seed) = (batch.epoch(), batch.step(), batch.seed());
        batch.runs().flatten().map(move |number| {
            let seed = mix(mix(mix(seed).wrapping_add(epoch)).wrapping_add(number));
            RecordContext { number, epoch, step, seed }
        })
    }
}

/// One step of `SplitMix64` (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
const fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl RecordTransform for Transform {
    fn output(&self, record: &RecordType) -> Result<RecordType, BoxError> {
        self.out_len(record.bytes)?;
        let same = record.convert(self.dtype(), DType::F32)?;
        let Some(pixels) = self.pixels() else { return Ok(same) };
        let planes = RecordType::new(DType::F32, planes(&same.shape, pixels, self.channels()))?;
        Ok(RecordType { ragged: record.ragged, ..planes })
    }

    fn apply(&mut self, records: &[u8], out: &mut [u8], _: &Context<'_>) -> Result<(), BoxError> {
        Transform::apply(self, records, numbers_mut(out)?)?;
        Ok(())
    }

    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        Some(Box::new(self.clone()))
    }
}

/// The shape of pictures `[.., height, width, channels]` with the channels first: `[.., channels, height, width]`. Where
/// the shape has no such axes, the pixels of a picture are one axis.
fn planes(shape: &[usize], pixels: usize, channels: usize) -> Vec<usize> {
    if let Some((&last, front)) = shape.split_last() {
        let pictures = (0..=front.len()).rev().find(|&at| front[at..].iter().product::<usize>() == pixels);
        if let (true, Some(at)) = (last == channels, pictures) {
            return [&front[..at], &[channels], &front[at..]].concat();
        }
    }
    let numbers: usize = shape.iter().product();
    match numbers / (pixels * channels) {
        1 => vec![channels, pixels],
        pictures => vec![pictures, channels, pixels],
    }
}

/// Converts numbers of one type to another, one by one; see [`twinbuf_mmap::transform`] for the rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Convert {
    /// Tokens as candle's embeddings take them.
    U16ToU32,
    /// Tokens as `PyTorch`'s embeddings take them.
    U16ToI64,
    /// To binary16, to nearest even.
    F32ToF16,
    /// To bfloat16, to nearest even.
    F32ToBf16,
}

impl Convert {
    /// The numbers before and after.
    const fn types(self) -> (DType, DType) {
        match self {
            Self::U16ToU32 => (DType::U16, DType::U32),
            Self::U16ToI64 => (DType::U16, DType::I64),
            Self::F32ToF16 => (DType::F32, DType::F16),
            Self::F32ToBf16 => (DType::F32, DType::Bf16),
        }
    }
}

impl RecordTransform for Convert {
    fn output(&self, record: &RecordType) -> Result<RecordType, BoxError> {
        let (from, to) = self.types();
        record.convert(from, to)
    }

    fn apply(&mut self, records: &[u8], out: &mut [u8], _: &Context<'_>) -> Result<(), BoxError> {
        match self {
            Self::U16ToU32 => kernels::u16_to_u32(records, numbers_mut(out)?),
            Self::U16ToI64 => kernels::u16_to_i64(records, numbers_mut(out)?),
            Self::F32ToF16 => kernels::f32_to_f16(records, numbers_mut(out)?),
            Self::F32ToBf16 => kernels::f32_to_bf16(records, numbers_mut(out)?),
        }?;
        Ok(())
    }

    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        Some(Box::new(*self))
    }
}

impl RecordTransform for Box<dyn RecordTransform> {
    fn output(&self, record: &RecordType) -> Result<RecordType, BoxError> {
        (**self).output(record)
    }

    fn apply(&mut self, records: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<(), BoxError> {
        (**self).apply(records, out, context)
    }

    fn apply_one(&mut self, record: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<usize, BoxError> {
        (**self).apply_one(record, out, context)
    }

    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        (**self).try_clone()
    }
}

/// The first bytes of the room for a record.
fn front(out: &mut [u8], len: usize) -> Result<&mut [u8], BoxError> {
    let found = out.len();
    out.get_mut(..len).ok_or_else(|| format!("wanted room for a record of {len} bytes, found {found}").into())
}

/// Aligned, because slots are and records are whole numbers long.
fn numbers_mut<T: NoUninit + AnyBitPattern>(out: &mut [u8]) -> Result<&mut [T], BoxError> {
    bytemuck::try_cast_slice_mut(out)
        .map_err(|error| format!("the slot cannot hold such numbers: {error}").into())
}

/// Makes a transform that calls `apply` for each record with its bytes, the `out_bytes` bytes that it becomes, and
/// which record it is.
///
/// With several [`workers`](crate::loader::LoaderBuilder::workers) each has a clone of `apply`.
///
/// ```
/// use twinbuf::transform::{RecordTransform, per_record};
/// # use twinbuf::Plan;
/// # use twinbuf::transform::Context;
///
/// // The first byte of each record is a label. Every other image is flipped.
/// let mut images = per_record(4, |record, image, context| {
///     image.copy_from_slice(&record[1..]);
///     if context.seed % 2 == 0 {
///         image.reverse();
///     }
///     Ok(())
/// });
/// # let plan = Plan::builder(2).batch(2).build()?.batch(0, 0).unwrap();
/// # let context = Context::new(&plan);
/// let mut out = [0; 8];
/// images.apply(b"xabcdyefgh".as_slice(), &mut out, &context)?;
/// assert!(out.starts_with(b"abcd") || out.starts_with(b"dcba"));
/// # Ok::<(), twinbuf::BoxError>(())
/// ```
pub fn per_record<F>(out_bytes: usize, apply: F) -> PerRecord<F>
where
    F: FnMut(&[u8], &mut [u8], RecordContext) -> Result<(), BoxError> + Clone + Send + 'static,
{
    PerRecord { out_bytes, elements: None, apply }
}

/// Makes a transform of records of any length to records of any length, at most `max_bytes` bytes: it calls `apply` for each
/// with its bytes, the room for what it becomes, and which record it is. `apply` writes to the front of the room and returns
/// how many bytes it wrote.
///
/// With several [`workers`](crate::loader::LoaderBuilder::workers) each has a clone of `apply`.
///
/// ```
/// use twinbuf::transform::map;
///
/// // Each record without its spaces.
/// let words = map(1 << 10, |record, out, _| {
///     let words = record.iter().filter(|&&byte| byte != b' ');
///     Ok(words.zip(out).map(|(&byte, out)| *out = byte).count())
/// });
/// # fn f(data: twinbuf::mmap::RaggedRecords, plan: twinbuf::Plan, words: impl twinbuf::transform::RecordTransform + 'static) -> Result<(), twinbuf::BoxError> {
/// let loader = twinbuf::Loader::builder(data, plan).transform(words).build()?;
/// # Ok(())
/// # }
/// # let _ = words;
/// ```
pub fn map<F>(max_bytes: usize, apply: F) -> Map<F>
where
    F: FnMut(&[u8], &mut [u8], RecordContext) -> Result<usize, BoxError> + Clone + Send + 'static,
{
    Map { max_bytes, apply }
}

/// Made by [`map`].
#[derive(Clone)]
#[must_use = "a transform does nothing until a loader has it"]
pub struct Map<F> {
    max_bytes: usize,
    apply: F,
}

impl<F> RecordTransform for Map<F>
where
    F: FnMut(&[u8], &mut [u8], RecordContext) -> Result<usize, BoxError> + Clone + Send + 'static,
{
    fn output(&self, _: &RecordType) -> Result<RecordType, BoxError> {
        Ok(RecordType::bytes(self.max_bytes).ragged())
    }

    fn apply(&mut self, record: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<(), BoxError> {
        self.apply_one(record, out, context).map(drop)
    }

    fn apply_one(&mut self, record: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<usize, BoxError> {
        (self.apply)(record, out, context.one()?)
    }

    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        Some(Box::new(self.clone()))
    }
}

impl<F> fmt::Debug for Map<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Map").field("max_bytes", &self.max_bytes).finish_non_exhaustive()
    }
}

/// Made by [`per_record`].
#[derive(Clone)]
#[must_use = "a transform does nothing until a loader has it"]
pub struct PerRecord<F> {
    out_bytes: usize,
    elements: Option<(DType, Vec<usize>)>,
    apply: F,
}

impl<F> PerRecord<F> {
    /// Declares what `apply` makes: `dtype` elements in this shape, `out_bytes` bytes together. Default: bytes that may
    /// be taken as anything.
    pub fn of(mut self, dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        self.elements = Some((dtype, shape.into()));
        self
    }
}

impl<F> RecordTransform for PerRecord<F>
where
    F: FnMut(&[u8], &mut [u8], RecordContext) -> Result<(), BoxError> + Clone + Send + 'static,
{
    fn output(&self, _: &RecordType) -> Result<RecordType, BoxError> {
        let Some((dtype, shape)) = &self.elements else { return Ok(RecordType::bytes(self.out_bytes)) };
        let output = RecordType::new(*dtype, shape.clone())?;
        if output.bytes == self.out_bytes {
            return Ok(output);
        }
        Err(format!("wanted {} bytes for {output}, found {}", output.bytes, self.out_bytes).into())
    }

    fn apply(&mut self, records: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<(), BoxError> {
        let wanted = self.out_bytes;
        let whole = |count| !records.is_empty() && records.len() % count == 0;
        let count = match out.len().checked_div(wanted) {
            Some(count @ 1..) if out.len() % wanted == 0 && whole(count) => count,
            _ => {
                let (found, records) = (out.len(), records.len());
                return Err(format!(
                    "wanted whole records of {wanted} bytes in place of {records} bytes, found room for {found} bytes"
                )
                .into());
            }
        };
        let record_bytes = records.len() / count;
        records
            .chunks_exact(record_bytes)
            .zip(out.chunks_exact_mut(self.out_bytes))
            .zip(context.records())
            .try_for_each(|((record, out), context)| (self.apply)(record, out, context))
    }

    fn apply_one(&mut self, record: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<usize, BoxError> {
        (self.apply)(record, front(out, self.out_bytes)?, context.one()?)?;
        Ok(self.out_bytes)
    }

    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        Some(Box::new(self.clone()))
    }
}

impl<F> fmt::Debug for PerRecord<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { out_bytes, elements, .. } = self;
        f.debug_struct("PerRecord")
            .field("out_bytes", out_bytes)
            .field("elements", elements)
            .finish_non_exhaustive()
    }
}
