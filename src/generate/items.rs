//! What the Python package makes of a generator: items of any iterable, received one by one, and its own hooks.

use std::task::Poll;
use std::time::{Duration, Instant};

use super::rounds::Round;
use super::{Generator, GeneratorBuilder};
use crate::backend::Waiting;
use crate::error::Error;
use crate::stage::Around;

#[doc(hidden)]
impl<T: Send + 'static> GeneratorBuilder<'_, T> {
    /// The rounds are the items of an iterable: steps of this epoch.
    pub fn items(mut self, epoch: u64) -> Self {
        self.items = Some(epoch);
        self
    }

    /// Runs the thread's loop within `run`, and its waits for the caller within `wait`: each calls its argument.
    pub fn around(
        mut self,
        run: impl FnOnce(Box<dyn FnOnce() + Send>) + Send + 'static,
        wait: impl Fn(&mut (dyn FnMut() + Send)) + Send + 'static,
    ) -> Self {
        self.around = Some(Around { run: Box::new(run), wait: Box::new(wait) });
        self
    }
}

#[doc(hidden)]
impl<T: Send + 'static> Generator<'_, T> {
    /// Rounds before `end` may be started; [`next_timeout`](Self::next_timeout) receives them.
    pub fn start(&mut self, end: u64) {
        if end > self.granted {
            self.granted = end;
            if let Some(gate) = self.stage.gate() {
                gate.grant(self.items.unwrap_or(end - 1), Instant::now());
            }
        }
    }

    /// Receives the next round if it is made within `timeout`: one that [`start`](Self::start) has let begin.
    pub fn next_timeout(&mut self, timeout: Duration) -> Poll<Result<Round<T>, Error>> {
        let waiting = if timeout.is_zero() { Waiting::Try } else { Waiting::Until(Instant::now() + timeout) };
        self.receive(waiting)
    }

    /// The caller asks for no more rounds: the use of the last one is over.
    pub fn rest(&mut self) {
        self.stage.ended(Instant::now());
    }

    /// Ends without a wait for the thread. It ends with its round.
    pub fn leave(self) {
        if let Some(gate) = self.stage.gate() {
            gate.abandon();
        }
    }

    /// The rounds are started one at a time, as with a hook.
    pub fn in_lockstep(&mut self) {
        self.stage.recorder().lockstep(true);
    }
}
