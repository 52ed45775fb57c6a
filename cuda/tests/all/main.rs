//! The tests that need no process of their own, by subject: one program links faster than ten.
#![cfg(target_os = "linux")]

#[path = "../common/mod.rs"]
mod common;

mod batches;
mod captures;
mod errors;
mod fuzz;
mod gpu_report;
mod leases;
mod neighbour;
mod recorded;
mod slots;
mod stager;
