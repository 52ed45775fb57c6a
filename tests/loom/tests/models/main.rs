//! Small models of the ring, one a hazard, each explored with two parkers. `README.md` lists them.

mod common;
mod end;
mod guards;
mod handoff;
mod panic;
mod steps;
mod timeout;
mod wakers;
