#!/usr/bin/env bash
# The command line's tool, a package outside the workspace: formatting, lints, tests.
set -euo pipefail
cd "$(dirname "$0")/.."
# Most of what it needs is there after those of the workspace: .cargo/config.toml.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
cargo fmt --manifest-path cli/Cargo.toml --check
cargo clippy --manifest-path cli/Cargo.toml --all-targets -- -D warnings
cargo test --manifest-path cli/Cargo.toml
