//! The parts of a batch as plain data: the layout of its fields in a slot, the memory that the slots take, and the
//! position after it.

pub(crate) mod checkpoint;
pub(crate) mod memory;
