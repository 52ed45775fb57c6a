//! Sets `cfg(shuttle)` for this package alone; the source asks for features that this package does not have.

fn main() {
    println!("cargo:rustc-cfg=shuttle");
    println!(
        "cargo::rustc-check-cfg=cfg(feature, values(\"std\", \"defmt\", \"portable-atomic\", \"embedded-dma\"))"
    );
    println!("cargo:rerun-if-changed=build.rs");
}
