#!/usr/bin/env bash
# Packs the Python package's source with all that it is built from, to build it without a network:
#
#     ci/sdist.sh FOLDER
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd python && maturin sdist --out "$work" >&2)
tar -xzf "$work"/twinbuf-*.tar.gz -C "$work"
source=$(echo "$work"/twinbuf-*/)
mkdir "$source/.cargo"
cargo vendor --quiet --locked --manifest-path "$source/python/Cargo.toml" "$source/vendor" >/dev/null
printf '[source.crates-io]\nreplace-with = "vendored"\n[source.vendored]\ndirectory = "vendor"\n' >"$source/.cargo/config.toml"
# The page at its root is that of the crate.
sed -i 's|^readme = .*|readme = "python/README.md"|' "$source/pyproject.toml"
mkdir -p "$out"
tar -czf "$out/$(basename "$source").tar.gz" --owner=0 --group=0 --sort=name -C "$work" "$(basename "$source")"
