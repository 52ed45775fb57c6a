#!/usr/bin/env bash
# Runs a command that downloads, three times at most: networks and mirrors fail now and then.
#
#   tools/retry.sh COMMAND...
set -uo pipefail
for pause in 10 60 ''; do
  "$@" && exit
  status=$?
  [ -n "$pause" ] || break
  echo "failed with $status, again in $pause s: $*" >&2
  sleep "$pause"
done
exit "$status"
