#!/bin/bash
# Models of 24 layers, cold: each way runs once in a round.
#
#   bench/weights/run.sh [SECTION..] [ROUNDS]     root, and a target folder on the disk that is measured
#
# layers      1.5 GiB in a control group of 512 MiB, three passes, with as much compute as loading
# candle      1.5 GiB into candle's tensors, without a limit
#
# Without a section: both, and the runs go to bench/results/weights.csv; else to bench/weights/target/weights.csv.
set -euo pipefail
cd "$(dirname "$0")"
. ../../tools/group.sh
rounds=5 sections=
for word; do
  case $word in [0-9]*) rounds=$word ;; *) sections+=" $word" ;; esac
done
all=${sections:-layers candle}
program=target/release/weights candle=target/release/candle data=target/data
cargo build -q --release --features candle
out=target/weights.csv
trap 'drop_group; rm -rf $data' EXIT
trap 'exit 1' INT TERM
mkdir -p $data
file=$data/layers
$program make $file 24 $((64 << 20))
load=$(cut -d' ' -f1 /proc/loadavg)
{
  field() { sed -n "0,/^$1.*: /s/^$1[^:]*: //p" /proc/cpuinfo; }
  echo "# $(field 'model name') (family $(field 'cpu family') model $(field 'model\t')), $(nproc) processors; Linux $(uname -r); $(date -u +%F); load $load before"
  echo section,case,round,way,wall_s,first_pass_s,cpu_s,disk_mib,last_pass_mib,result,peak_mib
} >$out

# one SECTION CASE ROUND GROUP_MIB PROGRAM ARGS..: one cold run, in a group unless GROUP_MIB is 0.
one() {
  local section=$1 case=$2 round=$3 mib=$4 peak_mib=
  shift 4
  # Cached pages stay with the group that read them first.
  dd of="$file" oflag=nocache conv=notrunc,fdatasync count=0 status=none
  # A virtual machine returns free memory to its host, and to get it back takes longer than a read.
  $program touch 3072
  local line
  if ((mib)); then
    make_group "$mib" || { echo "$0: cannot make a control group" >&2; exit 1; }
    line=$(in_group "$@" 2>/dev/null)
    peak_mib=$(($(cat "$peak") >> 20))
    drop_group
  else
    line=$("$@" 2>/dev/null)
  fi
  echo "$section,$case,$round,$line,$peak_mib" | tee -a $out
}

layers() {
  # How often a weight is used for compute to take as long as loading.
  local repeats load compute
  load=$(for _ in 1 2 3; do one - - 0 512 $program load $file 3 16 160 | cut -d, -f5; done | sort | sed -n 2p)
  compute=$($program compute $file 3 16 160 | cut -d, -f2)
  repeats=$(awk "BEGIN { r = int(16 * $load / $compute + 0.5); print r < 2 ? 2 : r }")
  sed -i '/^-,/d' $out
  for ((round = 1; round <= rounds; round++)); do
    for way in $(shuf -e load compute stream map willneed read thread candle); do
      local run=$program
      [[ $way != candle ]] || run=$candle
      one layers equal $round 512 $run $way $file 3 $repeats 160
    done
  done
}

candle() {
  for ((round = 1; round <= rounds; round++)); do
    for way in $(shuf -e ours load mmap); do one candle - $round 0 $candle $way $file 1 1 0; done
  done
}

for section in $all; do $section; done
# All ways of a section compute the same, but for those of the layers that load or compute alone.
for section in $all; do
  results=$(awk -F, -v of="$section" '$1 == of && (of == "candle" || $4 !~ /^(load|compute)$/) { print $10 }' $out | sort -u)
  [[ $results =~ ^[0-9a-f]{8}$ ]] || { echo "$0: $section: different results: $results" >&2; exit 1; }
done
[[ -n $sections ]] || cp $out ../results/weights.csv
