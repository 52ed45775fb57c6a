#!/bin/bash
# Prints the path of a compiler that can build the standard library from source (`-Zbuild-std`) where rustup can
# install neither rust-src nor targets: Debian's rustc-web and its library source, unpacked (not installed) into
# $RUSTC_WEB_HOME (default: ~/.cache/rustc-web) by the first call.
set -euo pipefail
home=${RUSTC_WEB_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/rustc-web}

if [[ ! -x $home/usr/bin/rustc ]]; then
  mkdir -p "$home/debs"
  (
    cd "$home/debs"
    apt-get -qq update >/dev/null || true # as another user than root: with the lists that are there
    # The packages that it needs are named after their versions: follow what depends on what.
    depends() { apt-cache depends rustc-web "${@:2}" | sed -n "s/.*Depends: \($1\)$/\1/p" | sort -u; }
    std=$(depends 'libstd-rust-web-[0-9.]*' libstd-rust-web-dev)
    llvm=$(depends 'libllvm[0-9]*' $std)
    apt-get -qq download rustc-web rust-web-src $std $llvm >/dev/null
    for deb in *.deb; do dpkg -x "$deb" "$home"; done
  )
  rm -r "$home/debs"
fi
cat >"$home/rustc.sh" <<END
#!/bin/bash
LD_LIBRARY_PATH=$home/usr/lib/$(uname -m)-linux-gnu exec $home/usr/bin/rustc "\$@"
END
chmod +x "$home/rustc.sh"
echo "$home/rustc.sh"
