#!/usr/bin/env bash
# Packs what a machine with a GPU is to run into one folder, built here: the GPU report, the main job with the upload
# stage, and the tests that use a driver. That machine needs an NVIDIA driver, 64-bit x86 Linux and a C library as new
# as this one's (printed); no Rust, no toolkit. The report takes some minutes.
#
#   tools/gpu.sh [FOLDER]    packs [default: target/gpu]; there, `FOLDER/run [--quick] [OUT [PART...]]` runs it all, or
#                            the parts named of: tests, report, train
#   tools/gpu.sh rehearse    packs, and runs it here with the software driver in the place of the machine's own: it
#                            shows that the pack runs, and no figure of it means anything
set -euo pipefail
cd "$(dirname "$0")/.."

rehearse=
if [ "${1-}" = rehearse ]; then
  rehearse=yes
  shift
fi
target=${CARGO_TARGET_DIR:-target}
pack=${1:-$target/gpu}
rm -rf "$pack"
mkdir -p "$pack/tests"

cargo build --quiet --release --package twinbuf-cuda --example gpu_report
cargo build --quiet --release --package twinbuf --features cuda --example train_cuda
strip -o "$pack/gpu_report" "$target/release/examples/gpu_report"
strip -o "$pack/train_cuda" "$target/release/examples/train_cuda"

# Of each test program cargo says where it has put it. Two commands: the packages want different features.
for tests in "twinbuf-cuda --lib --tests" "twinbuf --test upload"; do
  # shellcheck disable=SC2086 # words on purpose
  cargo test --quiet --no-run --message-format=json --package $tests | python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["profile"]["test"]:
        print(message["target"]["name"], message["executable"])
' | while read -r name program; do
    strip -o "$pack/tests/$name" "$program"
  done
done
# What the tests of a missing driver put in its place.
strip --strip-unneeded -o "$pack/tests/libtwinbuf_cuda_sim.so" "$target/debug/deps/libtwinbuf_cuda_sim.so"

# The folder for files that the tests were compiled with.
temporary=$(realpath -m "$target/tmp")
cat >"$pack/run" <<RUN
#!/usr/bin/env bash
# Tests on this machine's driver, then the report and the main job, or the parts that are named. Figures go to OUT
# (default: here).
set -uo pipefail
here=\$(cd "\$(dirname "\$0")" && pwd)
quick=
if [ "\${1-}" = --quick ]; then
  quick=yes
  shift
fi
out=\${1:-\$here}
parts=\${*:2}
for part in \${parts:=tests report train}; do
  case \$part in tests | report | train) ;; *) echo "no such part: \$part" >&2 && exit 2 ;; esac
done
mkdir -p "\$out" || exit 2
failed=0

# wanted PART: whether it is to run.
wanted() {
  [[ " \$parts " == *" \$1 "* ]]
}

# fails STATUS: of what has just run; the rest runs nevertheless.
fails() {
  failed=1
  if [ "\$1" = 124 ]; then echo "took too long, stopped"; else echo "exit status \$1"; fi
}

# What the figures depend on and the report cannot ask for.
nvidia-smi -q >"\$out/nvidia-smi.txt" 2>&1 || true
if wanted tests; then
  mkdir -p '$temporary' || echo "the tests named upload need that folder"
  : >"\$out/tests.log"
  export TWINBUF_CUDA_DRIVER=real
  for test in "\$here"/tests/*; do
    case \$test in *.so) continue ;; esac
    echo "== \${test##*/}" | tee -a "\$out/tests.log"
    timeout 1200 "\$test" --nocapture 2>&1 | tee -a "\$out/tests.log" | grep -E '^test (result|.* FAILED)'
    status=\${PIPESTATUS[0]}
    [ "\$status" = 0 ] || fails "\$status"
  done
fi
if wanted report; then
  echo "== gpu_report"
  timeout 1200 "\$here/gpu_report" \${quick:+--quick} >"\$out/gpu.json" || fails \$?
  grep '"error"' "\$out/gpu.json" && echo "not measured"
fi
if wanted train; then
  echo "== train_cuda"
  (cd "\$here" && timeout 600 ./train_cuda \${quick:+--data gpu_report --batch 64 --rounds 1 --compute-ms 1}) | tee "\$out/train_cuda.txt" || fails \$?
fi
exit \$failed
RUN
chmod +x "$pack/run"
newest=$(objdump -T "$pack"/gpu_report "$pack"/train_cuda "$pack"/tests/* | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
echo "$pack: $(du -sh "$pack" | cut -f1), needs ${newest/_/ }"

if [ -n "$rehearse" ]; then
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' EXIT
  cp "$target/debug/deps/libtwinbuf_cuda_sim.so" "$stage/libcuda.so"
  LD_LIBRARY_PATH=$stage "$pack/run" --quick "$stage/out"
fi
