#!/usr/bin/env bash
# Other people's bindings on the software driver: a prefetcher on NVIDIA's Python binding, clean and with faults, and cudarc's
# own tests. Programs in C are among the tests of `cuda/sim`.
set -euo pipefail
cd "$(dirname "$0")/.."
retry=$PWD/tools/retry.sh
cargo build --quiet --package twinbuf-cuda-sim
sim=$(realpath -m "${CARGO_TARGET_DIR:-target}")/debug/cuda-sim

# ends CODE ARGUMENT...: `cuda-sim run` ends with this exit code.
ends() {
  local wanted=$1 status=0 said
  shift
  said=$("$sim" run "$@" 2>&1) || status=$?
  if [ "$status" != "$wanted" ]; then
    printf 'cuda-sim run %s: wanted exit code %s, found %s:\n%s\n' "$*" "$wanted" "$status" "$said" >&2
    exit 1
  fi
}

# Nothing was checked.
ends 1 -- true
venv=$PWD/target/binding
[ -x "$venv/bin/pip" ] || python3 -m venv --clear "$venv"
PIP_DISABLE_PIP_VERSION_CHECK=1 "$retry" "$venv/bin/pip" install --quiet 'cuda-bindings>=13,<14'
prefetch=("$venv/bin/python" cuda/sim/tests/programs/prefetch.py)
ends 0 --seeds 10 -- "${prefetch[@]}"
for fault in host stream use; do
  ends 1 --seeds 3 -- "${prefetch[@]}" "$fault"
done
echo "cuda-bindings $("$venv/bin/pip" show cuda-bindings | sed -n 's/^Version: //p'): the prefetcher is clean, 3 of 3 faults are found"

# cudarc's own tests, as they are in the registry, but for those that need something else than a driver or misuse it.
other='
driver::safe::core::tests::test_default_pinned_host_reads_are_faster_than_write_combined  compares times
driver::safe::core::tests::test_pinned_copy_is_faster  compares times
driver::safe::launch::tests::test_large_launches  kernel
driver::safe::launch::tests::test_launch_arrays  kernel
driver::safe::launch::tests::test_launch_with_16bit  kernel
driver::safe::launch::tests::test_launch_with_32bit  kernel
driver::safe::launch::tests::test_launch_with_64bit  kernel
driver::safe::launch::tests::test_launch_with_8bit  kernel
driver::safe::launch::tests::test_launch_with_floats  kernel
driver::safe::launch::tests::test_launch_with_mut_and_ref_cudarc  kernel
driver::safe::launch::tests::test_launch_with_views  kernel
driver::safe::launch::tests::test_multi_stream_concurrent_reads  kernel
driver::safe::launch::tests::test_multi_stream_writes_block  kernel
driver::safe::launch::tests::test_par_launch  kernel
driver::safe::unified_memory::tests::test_unified_memory_global  kernel
driver::safe::unified_memory::tests::test_unified_memory_host  kernel
driver::safe::unified_memory::tests::test_unified_memory_single_stream  kernel
driver::safe::unified_memory::tests::test_unified_slice_views_respect_stream_attachment  copies on a wrong stream on purpose: passes, and the copy is found
nvrtc::result::tests::test_compile_bad_program  NVRTC
nvrtc::result::tests::test_compile_program_1_opt  NVRTC
nvrtc::result::tests::test_compile_program_2_opt  NVRTC
nvrtc::result::tests::test_compile_program_no_opts  NVRTC
nvrtc::result::tests::test_get_ptx  NVRTC
nvrtc::safe::tests::test_compile_no_opts  NVRTC'
manifest=$(cargo metadata --format-version 1 --locked --filter-platform x86_64-unknown-linux-gnu | python3 -c '
import json, sys
print(next(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"))')
built=$("$retry" cargo test --manifest-path "$manifest" --target-dir target/cudarc --lib --no-run --no-default-features \
  --features std,driver,nvrtc,fallback-dynamic-loading,cuda-version-from-build-system,fallback-latest 2>&1)
tests=$(sed -n 's/.*Executable .*(\(.*\))/\1/p' <<<"$built")
mapfile -t skip < <(sed -n 's/^\([^ ]\+\)  .*/--skip\n\1/p' <<<"$other")
all=$("$tests" --list | sed -n 's/: test$//p')
if unknown=$(sed -n 's/^\([^ ]\+\)  .*/\1/p' <<<"$other" | grep -vxFf <(echo "$all")); then
  printf 'not among the tests of cudarc: %s\n' "$unknown" >&2
  exit 1
fi
ends 0 -- "$tests" --exact "${skip[@]}"
ends 1 -- "$tests" --exact driver::safe::unified_memory::tests::test_unified_slice_views_respect_stream_attachment
listed=$((${#skip[@]} / 2))
ignored=$("$tests" --list --ignored | grep -c ': test$' || true)
echo "cudarc: $(($(wc -l <<<"$all") - listed - ignored)) of its $(wc -l <<<"$all") tests pass and are clean; $ignored are ignored, $listed need something else:"
awk 'NF { print $NF }' FS='  ' <<<"$other" | sort | uniq -c
