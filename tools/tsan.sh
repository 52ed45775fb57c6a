#!/bin/bash
# Core's tests under ThreadSanitizer: what the compiled code does without a happens-before edge, seen without
# the models' own atomics.
#
#   tools/tsan.sh              the stress and the thread tests
#   tools/tsan.sh ARGUMENTS    `cargo test ARGUMENTS` instead
#
# The standard library has to be instrumented too, or its edges would be missing: it is built from source. A
# nightly toolchain with the component rust-src does that. Where there is none to install, this takes the compiler
# that tools/rustc-web.sh unpacks, and only the runtime and the linker of the nightly toolchain.
#
# TWINBUF_STRESS_HANDOFFS sets how long the stress test runs. ThreadSanitizer does not know fences; there are
# none in core.
set -eu
cd "$(dirname "$0")/.."
[[ $# -gt 0 ]] || set -- -p twinbuf-core --test stress --test threads
target=x86_64-unknown-linux-gnu
sysroot=$(rustc +nightly --print sysroot)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target/tsan}
export TWINBUF_STRESS_HANDOFFS=${TWINBUF_STRESS_HANDOFFS:-20000}

if [[ -d $sysroot/lib/rustlib/src ]]; then
  export RUSTFLAGS="-Zsanitizer=thread ${RUSTFLAGS-}"
  exec cargo +nightly test -Zbuild-std --target "$target" "$@"
fi

compiler=$(tools/rustc-web.sh)
lib=$sysroot/lib/rustlib/$target
flags=(
  -Zsanitizer=thread
  # The runtime is not in this compiler's sysroot: link the other's, all of it, and let std find its symbols.
  -Zexternal-clangrt
  -Clink-arg=-Wl,--whole-archive
  -Clink-arg="$lib/lib/librustc-nightly_rt.tsan.a"
  -Clink-arg=-Wl,--no-whole-archive
  -Clink-arg=-Wl,--export-dynamic
  -Clink-arg=-lm
  -Clink-arg="-B$lib/bin/gcc-ld"
  -Clink-arg=-fuse-ld=lld
)
export RUSTC=$compiler RUSTC_BOOTSTRAP=1 RUSTFLAGS="${flags[*]} ${RUSTFLAGS-}"
exec cargo test -Zbuild-std --target "$target" "$@"
