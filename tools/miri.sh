#!/usr/bin/env bash
# The tests of the ring under Miri: every access to memory checked against the rules of Rust's abstract machine, with
# stale loads as weak memory has them, on as many schedules as there are seeds (default: 4). Needs rustup and what it
# downloads: a separate nightly, kept in $MIRI_HOME (default: ~/.cache/twinbuf-miri). Not the newest, whose Miri refuses the
# futex call of parking_lot_core 0.9.
#
#   tools/miri.sh [SEEDS]
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=${1:-4}
nightly=nightly-2026-03-01
export RUSTUP_HOME=${MIRI_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/twinbuf-miri}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/miri

if ! cargo "+$nightly" miri --version >/dev/null 2>&1; then
  rustup toolchain install "$nightly" --profile minimal --component miri --component rust-src --no-self-update
fi
# Not isolated: the tests read environment and clock. parking_lot_core makes pointers of integers. That is permitted.
export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance"
export TWINBUF_STRESS_HANDOFFS=${TWINBUF_STRESS_HANDOFFS:-200} PROPTEST_CASES=${PROPTEST_CASES:-10}
export PROPTEST_DISABLE_FAILURE_PERSISTENCE=true

run=(cargo "+$nightly" miri test --quiet --package twinbuf-core --tests)
for seed in $(seq "$seeds"); do
  MIRIFLAGS="$MIRIFLAGS -Zmiri-seed=$seed" TWINBUF_STRESS_SEED=$seed "${run[@]}"
done
# The other aliasing model.
MIRIFLAGS="$MIRIFLAGS -Zmiri-tree-borrows" "${run[@]}"
