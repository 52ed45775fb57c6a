//! Names the shared library in the programs that are linked with it: one name for all versions that run them.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let system = std::env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    if ["linux", "android", "freebsd", "netbsd", "openbsd"].contains(&&*system) {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libtwinbuf.so.0");
    }
}
