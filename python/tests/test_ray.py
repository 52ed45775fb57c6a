"""Two workers of Ray Train: the plan takes rank and number from the variables that Ray sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")
train = pytest.importorskip("ray.train.torch")

RECORDS, RANKS, EPOCHS = 120, 2, 2


def loop(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    import twinbuf as tb

    data = tb.Records.open_npy(config["file"])
    plan = tb.Plan(data, 3, shuffle=tb.Window(4, records=8), seed=9, rank="env")
    assert (plan.rank, plan.world) == (dist.get_rank(), dist.get_world_size()) == (plan.rank, RANKS)
    steps = []
    for batch in tb.Loader(data, plan).epochs(EPOCHS):
        mine = batch.torch()[:, 0].clone()
        every = [torch.empty_like(mine) for _ in range(RANKS)]
        # A step of all ranks together: as many batches on each, of one size, or it would hang.
        dist.all_gather(every, mine)
        steps.append((batch.epoch, torch.cat(every).tolist()))
    Path(config["out"], f"{plan.rank}.json").write_text(json.dumps(steps))


def test_every_record_once_over_the_workers_of_ray_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.train import RunConfig, ScalingConfig

    np.save(tmp_path / "numbers.npy", np.arange(RECORDS, dtype=np.int64)[:, None])
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=RANKS + 1, include_dashboard=False, log_to_driver=False)
    try:
        train.TorchTrainer(
            loop,
            train_loop_config={"file": str(tmp_path / "numbers.npy"), "out": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=RANKS),
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    steps = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert steps[0] == steps[1]
    for epoch in range(EPOCHS):
        seen = [number for of, numbers in steps[0] if of == epoch for number in numbers]
        assert sorted(seen) == list(range(RECORDS)), f"epoch {epoch}"
