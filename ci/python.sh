#!/usr/bin/env bash
# The Python package: lints, types, its tests with the real numpy and torch, and the wheel. Makes a virtual environment
# in target/ and keeps it; the first run downloads torch.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --manifest-path python/Cargo.toml --check
cargo clippy --manifest-path python/Cargo.toml --all-targets -- -D warnings

venv=$PWD/target/python
[ -x "$venv/bin/pip" ] || python3 -m venv --clear "$venv"
export PIP_CACHE_DIR=$PWD/target/pip PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
# pip keeps all that it downloads in its temporary folder, and that of the system may lie in memory.
mkdir -p target/tmp
TMPDIR=$PWD/target/tmp tools/retry.sh "$venv/bin/pip" install \
  maturin numpy torch torchdata safetensors pytest mypy ruff abi3audit
PATH=$venv/bin:$PATH
unset VIRTUAL_ENV

ruff check python
ruff format --check python
(cd python && mypy)

CARGO_TARGET_DIR=$PWD/python/target pip install --no-build-isolation --force-reinstall --no-deps ./python
# From another folder, so that the installed package is tested and not the sources.
root=$PWD
cd "$venv"
python -m mypy.stubtest twinbuf._twinbuf --allowlist "$root/ci/python-stubs.txt"
python -m pytest -q --doctest-modules --pyargs twinbuf -p no:cacheprovider \
  -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
python -m pytest -q -c "$root/python/pyproject.toml" --rootdir "$root/python" -p no:cacheprovider \
  --basetemp "$venv/tmp" "$root/python/tests"
abi3audit --strict --assume-minimum-abi3 3.11 lib/python3*/site-packages/twinbuf/_twinbuf.abi3.so
