//! Injected errors: decides which of them a call or an operation returns.

use super::codes::Code;
use crate::abi::{RawFailure, TARGET_API, TARGET_CALL, TARGET_WORK};

struct Armed {
    failure: RawFailure,
    name: String,
    /// The number of calls or operations that matched so far.
    seen: u64,
}

/// The errors to inject, and those injected so far.
#[derive(Default)]
pub(super) struct Failures {
    armed: Vec<Armed>,
    /// The names of failed calls and operations, in order.
    pub(super) happened: Vec<&'static str>,
}

/// One injected error of a call.
#[derive(Clone, Copy)]
pub(super) struct Injected {
    pub(super) code: Code,
    /// Whether the call still takes effect.
    pub(super) effect: bool,
}

impl Failures {
    pub(super) fn arm(&mut self, name: String, failure: RawFailure) {
        self.armed.push(Armed { failure, name, seen: 0 });
    }

    /// Counts a call of this name.
    pub(super) fn call(&mut self, name: &'static str) -> Option<Injected> {
        self.meet(name, |armed| match armed.failure.target {
            TARGET_API => armed.name == name,
            TARGET_CALL => true,
            _ => false,
        })
    }

    /// Counts an operation of this kind when it starts.
    pub(super) fn operation(&mut self, kind: &'static str) -> Option<Code> {
        let met = self.meet(kind, |armed| {
            armed.failure.target == TARGET_WORK && (armed.name == kind || armed.name == "any")
        });
        met.map(|injected| injected.code)
    }

    /// Every failure counts what it matches, even if another one applies first.
    fn meet(&mut self, name: &'static str, matches: impl Fn(&Armed) -> bool) -> Option<Injected> {
        let mut met = None;
        for armed in self.armed.iter_mut().filter(|armed| matches(armed)) {
            armed.seen += 1;
            let failure = &armed.failure;
            if armed.seen >= failure.nth && armed.seen - failure.nth < failure.times {
                met = met.or(Some(Injected { code: failure.code, effect: failure.effect != 0 }));
            }
        }
        if met.is_some() {
            self.happened.push(name);
        }
        met
    }
}
