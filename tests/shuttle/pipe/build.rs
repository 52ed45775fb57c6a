//! Sets `cfg(shuttle)` for this package only. The source tests features that this package does not have.

fn main() {
    println!("cargo:rustc-cfg=shuttle");
    println!(
        "cargo::rustc-check-cfg=cfg(feature, values(\"cuda\", \"npz\", \"safetensors\", \"serde\", \"stream\", \"tracing\"))"
    );
    println!("cargo:rerun-if-changed=build.rs");
}
