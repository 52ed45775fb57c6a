//! Compiles the driver, a shared library that this package's own library contains: `cargo install` and a dependency from a
//! registry leave no cdylib where a program could find it. The driver has no dependencies, so that `rustc` alone makes it.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(driver)");
    println!("cargo::rerun-if-changed=src");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let driver = PathBuf::from(variable("OUT_DIR")).join("driver.so");
    // Programs of another system could not load it, and musl's targets have no shared libraries by default: there
    // `Sim::start` panics and `cuda-sim` ends with an error.
    if variable("TARGET") != variable("HOST")
        || variable("CARGO_CFG_TARGET_OS") != "linux"
        || variable("CARGO_CFG_TARGET_ENV") != "gnu"
    {
        std::fs::write(&driver, "").expect("OUT_DIR can be written");
        return;
    }
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args(["--crate-name=twinbuf_cuda_sim", "--crate-type=cdylib", "--edition=2024", "--cfg=driver"]);
    rustc.args(["--cap-lints=allow", "src/lib.rs", "-o"]).arg(&driver);
    rustc.arg(format!("--target={}", variable("TARGET")));
    rustc.arg(format!("-Copt-level={}", variable("OPT_LEVEL")));
    // Call stacks show the program's lines, and of the driver only the name of the function that was called.
    rustc.args(["-Cdebuginfo=0", "-Cstrip=debuginfo"]);
    // glibc's `dlopen("libcuda.so")` returns an object that is already loaded under this SONAME, wherever its file is.
    rustc.arg("-Clink-arg=-Wl,-soname,libcuda.so");
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        rustc.arg(format!("-Clinker={linker}"));
    }
    let flags = variable("CARGO_ENCODED_RUSTFLAGS");
    rustc.args(flags.split('\x1f').filter(|flag| !flag.is_empty()));
    let status = rustc.status().unwrap_or_else(|error| panic!("{rustc:?}: {error}"));
    assert!(status.success(), "{rustc:?}: {status}");
}
