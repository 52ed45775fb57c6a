#!/usr/bin/env bash
# Runs the litmus tests under herd7 and prints the table of results. Files and results are kept in target/litmus: a test
# that has a result and has not changed is not run again.
#
#   HERD=/path/to/herd7 HERDLIB=/its/libdir tests/litmus/run.sh [PATTERN] > tests/litmus/table.txt
#
# JOBS (default 1) runs at a time; LIMIT (default 300) seconds of processor time for one; a run over the limit reads `t` in
# the table.
set -euo pipefail
: "${HERD:?path of herd7}" "${HERDLIB:?its libdir}"
export HERD HERDLIB LIMIT="${LIMIT:-300}"
here=$(cd "$(dirname "$0")" && pwd)
out=$here/../../target/litmus
mkdir -p "$out"
cd "$out"

# C++20 has shorter release sequences than RC11: only read-modify-writes continue one, not the stores of the same
# thread. The second model allows load buffering as well. Both are made of herd7's own RC11.
changed() { # new old: the patch must have found its line
  if cmp -s "$1" "$2"; then echo "rc11.cat is not the one that this script patches" >&2; exit 1; fi
}
sed 's/^let rs = \[W\]; (sb & loc)?; /let rs = /' "$HERDLIB/rc11.cat" > c20.cat
changed c20.cat "$HERDLIB/rc11.cat"
sed '/^acyclic (sb | rf) as no-thin-air/d' c20.cat > c20-lb.cat
changed c20-lb.cat c20.cat

one() { # file
  local file=$1 model models text verdict
  case $file in
    */C/*) models='rc11 c20 c20-lb' ;;
    */RISCV/*) models=riscv ;;
    */PPC/*) models=ppc ;;
    *) models=aarch64 ;;
  esac
  for model in $models; do
    local result=$file.$model
    if [ "$result" -nt "$file" ] && ! grep -q '^[Et]' "$result"; then continue; fi
    # The machines: until the bad outcome is found. C: all executions, for the races.
    local fast=(-speedcheck fast)
    if [[ $models != "$model" ]]; then fast=(); fi
    if text=$(ulimit -t "$LIMIT" && exec "$HERD" -set-libdir "$HERDLIB" -I . -optace true "${fast[@]}" -model "$model.cat" "$file" 2>&1); then
      case $text in
        *Observation*' Never '*) verdict=- ;;
        *Observation*) verdict=A ;;
        *) verdict=E ;;
      esac
      if [[ $models != "$model" ]] && grep -qE '^(Flag|Undef)' <<< "$text"; then
        case $verdict in -) verdict=race ;; A) verdict=A+race ;; esac
      fi
    elif [ $? -gt 128 ]; then
      verdict=t
    else
      verdict=E
    fi
    if [ $verdict = E ]; then printf '%s %s\n%s\n' "$file" "$model" "$text" | head -n 6 >&2; fi
    echo $verdict > "$result"
  done
}
export -f one
python3 "$here/gen.py" "$out" "${1:-}" | nice xargs -P "${JOBS:-1}" -I{} bash -c 'one {}'
python3 "$here/table.py" "$out" "${1:-}"
