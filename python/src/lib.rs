//! The module `twinbuf._twinbuf`: the loader as Python sees it.

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
mod _twinbuf {
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
