#!/usr/bin/env bash
# What `twinbuf_next` with `twinbuf_release` costs over Rust's `next` with the drop of the batch: warm batches of 8 KiB, C and
# Rust in turn.
#
#   capi/bench.sh [ROUNDS]    default: 21; prints ns a batch of each, medians, and the median of the differences
set -euo pipefail
cd "$(dirname "$0")/.."
out=${CARGO_TARGET_DIR:-target}/capi
mkdir -p "$out"
cargo build --quiet --release --package twinbuf-capi --lib --example next
cc -std=c11 -O2 -I capi/include capi/tests/next.c "${CARGO_TARGET_DIR:-target}/release/libtwinbuf_capi.a" -lpthread -ldl -lm \
  -o "$out/next"
head -c 67108864 /dev/zero >"$out/zeros.bin"
for _ in $(seq "${1:-21}"); do
  echo "$("$out/next" "$out/zeros.bin") $("${CARGO_TARGET_DIR:-target}/release/examples/next" "$out/zeros.bin")"
done | python3 -c '
import statistics, sys
rounds = [tuple(map(float, line.split())) for line in sys.stdin]
c, rust = (statistics.median(column) for column in zip(*rounds))
over = statistics.median(c - rust for c, rust in rounds)
print(f"C {c:.0f} ns a batch, Rust {rust:.0f}; the median of {len(rounds)} differences: {over:.0f} ns")'
