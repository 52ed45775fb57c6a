#!/bin/bash
# Tests on other processors and systems than this machine's, by emulation, and prints the minutes of each.
#
#   tools/platforms.sh              every line of the table below
#   tools/platforms.sh WORDS...     the lines with all of these words in their suite or target, as in `core s390x`
#
# The library is built from source by the compiler that tools/rustc-web.sh unpacks, so that no target has to be
# downloaded. The linkers and emulators are Debian's packages; what is missing is installed, for which the script has
# to run as root. TWINBUF_STRESS_HANDOFFS and PROPTEST_CASES set how long the stress and the property tests run.
set -euo pipefail
cd "$(dirname "$0")/.."

# Suite, target, cargo's arguments.
table='
core  aarch64-unknown-linux-gnu  test -p twinbuf-core --tests
core  i686-unknown-linux-gnu     test -p twinbuf-core --tests
core  s390x-unknown-linux-gnu    test -p twinbuf-core --tests
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

# prepare TARGET: what it takes to link and run for it.
prepare() {
  case $1 in
    aarch64-unknown-linux-gnu) emulated "$1" aarch64-linux-gnu arm64 aarch64 ;;
    i686-unknown-linux-gnu) emulated "$1" i686-linux-gnu i386 i386 ;;
    s390x-unknown-linux-gnu) emulated "$1" s390x-linux-gnu s390x s390x ;;
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

lines=0
while read -r suite target arguments; do
  [[ -n $suite ]] && selected "$suite" "$target" "$@" || continue
  ((++lines))
  printf '== %s, %s\n' "$suite" "$target"
  SECONDS=0
  prepare "$target"
  # shellcheck disable=SC2086 # words on purpose
  cargo ${arguments%% *} -q -Zbuild-std --target "$target" ${arguments#* } </dev/null
  printf '== %s, %s: %d min %d s\n' "$suite" "$target" $((SECONDS / 60)) $((SECONDS % 60))
done <<<"$table"
if ! ((lines)); then
  echo "no line of the table has the words: $*" >&2
  exit 2
fi
