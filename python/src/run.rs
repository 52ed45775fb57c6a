//! `Run`: the crate's loader or stream of tensors, at rest or during an iteration.

use std::mem;

use twinbuf::pipe::{Front, Items};

/// A loader or a stream of tensors of the crate, or an iteration that owns it.
#[allow(clippy::large_enum_variant, reason = "there is one for each loader or stream")]
#[derive(Default)]
pub(crate) enum Run<F: Front + 'static = twinbuf::Loader> {
    Idle(F),
    Running(Items<'static, F>),
    #[default]
    Closed,
}

impl<F: Front + 'static> Run<F> {
    /// Ends the iteration, if there is one, and returns the loader or stream.
    pub(crate) fn take(&mut self) -> Option<F> {
        match mem::take(self) {
            Self::Idle(front) => Some(front),
            Self::Running(items) => items.into_front(),
            Self::Closed => None,
        }
    }

    /// Ends the iteration, if there is one, and keeps the loader or stream.
    pub(crate) fn rest(&mut self) {
        *self = self.take().map_or(Self::Closed, Self::Idle);
    }

    pub(crate) fn report(&self) -> Option<twinbuf::Report> {
        match self {
            Self::Idle(front) => Some(front.pipe().report()),
            Self::Running(items) => Some(items.report()),
            Self::Closed => None,
        }
    }
}
