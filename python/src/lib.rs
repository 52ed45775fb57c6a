//! The module `twinbuf._twinbuf`: the Rust part of the Python package. The rest is in `twinbuf/`.

mod batch;
mod dtype;
mod engine;
mod errors;
mod foreign;
mod handover;
mod iterate;
mod lease;
mod loader;
mod locked;
mod object;
mod plan;
mod records;
mod report;
mod tensors;
mod writer;

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Shared state is behind locks, or atomic.
#[pymodule(gil_used = false)]
mod _twinbuf {
    use super::*;

    #[pymodule_export]
    use crate::{
        batch::Batch,
        foreign::Filler,
        handover::{Items, Thread, Worker},
        iterate::{_begin_end, Taken},
        loader::Loader,
        locked::{_end_hook, _forked},
        plan::Plan,
        records::{_files, Records},
        report::{_save, Recorder},
        tensors::{Group, Stream, Tensors},
        writer::Writer,
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        // SAFETY: this thread is attached to an interpreter.
        let interpreter = unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) };
        if interpreter != 0 {
            // A thread that Rust code starts attaches to the main interpreter, even if a subinterpreter loaded the
            // module.
            return Err(PyImportError::new_err(
                "twinbuf does not work in a subinterpreter: use a thread or a process",
            ));
        }
        // PyO3 asks once whether there is an interpreter, and panics in a `__del__` at its end, when there is none.
        module.py().detach(|| Python::attach(|_| ()));
        crate::object::imported(module.py())?;
        module.add("DTYPES", crate::dtype::sizes())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
