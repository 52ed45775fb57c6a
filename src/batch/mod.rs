//! What a batch is made of, as plain data: how its fields lie in a slot, what the slots take of the memory, and the
//! position after it.

pub(crate) mod checkpoint;
pub(crate) mod layout;
pub(crate) mod memory;
