//! What the benchmarks with files share: files cold and warm, rounds, tables, what is asked of the system.

pub mod data;
pub mod measure;
pub mod report;
pub mod sys;
