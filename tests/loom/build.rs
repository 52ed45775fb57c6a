//! Sets `cfg(loom)` for this package alone; there is no feature `std` here, of which the source asks.

fn main() {
    println!("cargo:rustc-cfg=loom");
    println!("cargo::rustc-check-cfg=cfg(feature, values(\"std\"))");
    println!("cargo:rerun-if-changed=build.rs");
}
