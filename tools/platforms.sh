#!/bin/bash
# Tests on other processors and systems than this machine's, by emulation but for i686, and checks that the library compiles
# for others. Prints the minutes of each line as it ends, and all of them with their sum at the end;
# fails if any line failed.
#
#   tools/platforms.sh              every line of the table below
#   tools/platforms.sh WORDS...     the lines with all of these words in their suite or target, as in `core s390x`;
#                                   `run` and `check` are words of the lines that run tests and that only compile
#
# The library is built from source by the compiler that tools/rustc-web.sh unpacks: no target has to be
# downloaded. The linkers and emulators are Debian's packages; what is missing is installed; the script then has
# to run as root. TWINBUF_STRESS_HANDOFFS and PROPTEST_CASES set how long the stress and the property tests run.
set -euo pipefail
cd "$(dirname "$0")/.."

# Suite, target, cargo's arguments. The suite `check` compiles the libraries, on some targets their tests too, and runs
# nothing.
table='
core   aarch64-unknown-linux-gnu      test --no-fail-fast -p twinbuf-core --tests
core   i686-unknown-linux-gnu         test --no-fail-fast -p twinbuf-core --tests
core   s390x-unknown-linux-gnu        test --no-fail-fast -p twinbuf-core --tests
core   x86_64-pc-windows-gnu          test --no-fail-fast -p twinbuf-core --tests
mmap   aarch64-unknown-linux-gnu      test --no-fail-fast -p twinbuf-mmap --tests
mmap   i686-unknown-linux-gnu         test --no-fail-fast -p twinbuf-mmap --tests
mmap   s390x-unknown-linux-gnu        test --no-fail-fast -p twinbuf-mmap --tests
mmap   x86_64-pc-windows-gnu          test --no-fail-fast -p twinbuf-mmap --tests
root   aarch64-unknown-linux-gnu      test --no-fail-fast -p twinbuf --test all -- batches:: faults:: promises:: resume:: waiting::
root   i686-unknown-linux-gnu         test --no-fail-fast -p twinbuf --test all -- batches:: faults:: promises:: resume:: waiting::
root   s390x-unknown-linux-gnu        test --no-fail-fast -p twinbuf --test all -- batches:: faults:: promises:: resume:: waiting::
root   x86_64-pc-windows-gnu          test --no-fail-fast -p twinbuf --test all -- batches:: faults:: promises:: resume:: waiting::
check  x86_64-pc-windows-msvc         check -p twinbuf-core -p twinbuf-mmap -p twinbuf --lib --tests
check  aarch64-apple-darwin           check -p twinbuf-core -p twinbuf-mmap -p twinbuf --lib --tests
check  x86_64-apple-darwin            check -p twinbuf-core -p twinbuf-mmap -p twinbuf --lib
check  x86_64-unknown-freebsd         check -p twinbuf-core -p twinbuf-mmap -p twinbuf --lib --tests
check  aarch64-linux-android          check -p twinbuf-core -p twinbuf-mmap -p twinbuf --lib
check  x86_64-unknown-linux-musl      check -p twinbuf-core -p twinbuf-mmap -p twinbuf --lib
check  armv7-unknown-linux-gnueabihf  check -p twinbuf-core -p twinbuf-mmap -p twinbuf --lib
check  powerpc-unknown-linux-gnu      check -p twinbuf-core -p twinbuf-mmap -p twinbuf --lib
check  x86_64-unknown-netbsd          check -p twinbuf-core -p twinbuf-mmap -p twinbuf --lib
check  x86_64-unknown-illumos         check -p twinbuf-core -p twinbuf-mmap -p twinbuf --lib
check  wasm32-unknown-unknown         check -p twinbuf-core --lib --no-default-features --features alloc
'

# same_processor: how cargo links for i686. An x86_64 kernel runs it; Debian keeps its libraries apart.
same_processor() {
  tools/debian.sh gcc-i686-linux-gnu libc6-dev-i386-cross
  local libraries=/usr/i686-linux-gnu/lib
  export CARGO_TARGET_I686_UNKNOWN_LINUX_GNU_LINKER=i686-linux-gnu-gcc
  export CARGO_TARGET_I686_UNKNOWN_LINUX_GNU_RUSTFLAGS="
    -Clink-arg=-Wl,--dynamic-linker=$libraries/ld-linux.so.2,-rpath,$libraries"
}

# emulated TARGET GNU DEBIAN QEMU: how cargo links and runs for a Linux, by GNU's, Debian's and QEMU's names for it.
emulated() {
  tools/debian.sh "gcc-$2" "libc6-dev-$3-cross" qemu-user
  # Emulated code is slow: that of the tests is compiled for speed, std is not (it would take longer than it gives).
  for package in twinbuf-core twinbuf-mmap twinbuf; do
    optimized+=(--config "profile.dev.package.$package.opt-level=1")
  done
  local variable=${1^^}
  variable=CARGO_TARGET_${variable//-/_}
  # QEMU's madvise(MADV_WILLNEED) does nothing.
  export "${variable}_LINKER=$2-gcc" "${variable}_RUNNER=qemu-$4 -L /usr/$2 -E TWINBUF_TEST_NO_HINTS=1"
}

# windows: how cargo links and runs for Windows.
windows() {
  tools/debian.sh gcc-mingw-w64-x86-64-win32 wine64
  local home=$CARGO_TARGET_DIR/wine
  mkdir -p "$home"
  # Wine before 9 lacks a library of one function that Rust's std needs: its random numbers.
  if [[ ! -f $home/bcryptprimitives.dll ]]; then
    x86_64-w64-mingw32-gcc -shared -x c - -o "$home/bcryptprimitives.dll" -ladvapi32 <<'END'
#include <windows.h>
#include <ntsecapi.h>
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T len) { return RtlGenRandom(bytes, (ULONG)len); }
END
  fi
  export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc
  export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=/usr/lib/wine/wine64
  export WINEPREFIX=$home/prefix WINEPATH="Z:${home//\//\\}" WINEDEBUG=-all
}

# prepare TARGET: what it takes to link and run for it.
prepare() {
  case $1 in
    aarch64-unknown-linux-gnu) emulated "$1" aarch64-linux-gnu arm64 aarch64 ;;
    i686-unknown-linux-gnu) same_processor ;;
    s390x-unknown-linux-gnu) emulated "$1" s390x-linux-gnu s390x s390x ;;
    x86_64-pc-windows-gnu) windows ;;
  esac
}

# left_out SUITE TARGET: prints the test files whose first attribute leaves them out there: they pass with no test run.
left_out() {
  [[ $1 == check ]] && return
  local folder=$1/tests path attribute kept
  [[ $1 == root ]] && folder=tests
  while IFS=: read -r path attribute; do
    attribute=${attribute#'#!['} attribute=${attribute%']'}
    # The compiler prints what the attribute keeps.
    kept=$("$RUSTC" --target "$2" -Zunpretty=expanded --crate-type lib - <<END
#![feature(no_core)]
#![no_core]
#[$attribute] mod kept {}
END
    )
    [[ $kept == *kept* ]] || echo "$path: not run there: $attribute"
  done < <(grep -H '^#!\[cfg(.*\(unix\|target_\)' "$folder"/*.rs)
}

# selected SUITE TARGET WORDS
selected() {
  local line=" $1 $2"
  [[ $1 == check ]] || line+=" run"
  for word in "${@:3}"; do
    [[ $line == *[\ -]"$word"* ]] || return 1
  done
}

RUSTC=$(tools/rustc-web.sh)
export RUSTC RUSTC_BOOTSTRAP=1 # -Zbuild-std is not stable
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/platforms
# Emulation is slow: fewer rounds of the tests that repeat. Most of the time goes into building: no debug information.
export TWINBUF_STRESS_HANDOFFS=${TWINBUF_STRESS_HANDOFFS:-5000} PROPTEST_CASES=${PROPTEST_CASES:-100}
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0

# minutes SECONDS
minutes() {
  printf '%d min %02d s' $(($1 / 60)) $(($1 % 60))
}

summary=() failed=0
while read -r suite target arguments; do
  [[ -n $suite ]] && selected "$suite" "$target" "$@" || continue
  printf '== %s, %s\n' "$suite" "$target"
  left_out "$suite" "$target"
  began=$SECONDS result=passed optimized=()
  # shellcheck disable=SC2086 # words on purpose
  if ! prepare "$target" ||
    ! cargo ${arguments%% *} -q "${optimized[@]}" -Zbuild-std --target "$target" ${arguments#* } </dev/null; then
    ((++failed))
    result=FAILED
  fi
  summary+=("$(printf '%-6s %-30s %s  %s' "$suite" "$target" "$result" "$(minutes $((SECONDS - began)))")")
  printf '== %s\n' "${summary[-1]}"
done <<<"$table"
if ! ((${#summary[@]})); then
  echo "no line of the table has the words: $*" >&2
  exit 2
fi
printf '\n'
printf '%s\n' "${summary[@]}"
printf '%d lines, %d failed, %s\n' ${#summary[@]} "$failed" "$(minutes $SECONDS)"
((!failed))
