#!/usr/bin/env bash
# Installs those of the Debian packages that are missing (as root).
#
#   tools/debian.sh PACKAGE...
set -euo pipefail
cd "$(dirname "$0")/.."
missing=()
for package; do
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
((${#missing[@]})) || exit 0
echo "installs ${missing[*]}"
# Another step may be installing too: both commands wait for its lock.
tools/retry.sh apt-get -qq -oDPkg::Lock::Timeout=600 update
DEBIAN_FRONTEND=noninteractive tools/retry.sh apt-get -qq -oDPkg::Lock::Timeout=600 install --no-install-recommends -y \
  "${missing[@]}" >/dev/null
