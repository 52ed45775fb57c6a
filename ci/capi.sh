#!/usr/bin/env bash
# The C library: its header is current, its README shows read.c as it is, C under AddressSanitizer (with its leak
# check), and the same batches and the same loss from C, Zig and Rust, in both ranks, as in capi/examples/expected.txt,
# which python/tests/test_capi.py compares too.
#
#   ci/capi.sh            checks
#   ci/capi.sh --write    makes the header and the README's program anew
#
# Builds cbindgen where it is missing (2 minutes of CPU time). Zig comes from PyPI, and builds its translator of C at its first
# use.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR=$target PATH=$target/tools/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
out=$target/capi
mkdir -p "$out"

cbindgen --version 2>/dev/null || CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --quiet --locked cbindgen@0.29.4 --root "$target/tools"
header=$out/twinbuf.h
(cd capi && cbindgen --quiet --config cbindgen.toml --crate twinbuf-capi --output "$header")
[ "${1:-}" != --write ] || cp "$header" capi/include/twinbuf.h
diff -u capi/include/twinbuf.h "$header" || {
  echo "capi/include/twinbuf.h is not what capi/src makes; if that is meant: ci/capi.sh --write" >&2
  exit 1
}
python3 - "$@" <<'PYTHON'
import re, sys
from pathlib import Path

readme = Path("capi/README.md")
found = readme.read_text(encoding="utf8")


def shown(block):
    program = Path("capi/examples", block[3]).read_text(encoding="utf8")
    return f"{block[1]}```{block[2]}\n{program}```\n"


wanted, count = re.subn(r"(<!-- program (\w+) (\S+) -->\n)```.*?\n```\n", shown, found, flags=re.S)
if "--write" in sys.argv:
    readme.write_text(wanted, encoding="utf8")
elif (wanted, count) != (found, 1):
    sys.exit("capi/README.md does not show capi/examples/read.c: ci/capi.sh --write")
for program in ("read.c", "trainer.zig", "trainer.rs"):
    lines = len(Path("capi/examples", program).read_text(encoding="utf8").splitlines())
    if lines > 80:
        sys.exit(f"capi/examples/{program}: wanted at most 80 lines, found {lines}")
PYTHON

cargo test --quiet --package twinbuf-capi
cargo build --quiet --package twinbuf-capi --lib --example trainer
python3 capi/examples/data.py "$out/data.bin"

for program in capi/examples/read.c capi/tests/misuse.c; do
  cc -std=c11 -Wall -Wextra -Werror -O1 -g -fsanitize=address -I capi/include "$program" "$target/debug/libtwinbuf_capi.a" \
    -lpthread -ldl -lm -o "$out/$(basename "$program" .c)"
done
echo '#include <twinbuf.h>' | c++ -Wall -Wextra -Werror -I capi/include -fsyntax-only -x c++ -
rm -rf "$out/files" && mkdir "$out/files"
"$out/misuse" "$out/files"

venv=$out/venv
[ -x "$venv/bin/pip" ] || python3 -m venv --clear "$venv"
tools/retry.sh "$venv/bin/pip" install --quiet 'ziglang>=0.17,<0.18'
(
  zig=("$venv/bin/python" -m ziglang)
  root=$PWD
  cd "$out"
  "${zig[@]}" translate-c -lc "$root/capi/include/twinbuf.h" >twinbuf.zig
  "${zig[@]}" build-exe -O ReleaseSafe -lc -L "$target/debug" -ltwinbuf_capi -rpath "$target/debug" --name trainer-zig \
    --dep twinbuf -Mtrainer="$root/capi/examples/trainer.zig" -Mtwinbuf=twinbuf.zig
)

# Both ranks at a time, of one program after the other.
for program in "$out/read" "$out/trainer-zig" "$target/debug/examples/trainer"; do
  name=$(basename "$program")
  for rank in 0 1; do
    "$program" "$out/data.bin" $rank >"$out/$name.$rank" &
  done
  wait -n
  wait -n
  cat "$out/$name.0" "$out/$name.1" >"$out/$name.txt"
  # The C program trains nothing.
  grep -v "$([ "$name" = read ] && echo ^loss || echo ^$)" capi/examples/expected.txt | diff - "$out/$name.txt" || {
    echo "$name: other batches or another loss than in capi/examples/expected.txt" >&2
    exit 1
  }
done
echo "C, Zig and Rust: the same batches, and the same loss of Zig and Rust"
