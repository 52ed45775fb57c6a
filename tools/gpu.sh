#!/usr/bin/env bash
# Packs what a machine with a GPU is to run into one folder, built here: the GPU report, the tests that use a driver, the
# main job with the upload stage, and the Python package. That machine needs an NVIDIA driver, 64-bit x86 Linux and a C
# library as new as this one's (printed); no Rust, no toolkit. Where it has torch, the Python step runs too; where it has
# compute-sanitizer, so does that step.
#
#   tools/gpu.sh [FOLDER]    packs [default: target/gpu]; there, `FOLDER/run [--quick] [OUT [STEP...]]` runs for at most ten
#                            minutes: every step that OUT has no figures of yet, or the steps named, the most telling
#                            first, none for more than a third of the time. It ends with a line for each promise, met or
#                            not, and names the one file to send back. Run again, it goes on, last with the steps that
#                            did not come to their end. Each figure is in OUT as soon as it is measured.
#   tools/gpu.sh rehearse    packs, and runs it here with the software driver in the place of the machine's own: it
#                            shows that the pack runs, and no figure of it means anything
set -euo pipefail
cd "$(dirname "$0")/.."

mode=pack
[ "${1-}" != rehearse ] || mode=$1
target=${CARGO_TARGET_DIR:-target}
pack=$target/gpu
[ "$mode" != pack ] || pack=${1:-$pack}
rm -rf "$pack"
mkdir -p "$pack/tests"

# No figure of a rehearsal means anything, so it takes what `cargo test --workspace` has built. Each package alone wants
# other features, and is built again.
profile=(--release) folder=release
report=(--package twinbuf-cuda) train=(--package twinbuf --features cuda)
tests=("--package twinbuf-cuda --lib --tests" "--package twinbuf --test all")
[ "$mode" != rehearse ] || profile=() folder=debug report=(--workspace) train=(--workspace) tests=(--workspace)
cargo build --quiet "${profile[@]}" "${report[@]}" --example gpu_report
cargo build --quiet "${profile[@]}" "${train[@]}" --example train_cuda
strip -o "$pack/gpu_report" "$target/$folder/examples/gpu_report"
strip -o "$pack/train_cuda" "$target/$folder/examples/train_cuda"

# Of each test program cargo says where it has put it. Of the root's tests, those of its uploads need a device.
for programs in "${tests[@]}"; do
  # shellcheck disable=SC2086 # words on purpose
  cargo test --quiet --no-run --message-format=json $programs | python3 -c '
import json, sys
from pathlib import Path
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["profile"]["test"]:
        folder, name = Path(message["manifest_path"]).parent, message["target"]["name"]
        if folder == Path.cwd() / "cuda":
            print(name, message["executable"])
        elif (folder, name) == (Path.cwd(), "all"):
            print("upload", message["executable"])
' | while read -r name program; do
    strip -o "$pack/tests/$name" "$program"
  done
done

# The Python package: the wheel of ci/python.sh if no source is newer, or one from a virtual environment that is kept.
cp tools/gpu_torch.py "$pack"
wheel=$(ls target/wheels/*.whl 2>/dev/null || true)
if [ -n "$wheel" ] && [ -z "$(find Cargo.toml core mmap cuda/src src python/src python/twinbuf python/Cargo.* -newer "$wheel")" ]; then
  mkdir "$pack/wheels"
  cp "$wheel" "$pack/wheels"
else
  venv=$PWD/target/gpu-python
  [ -x "$venv/bin/maturin" ] || { python3 -m venv --clear "$venv" && tools/retry.sh "$venv/bin/pip" install --quiet maturin; }
  CARGO_TARGET_DIR=$PWD/python/target "$venv/bin/maturin" build --quiet --release --manifest-path python/Cargo.toml --out "$pack/wheels"
fi

# The folder for files that the tests were compiled with.
temporary=$(realpath -m "$target/tmp")
cat >"$pack/run" <<RUN
#!/usr/bin/env bash
# Runs the steps that OUT (default: out, here) has no figures of yet, or those named, for at most ten minutes. Then says
# which promises are met, and packs OUT into one file.
set -uo pipefail
here=\$(cd "\$(dirname "\$0")" && pwd)
quick=
if [ "\${1-}" = --quick ]; then
  quick=--quick
  shift
fi
out=\$(mkdir -p "\${1:-\$here/out}" && cd "\${1:-\$here/out}" && pwd) || exit 2
limit=\${TWINBUF_GPU_SECONDS:-590}
report="pipelines neighbour cpu stager latency calls overlap depths pinning"
tests=\$(cd "\$here/tests" && ls | sed 's/^/test-/')
all="machine captures copies unknowns test-twinbuf_cuda torch sanitizer \$report train \$(grep -v -x test-twinbuf_cuda <<<"\$tests" | tr '\n' ' ')"
steps=\${*:2}
for step in \$steps; do
  case " \$all " in *" \$step "*) ;; *) echo "no such step: \$step; there are: \$all" >&2 && exit 2 ;; esac
done
mkdir -p "\$out/done" "\$out/begun" '$temporary' || exit 2
export TWINBUF_CUDA_DRIVER=real
failed=0

# keep FILE PATTERN: each line to the file, and then to the terminal, if it matches.
keep() {
  # What a run that was stopped has left of a line.
  [ ! -s "\$1" ] || [ -z "\$(tail -c 1 "\$1")" ] || echo >>"\$1"
  local line
  while IFS= read -r line || [ -n "\$line" ]; do
    printf '%s\n' "\$line" >>"\$1"
    [[ ! \$line =~ \$2 ]] || printf '%s\n' "\$line"
  done
}

# step NAME FILE PATTERN COMMAND...
step() {
  local name=\$1 file=\$2 pattern=\$3 began=\$SECONDS
  shift 3
  echo "== \$name"
  touch "\$out/begun/\$name"
  local left=\$((limit - SECONDS)) most=\$((limit / 3))
  # It kills this command alone, not what that has started: a command made of several ends with \`exec\`.
  timeout --foreground --kill-after=10 "\$((left < most ? left : most))" "\$@" 2>&1 | keep "\$out/\$file" "\$pattern"
  local status=\${PIPESTATUS[0]}
  if [ "\$status" = 0 ]; then
    touch "\$out/done/\$name"
  else
    failed=1
    if [ "\$status" = 124 ] || [ "\$status" = 137 ]; then echo "took too long, stopped"; else echo "exit status \$status"; fi
  fi
  echo "== \$((SECONDS - began)) s"
}

# The wheel, unpacked by Python itself: no pip is needed.
torch_step() {
  python3 -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])' "\$here"/wheels/*.whl "\$out/python" &&
    PYTHONPATH=\$out/python exec python3 "\$here/gpu_torch.py" \$quick
}
# The compiler's check of what the kernels and copies access.
sanitizer_step() {
  local tool
  tool=\$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
  if [ -n "\$tool" ]; then
    exec "\$tool" --tool memcheck --report-api-errors no --error-exitcode 9 "\$here/gpu_report" --quick copies stager neighbour
  else
    echo "compute-sanitizer is not there"
  fi
}
export -f torch_step sanitizer_step
export here out quick

# What an earlier run began and did not end comes last: it takes no time from the others.
first='' last=''
for step in \${steps:-\$all}; do
  if [ -e "\$out/begun/\$step" ]; then last+=" \$step"; else first+=" \$step"; fi
done
for step in \$first \$last; do
  [ -n "\$steps" ] || [ ! -e "\$out/done/\$step" ] || continue
  if [ "\$((limit - SECONDS))" -lt 5 ]; then
    echo "== the time is over before \$step: run again to go on"
    break
  fi
  case \$step in
  machine)
    # What the figures depend on and the report cannot ask for.
    nvidia-smi -q >"\$out/nvidia-smi.txt" 2>&1 || true
    step machine report.jsonl . "\$here/gpu_report" \$quick machine
    ;;
  test-*)
    filter=
    [ "\$step" != test-upload ] || filter=upload::
    step "\$step" "\$step.log" '^test result|FAILED|^without ' "\$here/tests/\${step#test-}" \$filter --nocapture
    ;;
  train)
    step train train.txt . bash -c 'cd "\$1" && shift && exec "\$@"' - "\$out" "\$here/train_cuda" \${quick:+--data "\$here/gpu_report" --batch 64 --rounds 1 --compute-ms 1}
    ;;
  torch) step torch report.jsonl . bash -c torch_step ;;
  sanitizer) step sanitizer sanitizer.log 'ERROR SUMMARY|not there' bash -c sanitizer_step ;;
  *) step "\$step" report.jsonl . "\$here/gpu_report" \$quick "\$step" ;;
  esac
done
echo "== promises"
"\$here/gpu_report" promises "\$out" | tee "\$out/promises.txt"
tar -czf "\$out.tar.gz" -C "\$(dirname "\$out")" --exclude=python --exclude=data "\$(basename "\$out")" && echo "send back: \$out.tar.gz"
exit \$failed
RUN
chmod +x "$pack/run"
newest=$(objdump -T "$pack"/gpu_report "$pack"/train_cuda "$pack"/tests/* | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
echo "$pack: $(du -sh "$pack" | cut -f1), needs ${newest/_/ }"

[ "$mode" != pack ] || exit 0
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
cargo run --quiet --package twinbuf-cuda-sim -- library "$stage"
export LD_LIBRARY_PATH=$stage
# Here every step is to run, however slow this machine is.
export TWINBUF_GPU_SECONDS=7200
# `cargo test` has their whole extent.
export TWINBUF_TEST_WHOLE=0
"$pack/run" --quick "$stage/out"
