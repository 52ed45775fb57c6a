//! Why a loader could not be built, or an epoch not begin or continue.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use twinbuf::BoxError;
use twinbuf::mmap::PlanError;

/// The error of [`BurnLoaderBuilder::build`](crate::BurnLoaderBuilder::build), and the `source` of
/// an item's `DatasetError`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// An error of the loader, for example of an option, a file (with path and offset), or a transform.
    Loader(Arc<twinbuf::Error>),
    /// The function that makes items of batches refused one.
    Make {
        /// The epoch of the batch.
        epoch: u64,
        /// The step of the batch within the epoch.
        step: u64,
        /// The error of the function.
        source: Arc<BoxError>,
    },
    /// There is no such slice.
    Slice {
        /// The items that were asked for.
        wanted: Range<usize>,
        /// The items that there are.
        items: usize,
        /// The ranks of the plan. A plan with slices has one.
        ranks: u64,
    },
    /// A slice has too few records for its plan.
    Plan(PlanError),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loader(source) => source.fmt(f),
            Self::Make { epoch, step, source } => write!(f, "epoch {epoch}, step {step}: {source}"),
            Self::Slice { wanted, ranks, .. } if *ranks > 1 => write!(
                f,
                "slice {wanted:?}: wanted a plan of one rank, found {ranks} ranks, which split the records already"
            ),
            Self::Slice { wanted, items, .. } => {
                write!(f, "slice {wanted:?}: wanted a range within the items, found {items} of them")
            }
            Self::Plan(source) => write!(f, "slice: {source}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Make { source, .. } => Some(&***source),
            Self::Plan(source) => Some(source),
            // `fmt` has printed this error already, so its cause comes next.
            Self::Loader(error) => error.source(),
            Self::Slice { .. } => None,
        }
    }
}
