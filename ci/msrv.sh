#!/usr/bin/env bash
# Checks the published crates with the oldest compilers that they promise: rustup's where it has them, else Debian's
# (tools/rustc-web.sh): it has 1.85 but not 1.88. The crates of the feature `cuda` are then left out.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/msrv

# promised MANIFEST
promised() {
  sed -n 's/^rust-version = "\(.*\)"/\1/p' "$1"
}
has() {
  # Not through a pipe: who stops reading at the first match makes the writer fail.
  [[ $'\n'$(rustup toolchain list) == *$'\n'"$1"* ]]
}

version=$(promised Cargo.toml)
(
  if has "$version"; then
    export RUSTUP_TOOLCHAIN=$version
  else
    RUSTC=$(tools/rustc-web.sh "$version")
    export RUSTC
  fi
  "${RUSTC:-rustc}" --version | grep -F " $version."
  cargo check --quiet --lib --all-features -p twinbuf-core -p twinbuf-mmap
  cargo check --quiet --lib -p twinbuf --features safetensors,serde,stream,tracing
  cargo check --quiet -p twinbuf-cuda-sim
  cargo check --quiet --manifest-path cli/Cargo.toml
)

version=$(promised cuda/Cargo.toml)
if has "$version"; then
  RUSTUP_TOOLCHAIN=$version cargo check --quiet --lib --all-features -p twinbuf-cuda -p twinbuf
else
  echo "rustup has no $version: the feature cuda is not checked with it"
fi
