//! Gives the cdylib the SONAME under which cudarc looks for the driver.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // glibc's `dlopen("libcuda.so")` returns an object that is already loaded under this SONAME, wherever its
    // file is. So it is enough to load the cdylib by its path first.
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    }
    // `target/<profile>/deps`, three folders above OUT_DIR: the cdylib's folder for a test binary that is
    // somewhere else (doctests).
    if let Ok(out) = std::env::var("OUT_DIR") {
        let profile = std::path::Path::new(&out).ancestors().nth(3);
        let deps = profile.map_or_else(String::new, |folder| folder.join("deps").display().to_string());
        println!("cargo:rustc-env=TWINBUF_SIM_DEPS={deps}");
    }
}
