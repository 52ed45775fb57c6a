#!/usr/bin/env bash
# Does all of `cargo publish` but the upload, for the published crates in order, and builds each package by itself, as a
# user of crates.io would get it. Fails on a warning. Checks that the licences in the crates' folders are the
# repository's, and that PyPI's README has no relative link. (`ci/files.py` checks where relative links lead.)
set -euo pipefail
cd "$(dirname "$0")/.."
for folder in core mmap cuda cli python/licenses; do
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
cargo publish --dry-run --workspace --exclude twinbuf-loom --exclude twinbuf-shuttle --exclude twinbuf-shuttle-pipe --exclude twinbuf-cuda-sim \
  --exclude twinbuf-capi --exclude twinbuf-testing \
  --allow-dirty --target-dir $target "$@" 2>&1 | tee $target/log
# In a workspace of its own, so that cargo does not know the others without this.
cargo package --manifest-path cli/Cargo.toml --allow-dirty --target-dir $target --config "patch.crates-io.twinbuf.path='$PWD'" \
  --config "patch.crates-io.twinbuf-core.path='$PWD/core'" --config "patch.crates-io.twinbuf-mmap.path='$PWD/mmap'" 2>&1 |
  tee -a $target/log
if grep '^warning' $target/log | grep -v 'aborting upload due to dry run'; then
  exit 1
fi
rm -rf $target
