#!/usr/bin/env bash
# Packs the Python package's source with all that it is built from, so that it builds without a network:
#
#     ci/sdist.sh FOLDER [URL]
#
# URL is the repository's address: links in the description become absolute, and the package has project URLs.
set -euo pipefail
out=$(realpath -m "$1") url=${2-}
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd python && maturin sdist --out "$work" >&2)
tar -xzf "$work"/twinbuf-*.tar.gz -C "$work"
source=$(echo "$work"/twinbuf-*/)
mkdir "$source/.cargo"
cargo vendor --quiet --locked --manifest-path "$source/python/Cargo.toml" "$source/vendor" >/dev/null
printf '[source.crates-io]\nreplace-with = "vendored"\n[source.vendored]\ndirectory = "vendor"\n' >"$source/.cargo/config.toml"
[ -z "$url" ] || python3 ci/urls.py "$url" "$source"
mkdir -p "$out"
tar -czf "$out/$(basename "$source").tar.gz" --owner=0 --group=0 --sort=name -C "$work" "$(basename "$source")"
