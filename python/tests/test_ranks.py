"""Four real ranks: processes that torchrun starts, which talk by gloo."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from conftest import saved

import twinbuf as tb

RANK = """
    import sys

    import torch
    import torch.distributed as dist

    import twinbuf as tb

    dist.init_process_group("gloo")
    data = tb.Records.open_npy(sys.argv[1])
    plan = tb.Plan(data, 3, shuffle=tb.Window(4, records=8), seed=9, rank="env")
    loader = tb.Loader(data, plan)
    for batch in loader.epochs(2):
        mine = batch.torch()[:, 0].clone()
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        # A step of all ranks together: as many batches on each, of one size, or it would hang.
        dist.all_gather(every, mine)
        if dist.get_rank() == 0:
            print(batch.epoch, *torch.cat(every).tolist())
    dist.destroy_process_group()
"""


def test_every_record_once_over_all_ranks(tmp_path: Path) -> None:
    records = 120
    np.save(tmp_path / "numbers.npy", np.arange(records, dtype=np.int64)[:, None])
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [str(tmp_path / "rank.py"), str(tmp_path / "numbers.npy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    steps = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    for epoch in range(2):
        seen = [number for first, *numbers in steps if first == epoch for number in numbers]
        assert sorted(seen) == list(range(records)), f"epoch {epoch}"


def test_without_a_launcher_there_is_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    data = saved(tmp_path / "numbers.npy", np.arange(8)[:, None])
    assert len(tb.Loader(data, tb.Plan(data, 2, rank="env"))) == 4
