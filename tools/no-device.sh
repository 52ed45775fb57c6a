#!/usr/bin/env bash
# What a program that wants a GPU says where there is none, with NVIDIA's own libraries in place of the software
# driver, built so that every panic aborts: no driver, and the driver's library without a device; with `stub` as
# argument the toolkit's stub too, a download of 774 MB. The libraries are Debian's packages, unpacked (not installed)
# into $NVIDIA_HOME (default: ~/.cache/twinbuf-nvidia) by the first call.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -e /proc/driver/nvidia ]; then
  echo "not tried: this machine has a driver"
  exit 0
fi
retry=$PWD/tools/retry.sh
home=${NVIDIA_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/twinbuf-nvidia}

# unpack PACKAGE PATTERN: the files of a Debian package that the pattern matches.
unpack() {
  mkdir -p "$home/lists/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] https://deb.debian.org/debian bookworm non-free" >"$home/sources.list"
  local apt=(apt-get -qq -oAPT::Architecture=amd64 -oAPT::Architectures=amd64 -oAPT::Sandbox::User=root
    "-oDir::State::Lists=$home/lists"
    "-oDir::Etc::SourceList=$home/sources.list" -oDir::Etc::SourceParts=/dev/null)
  (
    cd "$home"
    "$retry" "${apt[@]}" update
    "$retry" "${apt[@]}" download "$1"
    dpkg --fsys-tarfile "$1"_*.deb | tar -x --wildcards "$2"
    rm "$1"_*.deb
  )
}

# Where the libraries are in those packages.
real=$home/usr/lib/x86_64-linux-gnu/nvidia/current
stub=$home/usr/lib/x86_64-linux-gnu/stubs
[ -e "$real/libcuda.so.1" ] || unpack libcuda1 '*/nvidia/current/libcuda.so*'
[ "${1-}" != stub ] || [ -e "$stub/libcuda.so" ] || unpack nvidia-cuda-dev '*/stubs/libcuda.so'

target=${CARGO_TARGET_DIR:-target}/abort
cargo run --quiet --package twinbuf-cuda-sim -- library "$target/software"
export CARGO_PROFILE_DEV_PANIC=abort CARGO_TARGET_DIR=$target
cargo build --quiet --package twinbuf-cuda --examples
cargo build --quiet --package twinbuf --features cuda --example train_cuda

# says FOLDER SENTENCE: every program says it in one line, with these libraries, and exits with 2.
says() {
  for program in upload gpu_report train_cuda; do
    local said status=0
    said=$(LD_LIBRARY_PATH=$1 "$target/debug/examples/$program" 2>&1) || status=$?
    if [ "$status" != 2 ] || [ "$(wc -l <<<"$said")" != 1 ] || [[ $said != *"$2"* ]]; then
      printf '%s with [%s]: wanted "%s" and 2, found %s:\n%s\n' "$program" "$1" "$2" "$status" "$said" >&2
      exit 1
    fi
  done
  echo "$said"
}
says "" "no CUDA driver found; tried libcuda.so ("
says "$real" "the CUDA driver found no device"
[ "${1-}" != stub ] || says "$stub" "found the toolkit's stub"

# The software driver has every function that the tests and programs call. NVIDIA's library, here that of CUDA 12.2,
# has them too, but for newer ones: of 12.5, and of 12.8, which cudarc's `elapsed_ms` calls. Only the software driver's own
# tests use them.
functions() { nm -D --defined-only "$1" | awk '$3 ~ /^cu[A-Z]/ { print $3 }' | sort; }
missing=$(comm -23 <(functions "$target/software/libcuda.so.1") <(functions "$real/libcuda.so.1"))
newer=$(printf '%s\n' cuCtxCreate_v4 cuEventElapsedTime_v2)
if [ "$missing" != "$newer" ]; then
  printf 'wanted every function but\n%s\nin %s, found these missing:\n%s\n' "$newer" "$real" "$missing" >&2
  exit 1
fi
echo "$(functions "$target/software/libcuda.so.1" | wc -l) functions of the driver compared: all there but $missing"
