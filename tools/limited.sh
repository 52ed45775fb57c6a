#!/bin/bash
# Reads epochs of files that are smaller and larger than the memory of a control group, and prints what came from disk.
#
#   tools/limited.sh [MEBIBYTES [MODE...]]    by default 256, and modes auto and pread; root, and a target folder on a disk
#
# For each file: its size by the limit, bytes of a record, the order, the mode, and for each of three epochs the seconds and
# the share of the data that came from disk; then what the reader chose.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/group.sh
mib=${1:-256}
shift || true
modes=${*:-auto pread}
target=${CARGO_TARGET_DIR:-$PWD/target}
program=$target/release/examples/read_all
# Root may have no cargo: then it takes what a user has built.
[[ -x $program && -z $(type -P cargo) ]] || cargo build -q --release -p twinbuf-mmap --example read_all
make_data "$target"

for percent in ${SIZES:-30 60 85 150 300}; do
  head -c "$((mib * percent / 100))M" /dev/urandom >"$data/file"
  sync "$data/file"
  for record in 3072 153600; do
    for order in "--shuffle 1" "--shuffle $((1048576 / record)) --window ${WINDOW:-16}"; do
      for mode in $modes; do
        # Cached pages stay with the group that read them first.
        dd of="$data/file" oflag=nocache conv=notrunc,fdatasync count=0 status=none
        make_group "$mib" || { echo "$0: cannot make a control group" >&2; exit 1; }
        out=$(in_group "$program" --mode "$mode" --record "$record" \
          --batch $((record < 10000 ? 128 : 4)) $order --epochs 3 "$data/file")
        printf '%4d %% %7d %-24s %-6s' "$percent" "$record" "$order" "$mode"
        awk '/^bytes/ { printf "  %6.2f s %5.3f", $4, $6 / $2 } END { printf "   " }' <<<"$out"
        head -1 <<<"$out"
        drop_group
      done
    done
  done
done
