#!/usr/bin/env bash
# The Python package: lints, types, its tests with the real numpy and torch, the wheel, and the source package. Makes
# virtual environments in target/ and keeps them; the first run downloads torch.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --manifest-path python/Cargo.toml --check
cargo clippy --manifest-path python/Cargo.toml --all-targets -- -D warnings

venv=$PWD/target/python
[ -x "$venv/bin/pip" ] || python3 -m venv --clear "$venv"
export PIP_CACHE_DIR=$PWD/target/pip PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
# pip keeps all that it downloads in its temporary folder, and that of the system may lie in memory.
mkdir -p target/tmp
TMPDIR=$PWD/target/tmp tools/retry.sh "$venv/bin/pip" install --no-compile \
  maturin ziglang numpy torch torchdata safetensors pytest mypy pyright ruff abi3audit auditwheel \
  lightning transformers accelerate flax tqdm 'ray[train]'
PATH=$venv/bin:$PATH
unset VIRTUAL_ENV

ruff check python
ruff format --check python
(cd python && mypy)

# For any Linux with a glibc of 2.17 or later: zig links with that version's symbols.
rm -rf target/wheels
CARGO_TARGET_DIR=$PWD/python/target maturin build --quiet --release --locked --zig --compatibility manylinux_2_17 \
  --manifest-path python/Cargo.toml --out target/wheels
wheel=$(echo target/wheels/*.whl)
# Not through a pipe: `grep -q` closes it at the first match, and a program that still writes then fails.
grep -q 'manylinux_2_17_x86_64\|manylinux_2_17_aarch64' <<<"$(auditwheel show "$wheel")"
unzip -l "$wheel" '*/licenses/LICENSE-MIT' >/dev/null
pip install --force-reinstall --no-deps "$wheel"

# Without Rust and without a compiler.
bare=$PWD/target/bare
[ -x "$bare/bin/pip" ] || python3 -m venv --clear "$bare"
"$bare/bin/pip" install --force-reinstall "$wheel" 'maturin>=1.9,<2'
env -i PATH=/nonexistent "$bare/bin/python" -c 'import doctest, twinbuf; raise SystemExit(doctest.testmod(twinbuf)[0])'
ci/sdist.sh target/wheels
if message=$(env -i PATH=/nonexistent "$bare/bin/pip" install --no-build-isolation target/wheels/*.tar.gz 2>&1); then
  echo "ci/python.sh: a build without Rust" >&2
  exit 1
fi
grep -q '^ *twinbuf: no wheel fits this system' <<<"$message"
# All that it is built from is in it.
(
  rm -rf target/source && mkdir -p target/source
  tar -xzf target/wheels/*.tar.gz -C target/source
  cd target/source/twinbuf-*/
  CARGO_HOME=$PWD/../home cargo metadata --offline --locked --quiet --format-version 1 --manifest-path python/Cargo.toml >/dev/null
)
rm -rf target/source
# From another folder: this tests the installed package and not the sources.
root=$PWD
cd "$venv"
python -m mypy.stubtest twinbuf._twinbuf --allowlist "$root/ci/python-stubs.txt"
python -m pytest -q --doctest-modules --pyargs twinbuf -p no:cacheprovider \
  -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
python -m pytest -q -c "$root/python/pyproject.toml" --rootdir "$root/python" -p no:cacheprovider \
  --basetemp "$venv/tmp" "$root/python/tests"
abi3audit --strict --assume-minimum-abi3 3.11 lib/python3*/site-packages/twinbuf/_twinbuf.abi3.so
