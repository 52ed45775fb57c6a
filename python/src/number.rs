//! Whole numbers as arguments: an invalid one is refused with the argument's name and the value found.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;

use crate::errors;

/// A whole number that fits `T`. Raises `OptionError`, a `ValueError`, if it is negative or too large, and `TypeError`
/// if it is not a whole number.
pub(crate) fn whole<'py, T>(name: &str, found: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    found.extract::<T>().map_err(|error| match error.is_instance_of::<PyOverflowError>(found.py()) {
        true => errors::option(
            found.py(),
            format!("{name}: wanted a whole number from 0 to 2**64 - 1, found {found}"),
        ),
        false => found.repr().map_or_else(
            |error| error,
            |found| PyTypeError::new_err(format!("{name}: wanted a whole number, found {found}")),
        ),
    })
}

/// Same as [`whole`], or `None` if there is no number.
pub(crate) fn whole_or_none<'py, T>(name: &str, found: Option<&Bound<'py, PyAny>>) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    found.map(|found| whole(name, found)).transpose()
}
