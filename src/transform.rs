//! Transforms of records, applied after the read and before the slot.

use std::any::type_name;
use std::fmt;

use bytemuck::{AnyBitPattern, NoUninit};
use twinbuf_mmap::transform as kernels;
pub use twinbuf_mmap::transform::Transform;
use twinbuf_mmap::{BatchIndices, DType};

use crate::error::BoxError;

/// The type of one record: its size in bytes and, if known, its element type and shape.
///
/// Displayed as `f32 [3, 224, 224]`, or as `150528 bytes` without an element type. If records vary in length, the
/// text starts with `up to`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordType {
    bytes: usize,
    dtype: Option<DType>,
    shape: Vec<usize>,
    ragged: bool,
}

impl RecordType {
    /// Creates the type of untyped records of `bytes` bytes. They can be read as any type.
    #[must_use]
    pub fn bytes(bytes: usize) -> Self {
        Self { bytes, dtype: None, shape: vec![bytes], ragged: false }
    }

    /// Returns this type for records that vary in length. The length of `self` becomes the maximum length.
    #[must_use]
    pub fn ragged(self) -> Self {
        Self { ragged: true, ..self }
    }

    /// Returns `true` if records vary in length.
    #[must_use]
    pub const fn is_ragged(&self) -> bool {
        self.ragged
    }

    /// Creates the type of records with elements of type `dtype`. `shape` is the number of elements along each axis,
    /// in C order (the last axis is contiguous). An empty shape means one element.
    ///
    /// # Errors
    ///
    /// Returns an error if the size in bytes overflows `usize`.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>) -> Result<Self, BoxError> {
        let shape = shape.into();
        match shape.iter().try_fold(dtype.size(), |bytes, &axis| bytes.checked_mul(axis)) {
            Some(bytes) => Ok(Self { bytes, dtype: Some(dtype), shape, ragged: false }),
            None => Err(format!("wanted a record that fits the memory, found {dtype} {shape:?}").into()),
        }
    }

    /// Returns the record length in bytes. If lengths vary, returns the maximum length.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no transform makes records of 0 bytes")]
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Returns the element type. Returns `None` for untyped bytes.
    #[must_use]
    pub const fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Returns the number of elements along each axis, in C order. The shape is empty for a single number. For untyped
    /// bytes, the shape is the number of bytes. If lengths vary, it is the shape of the longest record.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns this type with elements of type `to`. Untyped bytes become one axis of elements. Returns an error if the
    /// elements have a type other than `wanted`.
    fn convert(&self, wanted: DType, to: DType) -> Result<Self, BoxError> {
        let converted = match self.dtype {
            Some(found) if found != wanted => Err(format!("wanted records of {wanted}, found {self}").into()),
            Some(_) => Self::new(to, self.shape.clone()),
            // Check the length here only if all records have the same length. Records of varying length are checked
            // when they are transformed.
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

/// Converts records to records of another type or size, while their bytes are in the CPU's cache.
///
/// [`Transform`] (normalized `f32`, on request channels first) and [`Convert`] implement this trait. [`per_record`]
/// makes a transform from a function; [`map`] does this for records of any length. Each call of
/// [`LoaderBuilder::transform`](crate::loader::LoaderBuilder::transform) adds a transform to the chain.
pub trait RecordTransform: Send {
    /// Returns the type of a transformed record. `record` is the type before the transform. The returned length must be
    /// at least 1 byte. [`LoaderBuilder::build`](crate::loader::LoaderBuilder::build) and
    /// [`wanted_slots`](crate::loader::LoaderBuilder::wanted_slots) call this method, and so does the default
    /// [`apply_one`](Self::apply_one) for each record.
    ///
    /// # Errors
    ///
    /// Returns an error if this transform does not accept the type. The builder's method then returns
    /// [`Error::Transform`](crate::Error::Transform).
    fn output(&self, record: &RecordType) -> Result<RecordType, BoxError>;

    /// Transforms one or more whole records and fills `out` completely. `records` and `out` hold the records one
    /// after another.
    ///
    /// If lengths do not vary, `out` starts a whole number of transformed records after a 64-byte boundary.
    ///
    /// # Errors
    ///
    /// May return any error. After an error, the caller receives the earlier batches, then
    /// [`Error::Transform`](crate::Error::Transform); the iteration then ends. If it panics, the iteration ends with
    /// [`Error::Panicked`](crate::Error::Panicked). In a driven loader, `WouldBlock` puts the work off, as in
    /// [`Dataset::read`](crate::Dataset::read).
    fn apply(&mut self, records: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<(), BoxError>;

    /// Transforms one record, writes the result to the start of `out`, and returns its length in bytes. The loader
    /// calls it instead of [`apply`](Self::apply) if records vary in length before or after the transform. `out` is
    /// large enough for the longest record.
    ///
    /// Default: calls [`output`](Self::output) with untyped bytes of this record's length to get the new length, then
    /// calls `apply`.
    ///
    /// # Errors
    ///
    /// The errors of [`apply`](Self::apply) and [`output`](Self::output), and an error if `out` is too small.
    fn apply_one(&mut self, record: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<usize, BoxError> {
        let len = self.output(&RecordType::bytes(record.len()))?.len();
        self.apply(record, front(out, len)?, context)?;
        Ok(len)
    }

    /// Clones the transform for another [worker](crate::loader::LoaderBuilder::workers), or for a caller that helps
    /// ([`pays`](Self::pays)).
    ///
    /// Each worker applies its own to the batches that it reads. For a type that is [`Clone`], return
    /// `Some(Box::new(self.clone()))`. Default: `None`; the loader can then have only one worker.
    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        None
    }

    /// Whether a caller that waits may apply a clone on its own thread: true if the transform takes a processor, not a
    /// device, and runs no foreign code. Without [`try_clone`](Self::try_clone), none does. Default: `false`.
    fn pays(&self) -> bool {
        false
    }
}

/// Describes the records that are passed to a transform.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    batch: &'a BatchIndices,
}

/// Describes one record that is passed to a transform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordContext {
    /// The index of the record in the data set, from 0.
    pub number: u64,
    /// The epoch.
    pub epoch: u64,
    /// The step within the epoch.
    pub step: u64,
    /// A pseudorandom number that depends only on the plan's seed, the epoch and the record's index. It is the same
    /// after a resume, at any depth and on any rank. Use it to seed a random generator for reproducible augmentation.
    pub seed: u64,
}

impl<'a> Context<'a> {
    /// Creates the context of a batch, or of a part of a batch. The loader does this. Call it to test a transform.
    #[must_use]
    pub const fn new(batch: &'a BatchIndices) -> Self {
        Self { batch }
    }

    /// Returns the context of each record, in the order of the records' bytes.
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

    fn pays(&self) -> bool {
        true
    }
}

/// Returns the shape of pictures with the channels first: `[.., height, width, channels]` becomes `[.., channels,
/// height, width]`. If the shape has no such axes, all pixels of a picture become one axis.
fn planes(shape: &[usize], pixels: usize, channels: usize) -> Vec<usize> {
    if let Some((&last, front)) = shape.split_last() {
        // Height and width first: with a height of 1 the width alone has as many pixels.
        let mut ends = front.len().checked_sub(2).into_iter().chain((0..=front.len()).rev());
        let pictures = ends.find(|&at| front[at..].iter().product::<usize>() == pixels);
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

/// Converts each element to another number type; see [`twinbuf_mmap::transform`] for the rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Convert {
    /// Converts `u16` to `u32`, an index type of embeddings in candle.
    U16ToU32,
    /// Converts `u16` to `i64`, an index type of embeddings in `PyTorch`.
    U16ToI64,
    /// Converts `f32` to IEEE binary16, rounding to nearest even.
    F32ToF16,
    /// Converts `f32` to bfloat16, rounding to nearest even.
    F32ToBf16,
}

impl Convert {
    /// Returns the element types before and after the conversion.
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

    fn pays(&self) -> bool {
        true
    }
}

/// Returns the first `len` bytes of `out`, or an error if there are fewer.
fn front(out: &mut [u8], len: usize) -> Result<&mut [u8], BoxError> {
    let found = out.len();
    out.get_mut(..len).ok_or_else(|| format!("wanted room for a record of {len} bytes, found {found}").into())
}

/// Returns the output bytes as numbers, without a copy. They are aligned, because the slot is aligned and each record
/// is a whole number of elements.
fn numbers_mut<T: NoUninit + AnyBitPattern>(out: &mut [u8]) -> Result<&mut [T], BoxError> {
    bytemuck::try_cast_slice_mut(out)
        .map_err(|error| format!("the slot cannot hold such numbers: {error}").into())
}

/// Makes a transform from a function for single records. `apply` receives the bytes of a record, an output slice of
/// `out_bytes` bytes, and the record's index, epoch, step and seed. It must fill the output slice.
///
/// Each [worker](crate::loader::LoaderBuilder::workers) has an `apply` of its own.
///
/// ```
/// use twinbuf::transform::{RecordTransform, per_record};
/// # use twinbuf::Plan;
/// # use twinbuf::transform::Context;
///
/// // The first byte of each record is a label. About half of the images are flipped.
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
#[expect(clippy::type_complexity, reason = "the type of a closure")]
pub fn per_record<F>(
    out_bytes: usize,
    mut apply: F,
) -> Map<impl FnMut(&[u8], &mut [u8], RecordContext) -> Result<usize, BoxError> + Clone + Send + 'static>
where
    F: FnMut(&[u8], &mut [u8], RecordContext) -> Result<(), BoxError> + Clone + Send + 'static,
{
    let apply = move |record: &[u8], out: &mut [u8], context| {
        apply(record, front(out, out_bytes)?, context).map(|()| out_bytes)
    };
    Map { bytes: out_bytes, ragged: false, elements: None, apply }
}

/// Makes a transform from a function for records of any length, before and after. `apply` receives the bytes of a
/// record, an output slice, and the record's index, epoch, step and seed. It writes the new record to the start of
/// the output slice and returns the length in bytes. The length is at most `max_bytes`.
///
/// Each [worker](crate::loader::LoaderBuilder::workers) has an `apply` of its own.
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
    Map { bytes: max_bytes, ragged: true, elements: None, apply }
}

/// A transform from a function for single records. [`per_record`] and [`map`] return it.
///
/// In tests of a transform that [`map`] returned, call [`apply_one`](RecordTransform::apply_one); it returns the length
/// of the new record. [`apply`](RecordTransform::apply) takes one record too, and does not return the length.
#[derive(Clone)]
#[must_use = "a transform does nothing until a loader has it"]
pub struct Map<F> {
    /// The bytes of a new record; of the longest, if lengths vary.
    bytes: usize,
    ragged: bool,
    elements: Option<(DType, Vec<usize>)>,
    apply: F,
}

impl<F> Map<F> {
    /// Declares the type of the transformed records: elements of type `dtype`, with the number of elements along
    /// each axis. Default: untyped bytes. For records of any length, it is the type of the longest.
    ///
    /// [`build`](crate::loader::LoaderBuilder::build) returns [`Error::Transform`](crate::Error::Transform) if the size
    /// of this type differs from the `out_bytes` of [`per_record`] or the `max_bytes` of [`map`].
    pub fn of(mut self, dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        self.elements = Some((dtype, shape.into()));
        self
    }
}

impl<F> RecordTransform for Map<F>
where
    F: FnMut(&[u8], &mut [u8], RecordContext) -> Result<usize, BoxError> + Clone + Send + 'static,
{
    fn output(&self, _: &RecordType) -> Result<RecordType, BoxError> {
        let output = match &self.elements {
            Some((dtype, shape)) => RecordType::new(*dtype, shape.clone())?,
            None => RecordType::bytes(self.bytes),
        };
        if output.bytes == self.bytes {
            return Ok(RecordType { ragged: self.ragged, ..output });
        }
        Err(format!("wanted {} bytes for {output}, found {}", output.bytes, self.bytes).into())
    }

    fn apply(&mut self, records: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<(), BoxError> {
        if self.ragged {
            return self.apply_one(records, out, context).map(drop);
        }
        let (wanted, before, found) = (self.bytes, records.len(), out.len());
        let count = found.checked_div(wanted).unwrap_or(0);
        if count == 0 || count * wanted != found || before == 0 || before % count != 0 {
            let found = format!("{before} bytes, found room for {found} bytes");
            return Err(format!("wanted whole records of {wanted} bytes in place of {found}").into());
        }
        records
            .chunks_exact(before / count)
            .zip(out.chunks_exact_mut(wanted))
            .zip(context.records())
            .try_for_each(|((record, out), context)| (self.apply)(record, out, context).map(drop))
    }

    fn apply_one(&mut self, record: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<usize, BoxError> {
        let context = context.records().next().ok_or("wanted the context of a record, found none")?;
        (self.apply)(record, out, context)
    }

    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        Some(Box::new(self.clone()))
    }
}

debug!([F] Map[F], |map| bytes: map.bytes, ragged: map.ragged, elements: map.elements);

/// Whether elements of type `dtype` may be read as values of type `T`. `T` may be the element type, an array of it, or
/// `u8`, and for 16-bit floats `u16`. Any other `T`, such as a caller's `struct`, needs only the alignment of an
/// element, and a size that is a multiple of an element's. Bytes without an element type may be read as any type.
pub(crate) fn fits<T: AnyBitPattern>(dtype: Option<DType>) -> bool {
    const NUMBERS: [&str; 12] =
        ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "u64", "i64", "f64", "f16", "bf16"];
    let Some(dtype) = dtype else { return true };
    // Reduce `[[f32; 3]; 2]` to `f32`, and `half::bfloat::bf16` to `bf16`. If a compiler formats type names
    // differently, the sizes and alignments are compared instead.
    let name = type_name::<T>().trim_start_matches('[');
    let name = name.split(';').next().unwrap_or(name);
    let name = name.rsplit("::").next().unwrap_or(name);
    if NUMBERS.contains(&name) {
        let bits = name == "u16" && matches!(dtype, DType::F16 | DType::Bf16);
        return name == "u8" || bits || name == dtype.to_string();
    }
    let align = match dtype {
        DType::C64 | DType::C128 => dtype.size() / 2,
        _ => dtype.size(),
    };
    size_of::<T>() % dtype.size() == 0 && align_of::<T>() == align
}
