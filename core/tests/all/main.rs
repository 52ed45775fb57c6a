//! The tests that need no process of their own, by subject: one program links faster than nine.

#[path = "../oracle/mod.rs"]
mod oracle;

mod asked_for;
mod contracts;
mod corpus;
mod dma;
mod property;
mod read_ahead;
mod survivors;
mod wakers;
mod write_behind;
