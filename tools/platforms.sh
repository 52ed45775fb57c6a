#!/bin/bash
# Tests on other processors and systems than this machine's, by emulation, checks that the library compiles for those
# that cannot be emulated, and prints the minutes of each.
#
#   tools/platforms.sh              every line of the table below
#   tools/platforms.sh WORDS...     the lines with all of these words in their suite or target, as in `core s390x`
#
# The library is built from source by the compiler that tools/rustc-web.sh unpacks, so that no target has to be
# downloaded. The linkers and emulators are Debian's packages; what is missing is installed, for which the script has
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
mmap   x86_64-unknown-linux-gnu       test --no-fail-fast -p twinbuf-mmap --tests
mmap   aarch64-unknown-linux-gnu      test --no-fail-fast -p twinbuf-mmap --tests
mmap   i686-unknown-linux-gnu         test --no-fail-fast -p twinbuf-mmap --tests
mmap   s390x-unknown-linux-gnu        test --no-fail-fast -p twinbuf-mmap --tests
mmap   x86_64-pc-windows-gnu          test --no-fail-fast -p twinbuf-mmap --tests
root   aarch64-unknown-linux-gnu      test --no-fail-fast -p twinbuf --test batches --test faults --test resume --test waiting
root   i686-unknown-linux-gnu         test --no-fail-fast -p twinbuf --test batches --test faults --test resume --test waiting
root   s390x-unknown-linux-gnu        test --no-fail-fast -p twinbuf --test batches --test faults --test resume --test waiting
root   x86_64-pc-windows-gnu          test --no-fail-fast -p twinbuf --test batches --test faults --test resume --test waiting
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

# needs PACKAGES: installs those that are missing.
needs() {
  local missing=()
  for package; do
    dpkg -s "$package" 2>/dev/null | grep -q '^Status: .* installed$' || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  echo "installs ${missing[*]}"
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "${missing[@]}" >/dev/null
}

# emulated TARGET GNU DEBIAN QEMU: how cargo links and runs for a Linux, by GNU's, Debian's and QEMU's names for it.
emulated() {
  needs "gcc-$2" "libc6-dev-$3-cross" qemu-user
  local variable=${1^^}
  variable=CARGO_TARGET_${variable//-/_}
  export "${variable}_LINKER=$2-gcc" "${variable}_RUNNER=qemu-$4 -L /usr/$2"
}

# windows: how cargo links and runs for Windows.
windows() {
  needs gcc-mingw-w64-x86-64-win32 wine64
  local home=$CARGO_TARGET_DIR/wine
  mkdir -p "$home"
  # Wine before 9 lacks a library from which Rust's std takes one function: its random numbers.
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
    i686-unknown-linux-gnu) emulated "$1" i686-linux-gnu i386 i386 ;;
    s390x-unknown-linux-gnu) emulated "$1" s390x-linux-gnu s390x s390x ;;
    x86_64-pc-windows-gnu) windows ;;
  esac
}

# selected SUITE TARGET WORDS
selected() {
  local line=" $1 $2"
  for word in "${@:3}"; do
    [[ $line == *[\ -]"$word"* ]] || return 1
  done
}

RUSTC=$(tools/rustc-web.sh)
export RUSTC RUSTC_BOOTSTRAP=1 # -Zbuild-std is not stable
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/platforms
# Emulation is slow: fewer rounds of the tests that repeat. Most of the time goes into building: no debug information.
export TWINBUF_STRESS_HANDOFFS=${TWINBUF_STRESS_HANDOFFS:-5000} PROPTEST_CASES=${PROPTEST_CASES:-500}
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_INCREMENTAL=0

lines=0 failed=()
while read -r suite target arguments; do
  [[ -n $suite ]] && selected "$suite" "$target" "$@" || continue
  ((++lines))
  printf '== %s, %s\n' "$suite" "$target"
  SECONDS=0
  result=passed
  # shellcheck disable=SC2086 # words on purpose
  if ! prepare "$target" || ! cargo ${arguments%% *} -q -Zbuild-std --target "$target" ${arguments#* } </dev/null; then
    failed+=("$suite $target") result=failed
  fi
  printf '== %s, %s: %s, %d min %d s\n' "$suite" "$target" "$result" $((SECONDS / 60)) $((SECONDS % 60))
done <<<"$table"
if ! ((lines)); then
  echo "no line of the table has the words: $*" >&2
  exit 2
fi
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
