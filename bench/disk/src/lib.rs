//! Shared by the file benchmarks: cold and warm files, rounds, tables, system queries.

pub mod data;
pub mod measure;
pub mod report;
pub mod sys;
