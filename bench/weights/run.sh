#!/bin/bash
# A model of layers in a control group with a third of its memory: how long three passes take, one layer computed on while the
# next one is read, and how long they take in other ways. Each way once in a round, each round cold.
#
#   bench/weights/run.sh [ROUNDS]     root, and a target folder on the disk that is measured
#
# LAYERS, LAYER_MIB, GROUP_MIB (the group's limit), LIMIT_MIB (the stream's), PASSES, REPEATS (how often each weight is used:
# what makes computing as long as loading), WAYS.
set -euo pipefail
cd "$(dirname "$0")"
. ../../tools/group.sh
rounds=${1:-5}
layers=${LAYERS:-24} mib=${LAYER_MIB:-64} group_mib=${GROUP_MIB:-512} limit_mib=${LIMIT_MIB:-160} passes=${PASSES:-3}
repeats=${REPEATS:-16} ways=${WAYS:-load compute stream map willneed serial}
program=target/release/weights
[[ -x $program ]] || cargo build -q --release
data=target/data/model-$layers-$mib
mkdir -p target/data
[[ -e $data ]] || "$program" make "$data" "$layers" "$mib"
trap drop_group EXIT
trap 'exit 1' INT TERM

for ((round = 1; round <= rounds; round++)); do
  for way in $(shuf -e $ways); do
    # Cached pages stay with the group that read them first.
    dd of="$data" oflag=nocache conv=notrunc,fdatasync count=0 status=none
    make_group "$group_mib" || { echo "$0: cannot make a control group" >&2; exit 1; }
    out=$(in_group "$program" "$way" "$data" "$passes" "$repeats" "$limit_mib" 2>&1 | tr '\n' ' ')
    echo "round $round ${out}peak_mib $(($(cat "$peak") >> 20))"
    drop_group
  done
done
