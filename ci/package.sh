#!/usr/bin/env bash
# Does all of `cargo publish` but the upload, for the published crates in order, and builds each package by itself, as a
# user of crates.io would get it. Fails on a warning. Then runs the README's program, `twinbuf` and `cuda-sim` in a folder that
# has nothing but the packages. Checks that the licences in the crates' folders are the repository's, and that PyPI's README
# has no relative link. (`ci/files.py` checks where relative links lead.)
set -euo pipefail
cd "$(dirname "$0")/.."
for folder in core mmap cuda cuda/sim cli python/licenses; do
  cmp LICENSE-MIT "$folder/LICENSE-MIT"
  cmp LICENSE-APACHE "$folder/LICENSE-APACHE"
done
# crates.io resolves a relative link by the field `repository`; PyPI does not.
if grep -nE '\]\((\.|/|[A-Za-z0-9_/.-]+\))' python/README.md; then
  echo "these links are not absolute" >&2
  exit 1
fi
# cargo takes what it has unpacked or built of a package for the same as long as folder and version are, as if it were
# published: without this a second run would build the others with the sources of the first.
target=target/packages
rm -rf $target "${CARGO_HOME:-$HOME/.cargo}"/registry/src/-*/twinbuf-*
mkdir -p $target
# All of the workspace but what has `publish = false`: the models compile core's source from its own folder.
published=(--workspace --exclude twinbuf-loom --exclude twinbuf-shuttle --exclude twinbuf-shuttle-pipe --exclude twinbuf-capi
  --exclude twinbuf-testing --allow-dirty --target-dir $target)
cargo publish --dry-run "${published[@]}" "$@" 2>&1 | tee $target/log
# A dry run keeps no package.
cargo package --no-verify --quiet "${published[@]}"
# In a workspace of its own, so that cargo does not know the others without this. It is built below.
cargo package --no-verify --manifest-path cli/Cargo.toml --allow-dirty --target-dir $target --config "patch.crates-io.twinbuf.path='$PWD'" \
  --config "patch.crates-io.twinbuf-core.path='$PWD/core'" --config "patch.crates-io.twinbuf-mmap.path='$PWD/mmap'" 2>&1 |
  tee -a $target/log
if grep '^warning' $target/log | grep -v 'aborting upload due to dry run'; then
  exit 1
fi

elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
for crate in $target/package/*.crate; do
  tar -xzf "$crate" -C "$elsewhere"
done
rm -rf $target
sed -n '/^```rust,no_run$/,/^```$/p' README.md | grep -v '^```' >"$elsewhere/main.rs"
# What cargo has downloaded for the packages is enough; nothing else of this machine's is found.
export CARGO_HOME=${CARGO_HOME:-$HOME/.cargo} RUSTUP_HOME=${RUSTUP_HOME:-$HOME/.rustup} HOME=$elsewhere CARGO_NET_OFFLINE=true
export CARGO_TARGET_DIR=$elsewhere/target
cd "$elsewhere"
patch=()
for crate in twinbuf-core-* twinbuf-mmap-* twinbuf-cuda-[0-9]* twinbuf-[0-9]*; do
  patch+=(--config "patch.crates-io.${crate%%-[0-9]*}.path='$elsewhere/$crate'")
done
cargo new --quiet --name hello hello
mv main.rs hello/src
echo 'twinbuf = "0"' >>hello/Cargo.toml
python3 -c '
header = "{\"descr\": \"<f4\", \"fortran_order\": False, \"shape\": (1024, 8), }".ljust(117) + "\n"
open("train.npy", "wb").write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(1024 * 32))'
cargo run --quiet "${patch[@]}" --manifest-path hello/Cargo.toml
cargo install --quiet --debug "${patch[@]}" --root tools --path twinbuf-cli-*/
cargo install --quiet --debug --root tools --path twinbuf-cuda-sim-*/
tools/bin/twinbuf inspect train.npy
# A program alone, and no variable that could lead it elsewhere.
mv tools/bin/cuda-sim .
rm -rf tools target
said=$(env -i PATH=/usr/local/bin:/usr/bin:/bin ./cuda-sim run --seeds 3 -- python3 twinbuf-cuda-sim-*/examples/race.py 2>&1) && status=0 || status=$?
if [ "$status" != 1 ] || [[ $said != *"3 of 3 seeds"*"host write (write, the host) is not ordered after h2d (read"* ]]; then
  printf 'cuda-sim, installed: wanted exit code 1 and a host write, found %s:\n%s\n' "$status" "$said" >&2
  exit 1
fi
echo "the packages alone: the README's program, twinbuf and cuda-sim run"
