#!/bin/bash
# The claim `no_std`, shown three times.
#
#   tools/bare-metal.sh           builds, runs and measures tests/bare-metal: a program of the ring alone, with
#                                 neither std, alloc, libc nor a panic; x86_64 Linux, stable toolchain, no download
#   tools/bare-metal.sh run       builds, runs and measures tests/cortex-m in QEMU, on a Cortex-M3 with its own atomics and
#                                 on a Cortex-M0 by portable-atomic: an interrupt at any instruction has one side of
#                                 the ring. With the compiler of tools/rustc-web.sh; installs QEMU and a linker from
#                                 Debian's packages where they are missing (as root)
#   tools/bare-metal.sh targets   compiles twinbuf-core for microcontrollers and other bare targets, with the
#                                 compiler that tools/rustc-web.sh unpacks
set -euo pipefail
cd "$(dirname "$0")/.."
target_dir=${CARGO_TARGET_DIR:-$PWD/target}/bare-metal

check() {
  CARGO_TARGET_DIR=$target_dir cargo build -q --release --manifest-path tests/bare-metal/Cargo.toml
  local program=$target_dir/release/bare-metal
  "$program" || { echo "line $? (modulo 256, made odd) of tests/bare-metal/src/check.rs failed" >&2; exit 1; }
  # With a path to a panic it would not have linked; formatting could still come in by another way.
  if nm "$program" | grep -E 'core\.*3fmt|core::fmt|panic'; then
    echo "formatting or panic code is linked" >&2
    exit 1
  fi
  measure "$program"
}

# measure PROGRAM
measure() {
  local text
  text=$(size -A "$1" | awk '$1 == ".text" { print $2 }')
  echo "${1#"$target_dir"/}: runs; .text is $text bytes (limit 4096)"
  ((text < 4096))
}

run() {
  local compiler
  compiler=$(tools/rustc-web.sh)
  tools/debian.sh qemu-system-arm binutils-arm-none-eabi
  # on TARGET MACHINE CARGO'S ARGUMENTS
  on() {
    local variable=CARGO_TARGET_${1//-/_} program
    export "${variable^^}_LINKER=arm-none-eabi-ld"
    # RUSTC_BOOTSTRAP: -Zbuild-std is not stable.
    RUSTC_BOOTSTRAP=1 RUSTC=$compiler CARGO_TARGET_DIR=$target_dir cargo build -q -Zbuild-std=core --release \
      --manifest-path tests/cortex-m/Cargo.toml --target "$1" "${@:3}"
    for program in calls interrupts; do
      program=$target_dir/$1/release/$program
      # A count of instructions as the clock (8 ns each): every run is the same.
      timeout 600 qemu-system-arm -M "$2" -display none -serial none -monitor none -icount shift=3,sleep=off \
        -semihosting-config enable=on,target=native -kernel "$program"
    done
    measure "$target_dir/$1/release/calls"
  }
  on thumbv7m-none-eabi mps2-an385
  on thumbv6m-none-eabi microbit --features portable-atomic
}

targets() {
  local compiler
  compiler=$(tools/rustc-web.sh)
  "$compiler" --version
  # Without machine code: a library of generic functions has next to none.
  # compiles LIBRARIES TARGET CARGO'S ARGUMENTS
  compiles() {
    # RUSTC_BOOTSTRAP: -Zbuild-std is not stable.
    RUSTC_BOOTSTRAP=1 RUSTC=$compiler CARGO_TARGET_DIR=$target_dir \
      cargo check -q "-Zbuild-std=$1" -p twinbuf-core --no-default-features --target "${@:2}"
    echo "${*:2}: compiles"
  }
  compiles core thumbv7em-none-eabihf
  compiles core riscv32imac-unknown-none-elf
  compiles core aarch64-unknown-none
  compiles core wasm32v1-none
  # Has no compare-exchange.
  compiles core thumbv6m-none-eabi --features portable-atomic,embedded-dma
  compiles core,alloc thumbv6m-none-eabi --features portable-atomic,alloc
}

case ${1:-check} in
  check) check ;;
  run) run ;;
  targets) targets ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2 ;;
esac
