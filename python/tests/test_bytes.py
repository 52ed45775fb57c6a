"""Every batch is numpy's own slice of the file."""

import numpy as np
import pytest
from conftest import Case

import twinbuf as tb

ORDERS = {"in order": None, "full": "full", "window": tb.Window(3, 10), "chunks": tb.Chunks(7)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_batch_is_the_slice_of_its_records(case: Case, order: str, drop_last: bool) -> None:
    world, seen = 4, []
    for rank in range(world):
        seed = None if ORDERS[order] is None else 11
        options = {"seed": seed, "rank": rank, "world": world, "drop_last": drop_last}
        plan = tb.Plan(case.data, 5, shuffle=ORDERS[order], **options)
        loader = tb.Loader(case.data, plan, depth=3)
        for epoch in range(2):
            steps = 0
            for batch in loader.epoch(epoch):
                assert (batch.epoch, batch.step) == (epoch, steps)
                expected = case.records[batch.indices]
                found = batch.numpy()
                assert found.dtype == expected.dtype
                assert found.shape == expected.shape == (len(batch), *case.data.shape)
                assert found.tobytes() == expected.tobytes()
                assert (batch.indices == plan.indices(epoch, steps)).all()
                steps += 1
                seen += [] if epoch else batch.indices.tolist()
            assert steps == len(plan) == len(loader)
    if drop_last:
        assert len(set(seen)) == len(seen) == len(case.records) // 20 * 20
    else:
        assert set(seen) == set(range(len(case.records)))


def test_ranks_come_from_the_launcher(npy: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    plan = tb.Plan(npy.data, 5, rank="env")
    assert (plan.rank, plan.world) == (2, 4)
    assert plan == tb.Plan(npy.data, 5, rank=2, world=4) != tb.Plan(npy.data, 5, rank=1, world=4)
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(tb.OptionError, match="WORLD_SIZE"):
        tb.Plan(npy.data, 5, rank="env")


def test_the_default_chunk_of_a_window_is_a_mebibyte(npy: Case) -> None:
    mebibyte = tb.Window(2, (1 << 20) // 60)
    assert tb.Plan(npy.data, 5, shuffle=tb.Window(2)) == tb.Plan(npy.data, 5, shuffle=mebibyte)
    assert len(tb.Plan(100, 5)) == 20


def test_records_tell_what_they_are(npy: Case) -> None:
    data = npy.data
    assert (len(data), data.dtype, data.shape, data.nbytes) == (203, "float32", (3, 5), 203 * 60)
    assert [path.name for path in data.paths] == ["a.npy"]
    assert "203 of float32 [3, 5]" in repr(data)
    again = tb.Records.open_npy([str(data.paths[0]), data.paths[0]])
    assert len(again) == 406
    plan = tb.Plan(again, 203)
    assert all(np.array_equal(batch.numpy(), npy.records) for batch in tb.Loader(again, plan).epoch(0))
