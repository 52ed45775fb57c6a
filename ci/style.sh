#!/usr/bin/env bash
# Formatting, lints, docs, the Python scripts beside this one, the tables of the READMEs, and the actions of hosted CI.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
cargo clippy --workspace --all-targets -- -D warnings
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
python3 ci/circles.py --test
python3 ci/layers.py --test
python3 ci/layers.py
python3 ci/circles.py core/src mmap/src cuda/src cuda/sim/src src cli/src bench/{harness,handoff,disk,loaders}/src \
  bench/cudarc/src bench/weights/src adapters/{burn,candle,object-store,ranks}/src \
  python/src capi/src
python3 ci/names.py
python3 ci/features.py
python3 ci/lines.py
python3 ci/release.py
if grep -n 'uses:' .github/workflows/*.yml | grep -vE '@[0-9a-f]{40} # v[0-9.]+$|uses: \./'; then
  echo "these actions are not pinned by hash" >&2
  exit 1
fi
python3 ci/files.py
python3 bench/tables.py --check
