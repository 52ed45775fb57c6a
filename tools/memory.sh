#!/bin/bash
# Reads a sparse file far larger than the memory allowed for it, in every way, and prints time and memory.
#
#   tools/memory.sh [GIBIBYTES [MEBIBYTES]]      a file of 20 GiB in 256 MiB of memory, by default
#
# The limit is a control group's, without swapping. It counts the page cache too, and takes root, or systemd. Where there is
# neither, it is `ulimit -d`, which counts the process's own memory alone.
# Holes need no disk: the times are those of the kernel and of the copies. `cpu` is that of all processors, and not
# disturbed as much by other programs.
#
# VmHWM is the most that the process had resident, mapped pages of the file included. `group` is the most that the group
# had at any time, page cache included; not by systemd. The run fails if one of them is killed.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/group.sh
gib=${1:-20} mib=${2:-256}
target=${CARGO_TARGET_DIR:-$PWD/target}
cargo build -q --release -p twinbuf-mmap --example read_all
program=$target/release/examples/read_all
make_data "$target"

# Limits the memory, and sets `how`.
limit() {
  if make_group "$mib"; then
    return
  elif systemd-run -q --scope -p MemoryMax="${mib}M" -p MemorySwapMax=0 true 2>/dev/null; then
    how="systemd-run"
  else
    how="ulimit -d, without the page cache"
  fi
}

# Runs a command inside the limit.
inside() {
  case $how in
    cgroup*) in_group "$@" ;;
    systemd-run) systemd-run -q --scope -p MemoryMax="${mib}M" -p MemorySwapMax=0 "$@" ;;
    *) (ulimit -d $((mib << 10)); exec "$@") ;;
  esac
}

TIMEFORMAT="cpu %U %S"
echo "mode     hints seconds      cpu      VmHWM      group  of $mib MiB, for $gib GiB"
for mode in auto pread direct; do
  for hints in "" --no-hints; do
    # Another group and another file each time: cached pages stay with the group that read them first.
    limit
    truncate -s "${gib}G" "$data/sparse"
    out=$({ time inside "$program" --mode $mode $hints "$data/sparse"; } 2>&1) || {
      echo "$out" >&2
      exit 1
    }
    grep -q "^bytes $((gib << 30)) " <<<"$out"
    seconds=$(awk '/^bytes/ { print $4 }' <<<"$out")
    cpu=$(awk '/^cpu/ { printf "%.2f", $2 + $3 }' <<<"$out")
    hwm=$(awk '/^VmHWM/ { printf "%.0f MiB", $2 / 1024 }' <<<"$out")
    most=-
    [[ -z $group ]] || most=$(awk '{ printf "%.0f MiB", $1 / 1048576 }' "$peak" 2>/dev/null || echo "-")
    printf '%-8s %-5s %7s %8s %10s %10s  %s\n' \
      $mode "${hints:+no}" "$seconds" "$cpu" "$hwm" "$most" "$how"
    rm "$data/sparse"
    drop_group
  done
done
