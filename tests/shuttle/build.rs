//! Sets `cfg(shuttle)` for this package alone.

fn main() {
    println!("cargo:rustc-cfg=shuttle");
    println!("cargo:rerun-if-changed=build.rs");
}
