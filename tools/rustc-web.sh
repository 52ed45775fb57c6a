#!/bin/bash
# Prints the path of a compiler that can build the standard library from source (`-Zbuild-std`) where rustup can
# install neither rust-src nor targets: Debian's rustc-web and its library source. The first call unpacks them, and
# what they need of packages that are not installed, into $RUSTC_WEB_HOME (default: ~/.cache/rustc-web). Nothing is
# installed. Every call compiles and runs a program before it prints the path.
#
#   tools/rustc-web.sh [VERSION]   the newest, or that version where Debian has it (1.85), into a folder named after it
set -euo pipefail
version=${1-}
retry=$(realpath "$(dirname "$0")/retry.sh")
home=$(realpath -m "${RUSTC_WEB_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/rustc-web}${1:+-$1}")

# unpack FOLDER: the packages of the compiler, and a script that starts it.
unpack() {
  mkdir "$1/debs"
  (
    cd "$1/debs"
    # As another user than root: with the lists that are there.
    ((UID)) || "$retry" apt-get -qq update >/dev/null || true
    printf 'Package: /rustc?-web/\nPin: version %s\nPin-Priority: 1001\n' "$version*" >pin
    apt=(-qq "-oDir::Etc::Preferences=$PWD/pin" -oAPT::Sandbox::User=root)
    # Their names hold their versions (libstd-rust-web-1.96, libllvm22): apt knows them. What is installed is left
    # out, but for the compiler's parts: it looks for its library next to itself.
    comm -23 <(apt-cache "${apt[@]}" depends --recurse --important rustc-web rust-web-src | grep '^[a-z]' | sort -u) \
      <(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' | sed -n 's/^ii  *//p' | grep -v rust | sort -u) |
      xargs "$retry" apt-get "${apt[@]}" download >/dev/null
    for deb in *.deb; do dpkg -x "$deb" ..; done
  )
  rm -r "$1/debs"
  cat >"$1/rustc.sh" <<'END'
#!/bin/bash
home=$(dirname "$0")
LD_LIBRARY_PATH=$home/usr/lib/$(uname -m)-linux-gnu exec "$home/usr/bin/rustc" "$@"
END
  chmod +x "$1/rustc.sh"
}

# Next to its place first, then renamed: a folder at its place is whole.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch" "${beside-}"' EXIT
if [[ ! -e $home ]]; then
  mkdir -p "$(dirname "$home")"
  beside=$(mktemp -d "$home.XXXXXX")
  unpack "$beside" >&2
  chmod 755 "$beside"
  mv -T "$beside" "$home" 2>/dev/null || true # another call was faster: its folder is taken
fi

if ! { "$home/rustc.sh" -o "$scratch/program" - <<<'fn main() {}' && "$scratch/program"; } >&2 ||
  [[ ! -f $("$home/rustc.sh" --print sysroot)/lib/rustlib/src/rust/library/std/src/lib.rs ]]; then
  echo "$home: this compiler finds no linker, no std or no source of std; remove the folder to unpack it anew" >&2
  exit 1
fi
echo "$home/rustc.sh"
