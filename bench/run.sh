#!/bin/sh
# Measures the loader by batch size, depth and compute, then beside other loaders, and writes the tables of the READMEs
# anew. About 25 minutes; the machine should do nothing else. Options go to the second program:
# bench/run.sh --python PATH
set -eu
cd "$(dirname "$0")/.."
cargo run --release --manifest-path bench/disk/Cargo.toml -- scaling
cargo run --release --manifest-path bench/loaders/Cargo.toml -- all "$@"
python3 bench/tables.py
