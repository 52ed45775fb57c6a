//! What the benchmarks share: cold and warm files, rounds, medians, tables, system queries.

pub mod data;
pub mod measure;
pub mod report;
pub mod sys;
