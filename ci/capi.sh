#!/usr/bin/env bash
# The C library: lints, its header is current, its README shows read.c as it is, C under AddressSanitizer (with its leak
# check), and in both ranks the same batches from C, C++, Zig and Rust, and of all but C the same loss, as in
# capi/examples/expected.txt, which python/tests/test_capi.py compares too.
#
#   ci/capi.sh            checks
#   ci/capi.sh --write    makes the header and the README's program anew
#
# Builds cbindgen where it is missing (2 minutes of CPU time), and keeps it as ci/deny.sh keeps cargo-deny. Zig comes from PyPI,
# and builds its translator of C at its first use.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
tools=${TWINBUF_TEST_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/twinbuf-tools}
export CARGO_TARGET_DIR=$target PATH=$tools/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
out=$target/capi
mkdir -p "$out"

[[ $(cbindgen --version 2>/dev/null) == *' 0.29.4' ]] ||
  CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --quiet --locked cbindgen@0.29.4 --root "$tools"
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
limits = dict.fromkeys(["examples/read.c", "examples/trainer.cpp", "examples/trainer.zig", "examples/trainer.rs"], 80)
for program, most in {**limits, "zig/twinbuf.zig": 80, "include/twinbuf.hpp": 120}.items():
    lines = len(Path("capi", program).read_text(encoding="utf8").splitlines())
    if lines > most:
        sys.exit(f"capi/{program}: wanted at most {most} lines, found {lines}")
PYTHON

# With its own features: those of the workspace include `tracing`, and the lints see other code.
cargo clippy --quiet --manifest-path capi/Cargo.toml -- -D warnings
cargo build --quiet --package twinbuf-capi --lib --example trainer
python3 capi/examples/data.py "$out/data.bin"

CARGO_TERM_QUIET=true make --silent -C capi build install PROFILE=dev PREFIX="$out/prefix"
# As root without cargo, and to a folder with a space in its name, for a package that is moved.
moved="$out/a root"
rm -rf "$moved"
env -i PATH=/usr/bin:/bin CARGO_TARGET_DIR="$target" make --silent -C capi install PROFILE=dev DESTDIR="$moved" PREFIX=/usr
[[ $(PKG_CONFIG_PATH=$moved/usr/lib/pkgconfig pkg-config --define-variable=prefix=/moved --libs twinbuf) == -L/moved/lib* ]]
rm -r "$moved"
export PKG_CONFIG_PATH=$out/prefix/lib/pkgconfig LD_LIBRARY_PATH=$out/prefix/lib
sanitizers=(-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined)
for program in capi/examples/read.c capi/tests/misuse.c; do
  cc -std=c11 -Wall -Wextra -Werror "${sanitizers[@]}" -I capi/include "$program" "$target/debug/libtwinbuf_capi.a" \
    -lpthread -ldl -lm -o "$out/$(basename "$program" .c)"
done
# shellcheck disable=SC2046
c++ -std=c++17 -Wall -Wextra -Werror "${sanitizers[@]}" -ffp-contract=off capi/examples/trainer.cpp \
  $(pkg-config --cflags --libs twinbuf) -o "$out/trainer-cpp"
echo '#include <twinbuf.h>' | c++ -Wall -Wextra -Werror -I capi/include -fsyntax-only -x c++ -
c++ -std=c++17 -Wall -Wextra -Werror "${sanitizers[@]}" -I capi/include -x c++ - -x none "$target/debug/libtwinbuf_capi.a" \
  -lpthread -ldl -lm -o "$out/owners" <<'CPP'
#include <cstring>
#include <thread>
#include <twinbuf.hpp>
#include <type_traits>
template <class... Owners> constexpr bool moved_and_not_copied =
    ((std::is_nothrow_move_constructible_v<Owners> && std::is_nothrow_move_assignable_v<Owners> &&
      !std::is_copy_constructible_v<Owners> && !std::is_copy_assignable_v<Owners>) && ...);
static_assert(moved_and_not_copied<twinbuf::Batch, twinbuf::Records, twinbuf::Loader, twinbuf::Loader::Iterator>);
// A destructor of a thread that ends, when the texts of the thread's errors are gone.
bool thrown = false;
struct Late {
    ~Late() {
        try { twinbuf::check(twinbuf_free(this)); } catch (const twinbuf::Error &error) {
            thrown = error.code == TWINBUF_ERROR_HANDLE && std::strlen(error.what()) && error.offset == -1;
        }
    }
};
int main() {
    std::thread([] {
        thread_local Late late;
        (void)&late;
        twinbuf_free(&late);
    }).join();
    return !thrown;
}
CPP
"$out/owners"
rm -rf "$out/files" && mkdir "$out/files"
"$out/misuse" "$out/files"

venv=$out/venv
[ -x "$venv/bin/pip" ] || python3 -m venv --clear "$venv"
tools/retry.sh "$venv/bin/pip" install --quiet 'ziglang>=0.17,<0.18'
(
  zig=("$venv/bin/python" -m ziglang)
  root=$PWD
  # Zig is a clang, too, with its own C++ library.
  "${zig[@]}" c++ -std=c++17 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -I capi/include \
    -c capi/examples/trainer.cpp -o "$out/trainer-clang.o"
  cd "$out"
  "${zig[@]}" translate-c -lc "$root/capi/include/twinbuf.h" >c.zig
  "${zig[@]}" build-exe -O ReleaseSafe -lc -L "$out/prefix/lib" -ltwinbuf --name trainer-zig \
    --dep twinbuf -Mtrainer="$root/capi/examples/trainer.zig" --dep c -Mtwinbuf="$root/capi/zig/twinbuf.zig" -Mc=c.zig
)

# A program of this header runs with a library whose structs have one field more. (misuse.c has the reverse.)
newer=$out/newer
rm -rf "$newer" && mkdir -p "$newer" && cp -r capi/src capi/build.rs "$newer" && cp Cargo.lock "$newer"
python3 - "$newer" <<'PYTHON'
import re, sys
from pathlib import Path

newer, root = Path(sys.argv[1]), Path.cwd()
version = re.search(r'^version = "(.*)"', Path("Cargo.toml").read_text(), re.M)[1]
manifest = Path("capi/Cargo.toml").read_text().replace('path = ".."', f'path = "{root}"')
manifest = re.sub(r"\[lints\]\nworkspace = true\n", "[workspace]\n", re.sub(r"(rust-version|license|repository).workspace.*\n", "", manifest))
manifest = manifest.replace("version.workspace = true", f'version = "{version}"').replace("edition.workspace = true", 'edition = "2024"')
# Another name: both are built in one folder.
(newer / "Cargo.toml").write_text(manifest.replace("[lib]\n", '[lib]\nname = "twinbuf_newer"\n'))
source = (newer / "src/lib.rs").read_text()
for last in ["sequence: usize", "held_timeout_ms: u64", "step: u64", "len: usize", "shape: [u64; 8]"]:
    source, count = re.subn(rf"^(    pub {re.escape(last)},\n)\}}", r"\1    pub later: [u64; 2],\n}", source, flags=re.M)
    assert count == 1, last
source = source.replace("twinbuf_batch { size: 0,", "twinbuf_batch { later: [7; 2], size: 0,")
source = source.replace("twinbuf_description { size,", "twinbuf_description { later: [7; 2], size,")
(newer / "src/lib.rs").write_text(source)
PYTHON
cargo build --quiet --offline --lib --manifest-path "$newer/Cargo.toml"
mkdir -p "$newer/lib" && cp "$target/debug/libtwinbuf_newer.so" "$newer/lib/libtwinbuf.so.0"
# shellcheck disable=SC2046
cc -std=c11 "${sanitizers[@]}" capi/examples/read.c $(pkg-config --cflags --libs twinbuf) -o "$out/read-old"
LD_LIBRARY_PATH=$newer/lib "$out/read-old" "$out/data.bin" 0 | diff - <(head -1 capi/examples/expected.txt)

# Both ranks at a time, of one program after the other.
for program in "$out/read" "$out/trainer-cpp" "$out/trainer-zig" "$target/debug/examples/trainer"; do
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
echo "C, C++, Zig and Rust: the same batches, and the same loss of C++, Zig and Rust"
