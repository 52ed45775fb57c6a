//! Where the time goes: the report, the trace, the breakdown, and spans for `tracing`.

pub(crate) mod breakdown;
mod display;
pub(crate) mod live;
pub(crate) mod log;
mod pause;
mod phases;
pub(crate) mod recorder;
pub(crate) mod report;
pub(crate) mod spans;
pub(crate) mod trace;

pub use self::breakdown::{Breakdown, Validation};
pub use self::live::LiveReport;
pub use self::recorder::{LoopRecorder, STEPS, StepTimes};
pub use self::report::{BOUND_RATIO, EPOCHS, EpochTimes, Report, StageTimes, Verdict};
pub use self::trace::Trace;
