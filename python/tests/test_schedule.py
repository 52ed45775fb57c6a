"""Batch sizes that change during the training, against a count by hand."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import Case, copies
from sets import Numbers, loader_of

import twinbuf as tb

# Steps and records, of 203 records: within an epoch, at the end of one, over several; not for a step.
SCHEDULES: list[list[tuple[int, int]]] = [
    [(4, 20), (3, 50), (0, 10)],
    [(10, 20), (5, 7), (1, 40)],
    [(25, 20), (0, 3), (40, 33), (7, 5)],
    [(1, 203), (2, 1), (9, 64)],
    [(4, 50), (2, 1), (9, 64)],
    [(8, 50), (1, 3), (2, 50), (1, 10)],
    [(1000, 32), (4000, 64)],
]
EPOCHS = 4


def by_hand(schedule: list[tuple[int, int]], drop_last: bool) -> Iterator[tuple[int, int, range]]:
    """The epoch, the step and the places of the records of each batch."""
    sizes = [size for steps, size in schedule[:-1] for _ in range(steps)]
    trained = 0
    for epoch in range(EPOCHS):
        at = step = 0
        while at < 203:
            size = sizes[trained] if trained < len(sizes) else schedule[-1][1]
            if drop_last and at + size > 203:
                break
            yield epoch, step, range(at, min(at + size, 203))
            at, step, trained = at + size, step + 1, trained + 1


def plan_of(case: Case, schedule: Any, shuffle: Any = None, **options: Any) -> tb.Plan:
    seed = None if shuffle is None else 3
    return tb.Plan(case.data, schedule, shuffle=shuffle, seed=seed, **options)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batches_lengths_and_resumption_at_every_step(
    npy: Case, schedule: list[tuple[int, int]], drop_last: bool
) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    plan = plan_of(npy, schedule, drop_last=drop_last)
    expected = list(by_hand(schedule, drop_last))
    steps = [sum(1 for at, _, _ in expected if at == epoch) for epoch in range(EPOCHS)]
    assert [plan.steps(epoch) for epoch in range(EPOCHS)] == steps
    assert len(plan) == steps[0]
    assert plan.batch == max(size for count, size in [*schedule[:-1], (1, schedule[-1][1])] if count)

    loader = tb.Loader(npy.data, plan)
    states = [loader.state_dict()]
    epochs = loader.epochs(EPOCHS)
    assert tqdm(epochs, disable=True).total == len(expected)
    for left, (batch, (epoch, step, records)) in enumerate(zip(epochs, expected, strict=True), 1):
        assert (batch.epoch, batch.step) == (epoch, step)
        assert batch.indices.tolist() == list(records) == plan.indices(epoch, step).tolist()
        assert np.array_equal(batch.numpy(), npy.records[list(records)])
        assert (len(epochs), len(loader)) == (len(expected) - left, steps[epoch])
        states.append(loader.state_dict())
        del batch

    for done, state in enumerate(states):
        other = tb.Loader(npy.data, plan, overlap=done % 2 == 0)
        other.load_state_dict(json.loads(json.dumps(state)))
        assert other.state_dict() == state
        rest = other.epochs(EPOCHS)
        assert len(rest) == len(expected) - done
        found = [(batch.epoch, batch.step, batch.indices.tolist()) for batch in rest]
        assert found == [(epoch, step, list(records)) for epoch, step, records in expected[done:]]

    # One epoch after another, as most loops do.
    loader = tb.Loader(npy.data, plan)
    for count in steps:
        assert tqdm(loader, disable=True).total == len(iter(loader)) == count
        assert sum(1 for _ in loader) == count
    assert len(loader.epochs(range(2, 4))) == sum(steps[2:]) == sum(1 for _ in loader.epochs(range(2, 4)))


@pytest.mark.parametrize("after", [[(1000, 6)], [(3, 30), (8, 11), (1, 5)], 25])
def test_another_schedule_continues_after_all_steps_of_the_training(npy: Case, after: Any) -> None:
    first = tb.Loader(npy.data, plan_of(npy, [(12, 20), (1, 8)], "full"))
    taken = first.epochs(2)
    seen = [next(taken).indices.tolist() for _ in range(14)]
    this_epoch = [record for batch in seen[10:] for record in batch]
    for one_by_one in (False, True):
        other = tb.Loader(npy.data, plan_of(npy, after, "full"))
        other.load_state_dict(first.state_dict())
        length = len(other)
        if one_by_one:
            # Each epoch asks for its length, and begins after the one before it.
            batches = []
            for epoch in range(1, 4):
                it = iter(other)
                assert len(it) + (4 if epoch == 1 else 0) == len(other)
                batches += [(batch.epoch, batch.step, batch.indices.tolist()) for batch in it]
        else:
            foretold = len(it := other.epochs(4))
            batches = [(batch.epoch, batch.step, batch.indices.tolist()) for batch in it]
            assert foretold == len(batches)
            whole = batches
    assert batches == whole
    assert length == 4 + sum(1 for batch in batches if batch[0] == 1)
    rest = [record for epoch, _, records in batches if epoch == 1 for record in records]
    assert len(set(rest + this_epoch)) == len(rest) + len(this_epoch)
    # The steps of the training: 14 before.
    sizes = [size for steps, size in after[:-1] for _ in range(steps)] if isinstance(after, list) else []
    last = after[-1][1] if isinstance(after, list) else after
    for trained, (_, _, records) in enumerate(batches, 14):
        assert len(records) == (sizes[trained] if trained < len(sizes) else last)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("after", [50, [(13, 1), (8, 50)]])
def test_the_end_of_an_epoch_under_another_plan_is_followed_by_the_next(
    npy: Case, after: Any, saves: bool
) -> None:
    """Nothing is left of the epoch of the state, also for a loop that saves once more after nothing."""
    first = tb.Loader(npy.data, plan_of(npy, 20, drop_last=False))
    batches = first.epoch(0)
    state = [first.state_dict() for _ in batches][-1]
    assert (state["epoch"], state["step"]) == (0, 11)

    def loaded() -> tb.Loader:
        other = tb.Loader(npy.data, plan_of(npy, after, drop_last=False))
        other.load_state_dict(json.loads(json.dumps(state)))
        return other

    whole = [(batch.epoch, batch.step, len(batch)) for batch in loaded().epochs(3)]
    trained = [11 + sum(1 for epoch, _, _ in whole if epoch < end) for end in (1, 2, 3)]
    assert [size for _, _, size in whole[:3]] == ([1, 1, 50] if isinstance(after, list) else [50, 50, 50])
    other, found = loaded(), []
    for epoch in range(3):
        count = len(iter(other))
        batches = [(batch.epoch, batch.step, len(batch)) for batch in other]
        assert {at for at, _, _ in batches} == ({epoch} if epoch else set()) and len(batches) == count
        found += batches
        state = other.state_dict()
        assert (state["epoch"], state["step"], state["trained"]) == (epoch + 1, 0, trained[epoch])
        other = loaded() if saves else other
    assert found == whole


def test_a_trainer_that_seeks_finds_the_sizes_of_its_epoch(npy: Case) -> None:
    plan = plan_of(npy, SCHEDULES[0])
    loader = tb.Loader(npy.data, plan)
    sampler, batches = loader.batch_sampler, loader.dataset  # type: ignore[attr-defined]
    for epoch in (2, 0, 1, 3):
        sampler.set_epoch(epoch)
        assert len(sampler) == plan.steps(epoch)
        for at in sampler:
            assert batches.__getitems__(at).indices.tolist() == plan.indices(*at).tolist()


def test_a_trainer_seeks_as_far_as_epochs_go(npy: Case) -> None:
    for plan in (plan_of(npy, SCHEDULES[0]), plan_of(npy, 40)):
        loader = tb.Loader(npy.data, plan)
        batches = loader.dataset  # type: ignore[attr-defined]
        for epoch in (2**40, 2**63, 2**64 - 2):
            batch = batches.__getitems__((epoch, 1))
            assert (batch.epoch, batch.step) == (epoch, 1)
            assert batch.indices.tolist() == plan.indices(epoch, 1).tolist()
        with pytest.raises(tb.OptionError, match="epoch"):
            batches.__getitems__((2**64 - 1, 0))
        size = loader.batch_size
        loader.load_state_dict(loader.state_dict() | {"epoch": 2**64 - 1, "step": 0})
        assert loader.batch_size == size, "not that of epoch 0"


@pytest.mark.parametrize("raised", [KeyboardInterrupt, LookupError])
def test_a_trainer_that_goes_on_after_an_error_has_the_steps_it_asks_for(raised: Any) -> None:
    """It got each batch one step late, and the last one never."""
    raises = [raised]

    def before(indices: np.ndarray) -> None:
        if 4 in indices and raises:
            raise raises.pop()

    loader = loader_of(Numbers(10, before), 2)
    batches, got = loader.dataset, list[int]()
    for at in loader.batch_sampler:
        with contextlib.suppress(raised):
            got.append(batches.__getitems__(at).step)
    assert got == [0, 1, 3, 4]


def test_a_schedule_is_a_value_and_what_is_none_is_refused(npy: Case) -> None:
    plan = plan_of(npy, [(np.int64(3), np.int32(20)), (9, 40)])
    for other in (*copies(plan), plan_of(npy, ((3, 20), (1, 40)))):
        assert (other, hash(other)) == (plan, hash(plan))
    nothing = plan_of(npy, [(2, 2), (0, 3), (1, 1)])
    assert nothing == pickle.loads(pickle.dumps(nothing)) == plan_of(npy, [(2, 2), (1, 1)])
    assert repr(plan).startswith("Plan(203, [(3, 20), (..., 40)], shuffle=None")
    assert plan != plan_of(npy, 40) == plan_of(npy, [(7, 40)])
    for wrong, error, message in (
        ([], tb.OptionError, "a schedule needs 1 to 16 batch sizes"),
        ([(1, 2)] * 17, tb.OptionError, "a schedule needs 1 to 16 batch sizes"),
        ([(1, 0), (1, 2)], tb.OptionError, "batch"),
        ([(-1, 2)], tb.OptionError, r"batch: wanted a whole number from 0 to 2\*\*64 - 1, found -1"),
        ([3, 4], TypeError, "batch: wanted a number of records, or pairs of steps and records, found 3"),
        ([(3, 4, 5)], TypeError, r"batch: wanted a number of records, or pairs .*, found \(3, 4, 5\)"),
        ("12", TypeError, "batch: wanted"),
        (None, TypeError, "None"),
    ):
        with pytest.raises(error, match=message):
            plan_of(npy, wrong)
