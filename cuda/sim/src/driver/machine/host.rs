//! The vector clock of the host, or of each host thread.

use std::sync::Arc;

use super::{Actor, HOST, IN_FUNCTION, State};
use crate::driver::clock::{Agent, Clock, Step};

impl State {
    fn agent(&mut self) -> Agent {
        if !self.options.host_threads_apart {
            return HOST;
        }
        if let Some(agent) = self.own(|own| own.agent) {
            return agent;
        }
        let agent = self.handle();
        self.own(|own| own.agent = Some(agent));
        agent
    }

    /// This thread's clock.
    pub(super) fn known(&mut self) -> &mut Clock {
        let agent = self.agent();
        self.hosts.entry(agent).or_default()
    }

    /// Joins `clock` into this thread's.
    pub(in crate::driver) fn learn(&mut self, clock: &Clock) {
        self.known().join(clock);
        self.guard(None);
    }

    /// A call returns the sticky error, which dropped all work that has not run: nothing races with it from now on.
    pub(in crate::driver) fn tell(&mut self) {
        if !self.told {
            self.told = true;
            self.guard(None);
        }
    }

    /// This thread's next step; inside a host function, its stream's step.
    pub(super) fn host_step(&mut self) -> Actor {
        if let Some(at) = IN_FUNCTION.with_borrow(|at| (**at).clone()) {
            return Actor::new(at);
        }
        let agent = self.agent();
        let known = self.known();
        Actor::new(Step { agent, number: known.tick(agent), clock: Arc::new(known.clone()) })
    }

    /// A host function begins: pages are closed to it that are open to the host.
    pub(super) fn begin_function(&mut self, at: Step) {
        self.running.push(at);
        for base in self.seen.clone() {
            self.guard(Some(base));
        }
    }

    /// A host function has ended, or will not run.
    pub(super) fn end_function(&mut self, at: &Step) {
        let other = |step: &Step| (step.agent, step.number) != (at.agent, at.number);
        self.pending.retain(other);
        self.running.retain(other);
        self.guard(None);
    }

    pub(in crate::driver) fn release(&mut self, token: u64) {
        let at = self.host_step().at;
        self.tokens.entry(token).or_default().join(&at.clock);
    }

    pub(in crate::driver) fn acquire(&mut self, token: u64) {
        let clock = self.tokens.get(&token).cloned().unwrap_or_default();
        let inside = IN_FUNCTION.with_borrow_mut(|inside| {
            if let Some(at) = &mut **inside {
                Arc::make_mut(&mut at.clock).join(&clock);
            }
            inside.is_some()
        });
        if !inside {
            self.learn(&clock);
        }
    }
}
