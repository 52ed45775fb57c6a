#!/usr/bin/env bash
# Checks four published crates with the oldest version of each direct dependency that their Cargo.toml allows. Needs a
# nightly cargo: no other can choose them. It works in a folder of links: other steps read the lock file meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."
CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR
links=$CARGO_TARGET_DIR/oldest
rm -rf "$links"
mkdir -p "$links"
ln -s "$PWD"/* "$links"
cp --remove-destination Cargo.* "$links"
cd "$links"
cargo +nightly update --quiet -Z direct-minimal-versions
cargo check --quiet --lib --all-features -p twinbuf-core -p twinbuf-mmap -p twinbuf-cuda -p twinbuf
