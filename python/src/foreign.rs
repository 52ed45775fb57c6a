//! The program's own code below a loader: data sets written in Python, and the functions of `Records.map`.
//!
//! It runs in threads of Python, with no frame of Rust below it. A loader with such code is driven: a [`Filler`] lets the
//! crate's reader fill slots up to a call of that code. The reader leaves the [`Call`] on its thread's desk, and puts the
//! rest off. `_drive.py` makes the call and answers it, and the reader goes on.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use pyo3::exceptions::{PyBufferError, PyMemoryError, PyRuntimeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyMemoryView, PyTuple};
use twinbuf::loader::Driven;
use twinbuf::mmap::DType;
use twinbuf::transform::RecordType;
use twinbuf::{BatchIndices, BoxError, Dataset};

use crate::dtype;
use crate::errors;
use crate::lease::{Memory, View};
use crate::locked::{check_end, detached, lock};
use crate::object::Object;
use crate::plan::bytes_of;

/// A call of the program's code: of a data set or a function.
pub(crate) enum Call {
    /// `read_into` with these records, into this memory of a slot.
    Read { object: Arc<Object>, batch: BatchIndices, record: RecordType, out: (*mut u8, usize) },
    /// A function with each of some records, and its seed.
    Map { object: Arc<Object>, records: Vec<u8>, seeds: Vec<u64>, types: [RecordType; 2] },
}

// SAFETY: the memory belongs to a fill that was put off, so nothing else uses it before the call was answered.
unsafe impl Send for Call {}

/// What a call returned: nothing, or the bytes of records.
pub(crate) type Answer = Result<Vec<u8>, BoxError>;

#[derive(Default)]
struct Desk {
    wanted: Option<Call>,
    answers: VecDeque<Answer>,
}

thread_local! {
    static DESK: RefCell<Desk> = RefCell::default();
    /// The numbers of the loaders for which this thread is making a call: a wait for such a loader would be a deadlock.
    /// There may be several: a data set may read from another loader.
    static CALLING: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Returns the answer to `call`, or leaves the call on the desk and puts the fill off.
pub(crate) fn answer_to(call: impl FnOnce() -> Call) -> Result<Vec<u8>, BoxError> {
    DESK.with_borrow_mut(|desk| match desk.answers.pop_front() {
        Some(answer) => answer,
        None => {
            desk.wanted = Some(call());
            Err(io::Error::from(io::ErrorKind::WouldBlock).into())
        }
    })
}

/// Does work, with answers to its first calls, up to a call without one.
pub(crate) fn up_to_call<T>(answers: VecDeque<Answer>, work: impl FnOnce() -> T) -> (T, Option<Call>) {
    DESK.set(Desk { wanted: None, answers });
    let done = work();
    (done, DESK.take().wanted)
}

/// Whether this thread is making a call for the loader with this number.
pub(crate) fn is_calling(loader: usize) -> bool {
    CALLING.with_borrow(|calling| calling.contains(&loader))
}

impl Call {
    /// Returns the arguments of `_drive.made_by`, and the view of a slot among them.
    pub(crate) fn arguments<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Option<Lending>)> {
        let (Self::Read { object, .. } | Self::Map { object, .. }) = self;
        let object = object.get(py).ok_or_else(|| PyRuntimeError::new_err("the loader was collected"))?;
        match self {
            Self::Read { batch, record, out, .. } => {
                let ((start, len), element) = (*out, dtype::of(record));
                // If the buffer protocol has no format for a type, lend unsigned integers of the same size.
                let dtype = match (dtype::format(element), element.size()) {
                    (Some(_), _) => element,
                    (None, 1) => DType::U8,
                    (None, _) => DType::U16,
                };
                let shape = dtype::of_records(usize::try_from(batch.len())?, record.shape());
                let lent = Bound::new(py, Memory::new(View::new(start, len, dtype, shape), None, false))?;
                let view = PyMemoryView::from(&lent)?;
                let arguments = (object, bytes_of(py, batch)?, &view).into_pyobject(py)?;
                Ok((arguments, Some((view.unbind(), lent.unbind()))))
            }
            Self::Map { records, seeds, types, .. } => {
                let [from, to] = types.each_ref().map(|record| {
                    // As many elements as there are bytes for, if records differ in length.
                    let ragged = record.is_ragged().then(|| vec![-1]);
                    let shape = record.shape().iter().map(|&axis| axis as isize).collect();
                    (dtype::of(record), ragged.unwrap_or(shape))
                });
                let of = |(dtype, shape)| PyResult::Ok((dtype::name(dtype), PyTuple::new(py, shape)?));
                let arguments = (object, PyByteArray::new(py, records), seeds.clone(), of(from)?, of(to)?);
                Ok((arguments.into_pyobject(py)?, None))
            }
        }
    }
}

/// A data set written in Python: any object with `__len__`, `dtype`, `shape` and `read_into(indices, out)`.
#[derive(Clone)]
pub(crate) struct PythonData {
    pub(crate) object: Arc<Object>,
    pub(crate) records: u64,
    pub(crate) fingerprint: u64,
    pub(crate) record: RecordType,
}

impl Dataset for PythonData {
    fn records(&self) -> u64 {
        self.records
    }

    fn record_bytes(&self) -> usize {
        self.record.len()
    }

    fn element(&self) -> Option<(DType, Vec<usize>)> {
        Some((dtype::of(&self.record), self.record.shape().to_vec()))
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }

    fn fingerprint(&mut self) -> Result<u64, BoxError> {
        Ok(self.fingerprint)
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        let call = || Call::Read {
            object: self.object.clone(),
            batch: batch.clone(),
            record: self.record.clone(),
            out: (out.as_mut_ptr(), out.len()),
        };
        answer_to(call).map(|_| out.len())
    }
}

/// A slot that is lent to `read_into`: the view, and what counts the uses of it.
pub(crate) type Lending = (Py<PyMemoryView>, Py<Memory>);

/// A worker of a loader. A thread of Python drives it, or the loop's thread without overlap.
#[pyclass(frozen, module = "twinbuf._twinbuf", name = "_Filler")]
pub(crate) struct Filler {
    filling: Mutex<Filling>,
    loader: usize,
    /// Whether it reads no file: then a fill without a wait takes no time.
    quick: bool,
}

struct Filling {
    /// `None` once the loader is closed.
    driven: Option<Driven>,
    /// The call that is being made.
    call: Option<Call>,
    lending: Option<Lending>,
    answer: Option<Answer>,
}

impl Filler {
    pub(crate) fn new(driven: Driven, loader: usize, quick: bool) -> Self {
        let filling = Filling { driven: Some(driven), call: None, lending: None, answer: None };
        Self { filling: Mutex::new(filling), loader, quick }
    }

    /// Lets the reader go on, without the GIL, up to the next call.
    fn go_on(&self, step: impl FnOnce(&mut Driven) -> Poll<bool>) -> Poll<bool> {
        let Filling { driven, call, answer, .. } = &mut *lock(&self.filling);
        let Some(worker) = driven else { return Poll::Ready(false) };
        if call.is_some() && answer.is_none() {
            return Poll::Ready(true); // Ctrl-C kept it from being made
        }
        let found;
        (found, *call) = up_to_call(answer.take().into_iter().collect(), || step(worker));
        found
    }
}

#[pymethods]
impl Filler {
    /// Fill slots until a call is to be made. False: the loader was closed, or the program is ending.
    fn next(&self, py: Python<'_>) -> bool {
        // Most slots are free already: first try without releasing the GIL. Twice, as a try may only end a fill.
        if self.quick && (0..2).any(|_| self.go_on(Driven::try_next) == Poll::Ready(true)) {
            return true;
        }
        detached(py, || {
            let found = self.go_on(|driven| Poll::Ready(driven.next())) == Poll::Ready(true);
            if !found {
                // Drop the worker now, not at the next call: that writes its trace.
                let driven = lock(&self.filling).driven.take();
                drop(driven);
            }
            found
        })
    }

    /// Fill one slot, or up to a call that is to be made: then True. None: there is nothing to fill.
    fn try_next(&self, py: Python<'_>) -> PyResult<Option<bool>> {
        check_end(py)?;
        Ok(match detached(py, || self.go_on(Driven::try_next)) {
            Poll::Ready(found) => Some(found),
            Poll::Pending => None,
        })
    }

    /// The arguments of the call, for `made_by`.
    fn wanted<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let Filling { call, lending, .. } = &mut *lock(&self.filling);
        let call = call.as_ref().ok_or_else(|| PyRuntimeError::new_err("no call is wanted"))?;
        let arguments;
        (arguments, *lending) = call.arguments(py)?;
        CALLING.with_borrow_mut(|calling| calling.push(self.loader));
        Ok(arguments)
    }

    /// Whether nothing refers to the slot that the call was made for.
    fn is_returned(&self, py: Python<'_>) -> bool {
        let filling = lock(&self.filling);
        let Some((view, lent)) = &filling.lending else { return true };
        let released = view.call_method0(py, "release").is_ok();
        // SAFETY: `view` keeps the object alive, and this thread is attached to the interpreter. Something else may refer to
        // it: a tensor of `torch.frombuffer(out)` uses the memory without an export.
        let shared = unsafe { ffi::Py_REFCNT(view.as_ptr()) } > 1;
        // Relaxed: the GIL, which abi3 builds have, orders all uses of this count.
        released && !shared && lent.get().exports.load(Ordering::Relaxed) == 0
    }

    /// Answer the call: with what it returned, or with what it raised. ``here``: this thread raises that itself.
    fn answer(&self, py: Python<'_>, made: &[u8], raised: Option<Bound<'_, PyAny>>, here: bool) {
        self.calls_no_more();
        let mut answer = raised.map_or(Ok(made.to_vec()), |raised| Err(errors::of_call(raised, here)));
        let returned = self.is_returned(py);
        let lending = lock(&self.filling).lending.take();
        drop(lending);
        if !returned {
            let leaked = lock(&self.filling).driven.as_mut().and_then(Driven::leak_slot);
            answer = answer.and_then(|_| {
                Err(BoxError::from(match leaked {
                    Some(()) => PyBufferError::new_err(
                        "read_into kept `out`, or an array or tensor on it: fill it and let it go, because the slot is used \
                         again",
                    ),
                    None => PyMemoryError::new_err("no memory for the slot that read_into kept"),
                }))
            });
        }
        lock(&self.filling).answer = Some(answer);
    }

    /// This thread makes no call for the loader any more.
    fn calls_no_more(&self) {
        CALLING.with_borrow_mut(|calling| calling.retain(|&loader| loader != self.loader));
    }
}
