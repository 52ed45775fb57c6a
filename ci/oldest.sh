#!/usr/bin/env bash
# Checks four published crates with the oldest version of each direct dependency that their Cargo.toml allows. Needs a
# nightly cargo: no other can choose them. The lock file is put back.
set -euo pipefail
cd "$(dirname "$0")/.."
kept=$(mktemp)
cp Cargo.lock "$kept"
trap 'mv "$kept" Cargo.lock' EXIT
cargo +nightly update --quiet -Z direct-minimal-versions
cargo check --quiet --lib --all-features -p twinbuf-core -p twinbuf-mmap -p twinbuf-cuda -p twinbuf
