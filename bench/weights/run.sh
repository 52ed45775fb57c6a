#!/bin/bash
# Models of layers in a control group with less memory than they have. Each way runs once in a round, each time cold.
#
#   bench/weights/run.sh [SECTION..] [ROUNDS]     root, fio, and a target folder on the disk that is measured
#
# layers      1.5 GiB in 512 MiB, three passes, with as much, twice and half as much compute as loading
# checkpoint  4 GiB once, with 256 MiB for the stream, beside fio
# candle      1.5 GiB into candle's tensors
#
# Without a section: all of them, and the runs go to bench/results/weights.csv.
set -euo pipefail
cd "$(dirname "$0")"
. ../../tools/group.sh
rounds=5 sections=
for word; do
  case $word in [0-9]*) rounds=$word ;; *) sections+=" $word" ;; esac
done
all=${sections:-layers checkpoint candle}
program=target/release/weights candle=target/release/candle data=target/data
features=()
[[ " $all " != *" candle "* && " $all " != *" layers "* ]] || features=(--features candle)
cargo build -q --release "${features[@]}"
mkdir -p $data
out=target/weights.csv
trap 'drop_group; rm -rf $data' EXIT
trap 'exit 1' INT TERM
load=$(cut -d' ' -f1 /proc/loadavg)
{
  field() { sed -n "0,/^$1.*: /s/^$1[^:]*: //p" /proc/cpuinfo; }
  echo "# $(field 'model name') (family $(field 'cpu family') model $(field 'model\t')), $(nproc) processors; Linux $(uname -r); $(date -u +%F); load $load before"
  echo section,case,round,way,wall_s,own_s,first_pass_s,cpu_s,disk_mib,last_pass_mib,result,peak_mib
} >$out

# model NAME LAYERS BYTES
model() {
  file=$data/$1
  [[ -e $file ]] || $program make "$file" "$2" "$3"
}

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
  model layers 24 $((64 << 20))
  # How often a weight is used for compute to take as long as loading.
  local repeats load compute
  load=$(for _ in 1 2 3; do one - - 0 512 $program load $file 3 16 160 | cut -d, -f5; done | sort | sed -n 2p)
  compute=$($program compute $file 3 16 160 | cut -d, -f2)
  repeats=$(awk "BEGIN { r = int(16 * $load / $compute + 0.5); print r < 2 ? 2 : r }")
  sed -i '/^-,/d' $out
  for ((round = 1; round <= rounds; round++)); do
    for case in equal half double; do
      local n=$repeats ways="load compute stream"
      case $case in
      equal) ways+=" resident map willneed read thread candle" ;;
      half) n=$((repeats / 2)) ;;
      double) n=$((repeats * 2)) ;;
      esac
      for way in $(shuf -e $ways); do
        local mib=512 run=$program
        [[ $way != resident ]] || mib=0
        [[ $way != candle ]] || run=$candle
        one layers $case $round $mib $run $way $file 3 $n 160
      done
    done
  done
}

checkpoint() {
  model checkpoint 64 $((64 << 20))
  for ((round = 1; round <= rounds; round++)); do
    for way in $(shuf -e load 'buffered io_uring 4' 'direct libaio 4' 'direct io_uring 16' | tr ' ' :); do
      if [[ $way == load ]]; then
        one checkpoint - $round 272 $program load $file 1 1 256
      else
        local how engine depth
        IFS=: read -r how engine depth <<<"$way"
        dd of="$file" oflag=nocache conv=notrunc,fdatasync count=0 status=none
        $program touch 1024
        # Field 9 of the terse output is the time in ms.
        fio --name=read --readonly --thread --rw=read --filename=$file --bs=4M --direct="$([[ $how == direct ]] && echo 1 || echo 0)" \
          --ioengine=$engine --iodepth=$depth \
          --output-format=terse --terse-version=3 | awk -F\; -v at="checkpoint,-,$round,fio $engine $depth $how" \
          '/^3;/ { printf "%s,%.4f,,%.4f,,%.1f,,,\n", at, $9 / 1e3, $9 / 1e3, $6 / 1024 }' | tee -a $out
      fi
    done
  done
}

candle() {
  model layers 24 $((64 << 20))
  for ((round = 1; round <= rounds; round++)); do
    for way in $(shuf -e ours load mmap); do one candle - $round 0 $candle $way $file 1 1 0; done
  done
}

for section in $all; do $section; done
[[ -n $sections ]] || cp $out ../results/weights.csv
python3 report.py "$PWD/$out"
