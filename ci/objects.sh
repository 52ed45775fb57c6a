#!/usr/bin/env bash
# The adapter for object stores: formatting, lints, docs, tests.
set -euo pipefail
cd "$(dirname "$0")/../adapters/object-store"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$(cd ../.. && pwd)/target/adapters}
cargo fmt --check
cargo clippy --quiet --all-targets -- -D warnings
RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps
cargo test --locked
