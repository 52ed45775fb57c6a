#!/bin/bash
# Four ranks under real launchers: together they read every record once an epoch, and none twice.
#
#   tools/ranks.sh                 under each launcher that is there; names the others
#   tools/ranks.sh LAUNCHER...     under these; fails if one is not there
#
# A LAUNCHER, and where it can be had:
#
#   openmpi    `mpirun`:         apt-get install openmpi-bin
#   mpich      `mpiexec.hydra`:  apt-get install mpich
#   torchrun   `torchrun`:       python3 -m venv target/torch && target/torch/bin/pip install torch     (5 GB)
#   slurm      `srun`:           apt-get install slurmd slurmctld slurm-client munge, and a cluster of one node
#   by-hand    no launcher:      Slurm's two variables, set by this script
#
# TORCHRUN names another torchrun. Needs cargo and python3.
set -euo pipefail
cd "$(dirname "$0")/.."

ranks=4
records=1003 # not whole batches of all ranks
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target/adapters}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

torchrun() {
  local found
  for found in "${TORCHRUN-}" target/torch/bin/torchrun "$(type -P torchrun || true)"; do
    [[ -x $found ]] && echo "$found" && return
  done
  return 1
}

there() {
  case $1 in
    openmpi) [[ $(mpirun --version 2>&1) == *"Open MPI"* ]] ;;
    mpich) type -P mpiexec.hydra >/dev/null ;;
    torchrun) torchrun >/dev/null ;;
    slurm) [[ -n $(timeout 10 sinfo --noheader 2>/dev/null) ]] ;;
    by-hand) ;;
    *) echo "wanted openmpi, mpich, torchrun, slurm or by-hand, found $1" >&2; exit 2 ;;
  esac
}

# Runs $binary in four processes; its folder is $1's.
launch() {
  local command=("$binary" "$folder/records.bin" "$folder/$1")
  case $1 in
    openmpi) timeout 120 mpirun --allow-run-as-root --oversubscribe -np $ranks "${command[@]}" ;;
    mpich) timeout 120 mpiexec.hydra -n $ranks "${command[@]}" ;;
    torchrun)
      # It asks for threads to be limited if nobody has. Standalone: at a free port.
      OMP_NUM_THREADS=1 timeout 120 "$(torchrun)" --standalone --nproc-per-node $ranks --no-python "${command[@]}" ;;
    slurm) timeout 120 srun --overcommit -n $ranks "${command[@]}" ;;
    by-hand)
      for rank in $(seq 0 $((ranks - 1))); do
        SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=$ranks "${command[@]}"
      done ;;
    nobody) "${command[@]}" ;;
  esac
}

# Whether the ranks' files in $1 have every record once.
check() {
  python3 - "$folder/$1" $ranks $records <<'PYTHON'
import collections, pathlib, sys

folder, ranks, records = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
files = sorted(folder.glob("*.txt"))
if [file.stem for file in files] != [str(rank) for rank in range(ranks)]:
    sys.exit(f"wanted one file for each of {ranks} ranks, found {[file.name for file in files]}")
orders = []
for epoch in (0, 1):
    seen = collections.Counter()
    counts, order = [], []
    for file in files:
        own = [int(line.split()[2]) for line in file.read_text().splitlines() if int(line.split()[0]) == epoch]
        seen.update(own)
        counts.append(len(own))
        order.append(own)
    missing = sorted(set(range(records)) - set(seen))
    again = sorted(record for record, times in seen.items() if times > 1)
    if missing or again or len(seen) != records:
        sys.exit(f"epoch {epoch}: {len(missing)} records missing {missing[:5]}, {len(again)} seen again {again[:5]}")
    orders.append(order)
    print(f"epoch {epoch}: {' + '.join(map(str, counts))} = {sum(counts)} of {records} records, each once")
if orders[0] == orders[1]:
    sys.exit("both epochs have the same order")
PYTHON
}

wanted=("$@")
[[ $# -gt 0 ]] || wanted=(openmpi mpich torchrun slurm by-hand)
for launcher in "${wanted[@]}"; do
  if ! there "$launcher" && [[ $# -gt 0 ]]; then
    echo "$launcher: not there; the head of $0 says where it can be had" >&2
    exit 1
  fi
done

cargo build --quiet --manifest-path adapters/ranks/Cargo.toml
binary=$CARGO_TARGET_DIR/debug/twinbuf-ranks
python3 -c "import struct, sys; sys.stdout.buffer.write(struct.pack('<${records}Q', *range($records)))" \
  >"$folder/records.bin"

# The check itself can fail: one process alone, that no launcher told that it is one of four.
unset RANK WORLD_SIZE TORCHELASTIC_RUN_ID OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMI_RANK PMI_SIZE
unset SLURM_PROCID SLURM_STEP_NUM_TASKS
mkdir "$folder/nobody"
launch nobody >/dev/null
if check nobody >/dev/null 2>&1; then
  echo "one process alone passes for $ranks: the check is blind" >&2
  exit 1
fi

for launcher in "${wanted[@]}"; do
  if ! there "$launcher"; then
    echo "== $launcher: not there; the head of $0 says where it can be had"
    continue
  fi
  case $launcher in
    openmpi) echo "== openmpi: $(mpirun --version | head -1)" ;;
    mpich) echo "== mpich: $(mpiexec.hydra --version | awk '/Version:/ { print "HYDRA", $2 }')" ;;
    torchrun) echo "== torchrun: $(torchrun)" ;;
    slurm) echo "== slurm: $(srun --version)" ;;
    by-hand) echo "== by-hand: Slurm's variables, and no launcher" ;;
  esac
  mkdir "$folder/$launcher"
  launch "$launcher"
  check "$launcher"
done
