#!/bin/sh
# Measures these sections and writes the tables and pictures of the READMEs anew, in 41 minutes and the time to build.
# The machine should do nothing else meanwhile.
#
#   bench/run.sh                        handoff disk grid loaders train weights
#   bench/run.sh disk grid              these sections alone
#   bench/run.sh --quick [SECTION..]    does it work? Shorter, without weights; figures go to bench/target/quick
#
# For loaders, PYTHON=PATH is an interpreter that has the package twinbuf and what bench/python/requirements.txt names.
# Without it an environment is made in bench/target/python (6 GB, because of PyTorch). Libraries that it lacks are left out.
set -eu
cd "$(dirname "$0")/.."
out=bench/results quick= rounds=20
if [ "${1-}" = --quick ]; then
    shift
    out=bench/target/quick quick=--quick rounds=4
fi
[ $# -gt 0 ] || set -- handoff disk grid loaders train weights
for section; do
    case $section in
    handoff | disk | grid | loaders | train | weights) ;;
    *) echo "bench/run.sh: no such section: $section" >&2 && exit 2 ;;
    esac
done
mkdir -p "$out"

wanted() {
    for name; do
        case " $sections " in *" $name "*) return 0 ;; esac
    done
    return 1
}
sections=$*

# All but weights is built before anything is measured.
if wanted loaders && [ -z "${PYTHON-}" ]; then
    PYTHON=bench/target/python/bin/python
    if [ ! -e bench/target/python/whole ]; then
        # dataloader-rs needs Python 3.13. A name may stand for a version that is not chosen (pyenv).
        for python in python3.13 ~/.pyenv/versions/3.13.*/bin/python python3; do
            "$python" --version >/dev/null 2>&1 && break
        done
        "$python" -m venv bench/target/python
        grep '==' bench/python/requirements.txt | while read -r package; do
            "$PYTHON" -m pip install -q "$package" || echo "bench/run.sh: left out: $package" >&2
        done
        touch bench/target/python/whole
    fi
    # As it is now.
    "$PYTHON" -m pip install -q --force-reinstall --no-deps ./python
fi
build() { cargo build --quiet --release --locked "$@"; }
if wanted handoff; then build --manifest-path bench/handoff/Cargo.toml --bin handoff; fi
if wanted disk grid; then build --manifest-path bench/disk/Cargo.toml; fi
if wanted loaders; then build --manifest-path bench/loaders/Cargo.toml; fi
if wanted train; then build --example train; fi

# Gigabytes that are quickly made again.
trap 'rm -rf bench/disk/target/data bench/loaders/target/data target/twinbuf/data' EXIT
trap 'exit 1' INT TERM
disk=bench/disk/target/release/disk loaders=bench/loaders/target/release/loaders
measure() {
    case $1 in
    handoff) bench/handoff/target/release/handoff $quick --rounds $rounds --out $out ;;
    disk) $disk all $quick --out $out ;;
    grid) $disk scaling --rounds 5 --minutes 14 $quick --out $out ;;
    loaders) $loaders same peers $quick --minutes 24 --python "$PYTHON" --out $out ;;
    train)
        {
            grep -m1 '^model name' /proc/cpuinfo | sed "s/.*: \(.*\)/$(nproc) vCPU of an \1, /" | tr -d '\n'
            echo "family $(sed -n 's/^cpu family.*: //p' /proc/cpuinfo | head -1)," \
                "Linux $(uname -r | cut -d. -f1-2), $(date -u +%F)"
            target/release/examples/train
        } | tee $out/train.txt
        [ -n "$quick" ] || python3 bench/timeline.py
        ;;
    # It has no shorter form.
    weights) [ -n "$quick" ] || bench/weights/run.sh ;;
    esac
}
failed=
for section; do
    started=$(date +%s)
    # What one of them lacks does not keep the others from being measured.
    measure "$section" || failed="$failed $section"
    echo "bench/run.sh: $section took $(($(date +%s) - started)) s"
done
if [ -z "$quick" ]; then
    python3 bench/tables.py
    python3 bench/pictures.py
fi
if [ -n "$failed" ]; then
    echo "bench/run.sh: failed:$failed" >&2
    exit 1
fi
