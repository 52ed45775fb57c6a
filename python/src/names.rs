//! How the parts of a batch are put together: into a tuple, into a dict, or a single part alone.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// How the parts of a batch are put together: like the data sets in the argument `data`.
#[derive(Clone)]
pub(crate) enum Names {
    One,
    Tuple,
    Dict(Arc<[String]>),
}

impl Names {
    pub(crate) fn of(tuple: bool, names: Option<Vec<String>>) -> Self {
        names.map_or(if tuple { Self::Tuple } else { Self::One }, |names| Self::Dict(names.into()))
    }

    pub(crate) fn pack<'py>(
        &self,
        py: Python<'py>,
        mut parts: impl ExactSizeIterator<Item = PyResult<Bound<'py, PyAny>>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::One => parts.next().unwrap_or_else(|| Ok(py.None().into_bound(py))),
            Self::Tuple => Ok(PyTuple::new(py, parts.collect::<PyResult<Vec<_>>>()?)?.into_any()),
            Self::Dict(names) => {
                let dict = PyDict::new(py);
                names.iter().zip(parts).try_for_each(|(name, part)| dict.set_item(name, part?))?;
                Ok(dict.into_any())
            }
        }
    }
}
