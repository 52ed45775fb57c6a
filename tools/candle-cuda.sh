#!/usr/bin/env bash
# Type-checks the candle adapter and its CUDA example on a machine without a CUDA toolkit. A stand-in for `nvcc`, which
# compiles nothing, is enough for `cargo check`, because that links no kernels. What it makes cannot be linked or run.
# With a real toolkit: `cargo test --features cuda` in adapters/candle.
#
#   tools/candle-cuda.sh [COMMAND]    default: check; or: clippy
set -euo pipefail
cd "$(dirname "$0")/../adapters/candle"

toolkit=$(mktemp -d)
trap 'rm -rf "$toolkit"' EXIT
mkdir -p "$toolkit/bin" "$toolkit/include" "$toolkit/lib64"
cat >"$toolkit/bin/nvcc" <<'NVCC'
#!/bin/sh
case "$*" in
# cudarc's build script reads the version from the fourth line.
*--version*)
  printf 'nvcc: stand-in\n\n\nCuda compilation tools, release 12.8, V12.8.0\n'
  exit
  ;;
*--list-gpu-code*)
  echo sm_90
  exit
  ;;
esac
# Every output that is asked for is an empty file.
while [ $# -gt 0 ]; do
  case $1 in
  -o) : >"$2" ;;
  --output-directory) folder=$2 ;;
  *.cu) source=$1 ;;
  esac
  shift
done
if [ -n "${folder-}" ] && [ -n "${source-}" ]; then
  : >"$folder/$(basename "$source" .cu).ptx"
fi
NVCC
chmod +x "$toolkit/bin/nvcc"

export PATH=$toolkit/bin:$PATH CUDA_HOME=$toolkit CUDA_PATH=$toolkit CUDA_ROOT=$toolkit CUDA_TOOLKIT_ROOT_DIR=$toolkit
export CUDA_COMPUTE_CAP=90
# Not among what a real toolkit has built.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/no-toolkit
cargo "${1:-check}" --features cuda --lib --examples
