//! Whole numbers as arguments: one that cannot be is refused by name, with what was found.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::errors;

/// A whole number that `T` holds. `OptionError`, a `ValueError`, for one that is negative or too large; `TypeError` for
/// what is no whole number.
pub(crate) fn whole<'py, T>(name: &str, found: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    found.extract::<T>().map_err(|error| match error.is_instance_of::<PyOverflowError>(found.py()) {
        true => errors::option(
            found.py(),
            format!("{name}: wanted a whole number from 0 to 2**64 - 1, found {found}"),
        ),
        false => error,
    })
}

/// As [`whole`], where there is one.
pub(crate) fn whole_or_none<'py, T>(name: &str, found: Option<&Bound<'py, PyAny>>) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    found.map(|found| whole(name, found)).transpose()
}
