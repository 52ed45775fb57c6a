#!/usr/bin/env bash
# Every public item of four published crates, against the snapshots in ci/api. Needs a nightly toolchain: rustdoc's JSON.
#
#   ci/api.sh            fails if the public API differs from a snapshot
#   ci/api.sh --write    takes the snapshots anew
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/public-api
cargo build -q --manifest-path ci/public-api/Cargo.toml
differs=0
for crate in twinbuf twinbuf-core twinbuf-mmap twinbuf-cuda; do
  cargo +nightly rustdoc -q --lib -p "$crate" --all-features -- -Z unstable-options --output-format json --cap-lints allow
  found=$CARGO_TARGET_DIR/$crate.txt
  "$CARGO_TARGET_DIR/debug/twinbuf-public-api" "$CARGO_TARGET_DIR/doc/${crate//-/_}.json" >"$found"
  if [ "${1:-}" = --write ]; then
    cp "$found" "ci/api/$crate.txt"
  elif ! diff -u "ci/api/$crate.txt" "$found"; then
    echo "$crate: the public API changed; if that is meant: ci/api.sh --write" >&2
    differs=1
  fi
done
exit $differs
