#!/usr/bin/env bash
# What others get when they depend on these crates: no CUDA code unless they ask for it, and one cudarc together
# with candle's and burn's.
set -euo pipefail
cd "$(dirname "$0")/.."

if cargo tree --package twinbuf --edges normal,build --prefix none | grep -E '^(cudarc|twinbuf-cuda|libloading) '; then
  echo "twinbuf compiles CUDA code by default" >&2
  exit 1
fi
echo "twinbuf by default: no CUDA code"

for features in candle burn candle,burn; do
  cargo check --quiet --manifest-path bench/cudarc/Cargo.toml --target-dir "${CARGO_TARGET_DIR:-target}" --features "$features"
  echo "twinbuf with cuda, beside the cudarc of $features: compiles"
done
