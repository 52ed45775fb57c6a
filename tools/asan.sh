#!/bin/bash
# Core's tests under AddressSanitizer (with its leak check): reads and writes outside of what is alive.
#
#   tools/asan.sh              all but those in the documentation
#   tools/asan.sh ARGUMENTS    `cargo test ARGUMENTS` instead
#
# Needs a nightly toolchain. TWINBUF_STRESS_HANDOFFS sets how long the stress test runs.
set -eu
cd "$(dirname "$0")/.."
[[ $# -gt 0 ]] || set -- -p twinbuf-core --tests
export RUSTFLAGS="-Zsanitizer=address ${RUSTFLAGS-}"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target/asan}
export TWINBUF_STRESS_HANDOFFS=${TWINBUF_STRESS_HANDOFFS:-20000}
# `--target` keeps the flags away from build scripts and macros.
exec cargo +nightly test --target x86_64-unknown-linux-gnu "$@"
