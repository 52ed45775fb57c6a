"""The same batches as C, Zig and Rust read in `ci/capi.sh`."""

import subprocess
import sys
import zlib
from itertools import islice
from pathlib import Path

import twinbuf as tb

EXAMPLES = Path(__file__).parents[2] / "capi/examples"


def test_the_programs_of_the_c_library_read_the_same_batches(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    subprocess.run([sys.executable, EXAMPLES / "data.py", path], check=True)
    data = tb.Records.open(path, 64)
    lines = (EXAMPLES / "expected.txt").read_text().splitlines()
    expected = [line for line in lines if line.startswith("rank ")]
    for rank in range(2):
        plan = tb.Plan(data, batch=4, shuffle="full", seed=42, rank=rank, world=2)
        loader = tb.Loader(data, plan)
        batches, checksum = 0, 1
        # Stopped and resumed once.
        for most in (40_000, sys.maxsize):
            for batch in islice(loader.epochs(3), most):
                batches, checksum = batches + 1, zlib.adler32(batch, checksum)
            state = loader.state_dict()
            loader.close()
            loader = tb.Loader(data, plan)
            loader.load_state_dict(state)
        loader.close()
        assert f"rank {rank}: {batches} batches, adler32 {checksum:08x}" == expected[rank]
