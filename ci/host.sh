#!/usr/bin/env bash
# The tests of the crates that promise this machine's system, whichever it is. (Those of the models and of the
# software CUDA driver are for Linux.)
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test -p twinbuf-core -p twinbuf-mmap
cargo test -p twinbuf --lib --tests
cargo test --manifest-path cli/Cargo.toml --target-dir target
