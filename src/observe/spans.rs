//! Spans for the `tracing` crate. Without the feature of that name they are nothing, and take no time.

#[cfg(feature = "tracing")]
mod of_tracing {
    pub(crate) use tracing::Span;
    use tracing::debug_span;

    const TARGET: &str = "twinbuf";

    /// An epoch, from its start to its end. Never entered: between two batches the thread is the caller's.
    pub(crate) fn epoch(epoch: u64) -> Span {
        debug_span!(target: TARGET, "epoch", epoch)
    }

    /// The caller waits for a batch.
    pub(crate) fn wait(parent: Option<&Span>, epoch: u64, step: u64) -> Span {
        debug_span!(target: TARGET, parent: parent.and_then(Span::id), "wait", epoch, step)
    }

    /// A batch is loaded into its slot, on the thread that reads. A root: that thread may be ahead of the caller's epoch.
    pub(crate) fn load(epoch: u64, step: u64) -> Span {
        debug_span!(target: TARGET, parent: None, "load", epoch, step, bytes = tracing::field::Empty)
    }
}
#[cfg(feature = "tracing")]
pub(crate) use of_tracing::*;

#[cfg(not(feature = "tracing"))]
mod of_nothing {
    #[derive(Clone)]
    pub(crate) struct Span;

    impl Span {
        pub(crate) fn entered(self) -> Self {
            self
        }

        pub(crate) fn record(&self, _: &str, _: usize) {}
    }

    pub(crate) fn epoch(_: u64) -> Span {
        Span
    }

    pub(crate) fn wait(_: Option<&Span>, _: u64, _: u64) -> Span {
        Span
    }

    pub(crate) fn load(_: u64, _: u64) -> Span {
        Span
    }
}
#[cfg(not(feature = "tracing"))]
pub(crate) use of_nothing::*;
