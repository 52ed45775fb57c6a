//! The steps that change a record on its way from the file to the slot: casts, normalizations, calls of Python code.

use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use twinbuf::BoxError;
use twinbuf::mmap::{DType, transform as kernels};
use twinbuf::transform::{Context, RecordTransform, RecordType, Transform};

use crate::dtype;
use crate::foreign::{Call, Work, answer_to};
use crate::object::Object;

/// One change of each record. `Records` has a list of them.
#[derive(Clone)]
pub(crate) enum Step {
    Cast {
        from: DType,
        to: DType,
    },
    /// To float32, with a scale and a shift for each channel, or as planes.
    Normal(Transform),
    Map(Arc<Function>),
}

/// A Python function that is called for each record.
pub(crate) struct Function {
    object: Arc<Object>,
    /// The types of the records that it is called with, and of those that it returns.
    from: RecordType,
    to: RecordType,
}

impl Step {
    /// Makes a cast. If there is none for these types, the error names those to which `from` can be cast.
    pub(crate) fn cast(from: DType, to: DType) -> PyResult<Self> {
        let step = Self::Cast { from, to };
        let can =
            |to| to == from || convert(from, to, &[], bytemuck::cast_slice_mut::<u64, u8>(&mut [])).is_ok();
        if can(to) {
            return Ok(step);
        }
        let way = dtype::format(from).map_or("use `torch()` of a loader's batch", |_| "use `map`");
        let (there, from, to) = (dtype::names(can), dtype::name(from), dtype::name(to));
        let line = format!("dtype: wanted {there} for records of {from}, found {to}: {way} for another type");
        Err(PyTypeError::new_err(line))
    }

    pub(crate) fn map(function: &Bound<'_, PyAny>, from: RecordType, to: RecordType) -> Self {
        let object = Arc::new(Object::new(function));
        Self::Map(Arc::new(Function { object, from, to }))
    }

    /// Returns a copy of the step with its own reference to the Python object.
    pub(crate) fn copy(&self, py: Python<'_>) -> Self {
        let Self::Map(function) = self else { return self.clone() };
        let (from, to) = (function.from.clone(), function.to.clone());
        Self::Map(Arc::new(Function { object: Arc::new(function.object.copy(py)), from, to }))
    }

    pub(crate) fn object(&self) -> Option<&Arc<Object>> {
        match self {
            Self::Map(function) => Some(&function.object),
            _ => None,
        }
    }
}

impl RecordTransform for Step {
    fn output(&self, record: &RecordType) -> Result<RecordType, BoxError> {
        let ragged = |found: RecordType| if record.is_ragged() { found.ragged() } else { found };
        match self {
            Self::Cast { from, to } => match record.dtype() {
                Some(_) => RecordType::new(*to, record.shape()).map(ragged),
                None => RecordType::new(*to, [record.len() / from.size()]).map(ragged),
            },
            Self::Normal(transform) => transform.output(record),
            Self::Map(function) => Ok(function.to.clone()),
        }
    }

    fn apply(&mut self, records: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<(), BoxError> {
        match self {
            Self::Cast { from, to } => convert(*from, *to, records, out),
            Self::Normal(transform) => RecordTransform::apply(transform, records, out, context),
            Self::Map(function) => {
                let Function { object, from, to } = &**function;
                let call = || Call {
                    object: object.clone(),
                    work: Work::Map {
                        records: records.to_vec(),
                        seeds: context.records().map(|record| record.seed).collect(),
                        types: [from.clone(), to.clone()],
                    },
                };
                let made = answer_to(call)?;
                if made.len() != out.len() {
                    return Err(format!("{} bytes", out.len()).into());
                }
                out.copy_from_slice(&made);
                Ok(())
            }
        }
    }

    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        Some(Box::new(self.clone()))
    }

    fn pays(&self) -> bool {
        !matches!(self, Self::Map(_))
    }
}

/// Converts numbers one by one: each to a type that holds it, or to the nearest float.
fn convert(from: DType, to: DType, records: &[u8], out: &mut [u8]) -> Result<(), BoxError> {
    macro_rules! cast {
        ($($from:ident $number:ty: $($to:ident $result:ty),+;)+) => {
            match (from, to) {
                $($((DType::$from, DType::$to) => each(records, out, |number: $number| number as $result)?,)+)+
                (DType::U16, DType::U32) => kernels::u16_to_u32(records, numbers(out)?).map(drop)?,
                (DType::U16, DType::I64) => kernels::u16_to_i64(records, numbers(out)?).map(drop)?,
                (DType::F32, DType::F16) => kernels::f32_to_f16(records, numbers(out)?).map(drop)?,
                (DType::F32, DType::Bf16) => kernels::f32_to_bf16(records, numbers(out)?).map(drop)?,
                (_, DType::F32) => Transform::new(from, 1)?.apply(records, numbers(out)?).map(drop)?,
                _ => return Err("no such cast".into()),
            }
        };
    }
    cast! {
        Bool u8: U8 u8, I16 i16, I32 i32, I64 i64, U16 u16, U32 u32, U64 u64, F32 f32, F64 f64;
        U8 u8: I16 i16, I32 i32, I64 i64, U16 u16, U32 u32, U64 u64, F64 f64;
        I8 i8: I16 i16, I32 i32, I64 i64, F32 f32, F64 f64;
        U16 u16: I32 i32, U64 u64, F64 f64;
        I16 i16: I32 i32, I64 i64, F64 f64;
        U32 u32: I64 i64, U64 u64, F32 f32, F64 f64;
        I32 i32: I64 i64, F32 f32, F64 f64;
        U64 u64: F32 f32, F64 f64;
        I64 i64: F32 f32, F64 f64;
        F32 f32: F64 f64;
        F64 f64: F32 f32;
    }
    Ok(())
}

/// Returns the memory of a slot as numbers.
fn numbers<T: NoUninit + AnyBitPattern>(out: &mut [u8]) -> Result<&mut [T], BoxError> {
    bytemuck::try_cast_slice_mut(out).map_err(|error| format!("the slot: {error}").into())
}

fn each<A: AnyBitPattern, B: NoUninit + AnyBitPattern>(
    records: &[u8],
    out: &mut [u8],
    convert: impl Fn(A) -> B,
) -> Result<(), BoxError> {
    for (number, out) in records.chunks_exact(size_of::<A>()).zip(numbers(out)?) {
        *out = convert(bytemuck::pod_read_unaligned(number));
    }
    Ok(())
}
