#!/usr/bin/env bash
# Licences, sources and duplicates among the dependencies of what is published (deny.toml), and of the command line's
# tool. Builds cargo-deny where it is missing (2 minutes of CPU time).
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(realpath -m "${CARGO_TARGET_DIR:-target}/tools")
export PATH=$tools/bin:$PATH
cargo deny --version || CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --quiet --locked cargo-deny --root "$tools"
for manifest in Cargo.toml cli/Cargo.toml; do
  cargo deny --manifest-path "$manifest" --all-features check bans licenses sources
done
