#!/usr/bin/env bash
# Packs the published crates and builds each package by itself, as a user of crates.io would get it. Checks that the
# licences in the crates' folders are the repository's, and that no README links out of its package.
set -euo pipefail
cd "$(dirname "$0")/.."
# Links of the Python package are absolute.
if grep -nE '\]\((\.\.|/)' python/README.md; then
  exit 1
fi
cmp LICENSE-MIT python/licenses/LICENSE-MIT
cmp LICENSE-APACHE python/licenses/LICENSE-APACHE
for crate in core mmap cuda; do
  cmp LICENSE-MIT "$crate/LICENSE-MIT"
  cmp LICENSE-APACHE "$crate/LICENSE-APACHE"
  if grep -nE '\]\((\.\.|/)' "$crate/README.md"; then
    echo "$crate/README.md: this link leads out of the package" >&2
    exit 1
  fi
done
# cargo takes what it has unpacked or built of a package for the same as long as folder and version are, as if it were
# published: without this a second run would build the others with the sources of the first.
target=target/packages
rm -rf $target "${CARGO_HOME:-$HOME/.cargo}"/registry/src/-*/twinbuf-*
# All of the workspace but what has `publish = false`: the models compile core's source from its own folder.
cargo package --workspace --exclude twinbuf-loom --exclude twinbuf-shuttle --exclude twinbuf-cuda-sim --allow-dirty \
  --target-dir $target "$@"
rm -rf $target
