//! The tests of the driver that need no process of their own, by subject: one program links faster than six.
#![cfg(target_os = "linux")]

mod captures;
mod checker;
mod cudarc;
mod errors;
mod installed;
mod streams;
mod support;
