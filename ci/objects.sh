#!/usr/bin/env bash
# The adapter for object stores: formatting, lints, docs, tests. Builds a server of S3's protocol and runs the tests, the
# example and the recipe for Python on it. The recipe needs the environment that ci/python.sh makes.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target/adapters}
cd adapters/object-store
for folder in . server; do
  cargo fmt --manifest-path $folder/Cargo.toml --check
  cargo clippy --quiet --locked --manifest-path $folder/Cargo.toml --all-targets -- -D warnings
done
RUSTDOCFLAGS="-D warnings" cargo doc --quiet --no-deps
cargo build --quiet --locked --manifest-path server/Cargo.toml
server=$CARGO_TARGET_DIR/debug/twinbuf-object-store-server
OBJECTS_SERVER=$server cargo test --locked
cargo build --quiet --locked --example train
venv=${OBJECTS_PYTHON:-$root/target/python}
if [ -x "$venv/bin/python" ]; then
  "$root/tools/retry.sh" "$venv/bin/pip" install --quiet --no-compile obstore
  "$venv/bin/python" tests/recipe.py "$server" "$CARGO_TARGET_DIR/debug/examples/train"
else
  echo "the recipe for Python: not checked, no $venv"
fi
