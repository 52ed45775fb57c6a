#!/usr/bin/env bash
# Licences, sources and duplicates among the dependencies of what is published (deny.toml): the crates, the command line's
# tool and the Python package. Builds cargo-deny where this version is missing (2 minutes of CPU time), and keeps it in
# $TWINBUF_TEST_TOOLS (default: ~/.cache/twinbuf-tools) for other clones.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${TWINBUF_TEST_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/twinbuf-tools}
export PATH=$tools/bin:$PATH
[[ $(cargo deny --version 2>/dev/null) == *' 0.20.2' ]] ||
  CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --quiet --locked cargo-deny@0.20.2 --root "$tools"
for manifest in Cargo.toml cli/Cargo.toml python/Cargo.toml; do
  cargo deny --manifest-path "$manifest" --all-features check bans licenses sources
done
