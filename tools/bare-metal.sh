#!/bin/bash
# The claim `no_std`, shown twice.
#
#   tools/bare-metal.sh           builds, runs and measures tests/bare-metal: a program of the ring alone, with
#                                 neither std, alloc, libc nor a panic; x86_64 Linux, stable toolchain, no download
#   tools/bare-metal.sh targets   builds twinbuf-core for microcontrollers and other bare targets, with the
#                                 compiler that tools/rustc-web.sh unpacks
set -euo pipefail
cd "$(dirname "$0")/.."
target_dir=${CARGO_TARGET_DIR:-$PWD/target}/bare-metal

check() {
  CARGO_TARGET_DIR=$target_dir cargo build -q --release --manifest-path tests/bare-metal/Cargo.toml
  local program=$target_dir/release/bare-metal
  "$program" || { echo "line $? (modulo 256, made odd) of tests/bare-metal/src/main.rs failed" >&2; exit 1; }
  # With a path to a panic it would not have linked; formatting could still come in by another way.
  if nm "$program" | grep -E 'core\.*3fmt|core::fmt|panic'; then
    echo "formatting or panic code is linked" >&2
    exit 1
  fi
  local text
  text=$(size -A "$program" | awk '$1 == ".text" { print $2 }')
  echo "bare-metal: runs; .text is $text bytes (limit 4096)"
  ((text < 4096))
}

targets() {
  local compiler
  compiler=$(tools/rustc-web.sh)
  "$compiler" --version
  # build TARGET CARGO'S ARGUMENTS
  build() {
    # RUSTC_BOOTSTRAP: -Zbuild-std is not stable.
    RUSTC_BOOTSTRAP=1 RUSTC=$compiler CARGO_TARGET_DIR=$target_dir \
      cargo build -q -Zbuild-std=core -p twinbuf-core --no-default-features --target "$@"
    echo "$*: builds"
  }
  build thumbv7em-none-eabihf
  build riscv32imac-unknown-none-elf
  build aarch64-unknown-none
  build wasm32v1-none
  # Has no compare-exchange.
  build thumbv6m-none-eabi --features portable-atomic
}

case ${1:-check} in
  check) check ;;
  targets) targets ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2 ;;
esac
