"""Positions: saved at any step, the rest of the batches is the same."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import Case, saved
from interrupts import Now
from sets import Numbers, loader_of

import twinbuf as tb

ORDERS = {"in order": None, "full": "full", "window": tb.Window(3, 10)}


def bytes_of(batches: Iterator[tb.Batch]) -> list[tuple[int, int, bytes]]:
    return [(batch.epoch, batch.step, batch.numpy().tobytes()) for batch in batches]


def build(case: Case, order: str, **options: Any) -> tb.Loader:
    seed = None if ORDERS[order] is None else 4
    plan = tb.Plan(case.data, 20, shuffle=ORDERS[order], seed=seed, drop_last=False)
    return tb.Loader(case.data, plan, **options)


@pytest.mark.parametrize("order", ORDERS)
def test_resume_at_every_step(npy: Case, order: str) -> None:
    expected = bytes_of(build(npy, order).epochs(3))
    states = [build(npy, order).state_dict()]
    first = build(npy, order)
    for _ in first.epochs(3):
        states.append(first.state_dict())
    assert len(states) == len(expected) + 1 == 34
    for done, state in enumerate(states):
        other = build(npy, order, depth=3, overlap=done % 2 == 0)
        # As it comes back from a file.
        other.load_state_dict(json.loads(json.dumps(state)))
        assert other.state_dict() == state
        assert bytes_of(other.epochs(3)) == expected[done:]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stop", [0, 3, 11, 12])
def test_a_closed_loader_has_its_position(npy: Case, stop: int, overlap: bool) -> None:
    with build(npy, "full", overlap=overlap) as loader:
        for _ in zip(range(stop), loader, strict=False):
            pass
        expected = loader.state_dict()
    # The last of 11 batches is the end of an epoch only for a loop that asked for another.
    assert (expected["epoch"], expected["step"]) == ((1, 0) if stop == 12 else (0, stop))
    assert loader.state_dict() == expected
    loader.close()
    assert loader.state_dict() == expected
    with pytest.raises(tb.errors.LoaderError, match="closed"):
        next(iter(loader))


def test_resume_epoch_by_epoch(npy: Case) -> None:
    """As `StatefulDataLoader` is used: `for batch in loader`, once for each epoch."""
    loader = build(npy, "full")
    expected = [bytes_of(iter(loader)) for _ in range(3)]
    assert [batches[0][0] for batches in expected] == [0, 1, 2]
    for stop in range(3 * 11):
        loader, state, rest = build(npy, "full"), None, []
        for step, batch in enumerate(batch for _ in range(3) for batch in loader):
            del batch
            if step == stop:
                state = loader.state_dict()
                break
        other = build(npy, "full")
        assert state is not None
        other.load_state_dict(copy.deepcopy(state))
        for epoch in range(stop // 11, 3):
            rest += bytes_of(iter(other))
            assert other.state_dict() == {**state, "epoch": epoch + 1, "step": 0, "trained": 11 * (epoch + 1)}
        assert rest == [batch for batches in expected for batch in batches][stop + 1 :]


def test_a_finished_state_leaves_no_epoch(npy: Case) -> None:
    first = build(npy, "full")
    expected = bytes_of(first.epochs(2))
    state = first.state_dict()
    assert (state["epoch"], state["step"]) == (2, 0)
    for epochs in (1, 2, range(1), 0):
        other = build(npy, "full")
        other.load_state_dict(state)
        assert list(other.epochs(epochs)) == []
        assert other.state_dict() == state
        assert {batch.epoch for batch in other} == {2}
    # One epoch that was asked for by its number is all of it.
    other.load_state_dict(state)
    assert bytes_of(other.epoch(0)) == expected[:11]
    # An iteration of nothing does not move the place.
    next(iterator := other.epochs(range(4, 5)))
    state = other.state_dict()
    del iterator
    assert list(other.epochs(0)) == list(other.epochs(range(4, 2))) == []
    assert other.state_dict() == state


def test_set_epoch(npy: Case) -> None:
    loader = build(npy, "full")
    loader.set_epoch(5)
    assert {batch.epoch for batch in loader} == {5}
    assert {batch.epoch for batch in loader} == {6}
    assert {batch.epoch for batch in loader.epochs(range(2, 4))} == {2, 3}
    next(loader.epoch(3))
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (3, 1)
    # The epoch that the state is of: the rest of it. Another: all of that.
    for epoch, steps in ((3, 10), (4, 11), (2, 11)):
        other = build(npy, "full")
        other.load_state_dict(state)
        other.set_epoch(epoch)
        assert [batch.epoch for batch in other] == [epoch] * steps
        other.load_state_dict(state)
        assert [batch.epoch for batch in other.epoch(epoch)] == [epoch] * steps


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_later_epoch_of_a_resumed_loop_is_that_of_the_loop_which_went_on(epoch: int) -> None:
    """If that left out an epoch, it took all steps for those of its own plan: a schedule had another size."""
    data, plan = Numbers(48), [(6, 2), (28, 3), (1, 8)]
    first, loader, resumed = (loader_of(data, batch) for batch in (4, plan, plan))
    next(first.epochs(1))
    loader.load_state_dict(first.state_dict())
    assert bytes_of(loader.epochs(1))
    resumed.load_state_dict(loader.state_dict())
    assert bytes_of(loader.epoch(epoch)) == bytes_of(resumed.epoch(epoch))
    assert loader.state_dict() == resumed.state_dict()


def test_a_state_may_have_integers_of_numpy(npy: Case) -> None:
    loader = build(npy, "full")
    next(loader.epochs(1))
    state = loader.state_dict()
    other = build(npy, "full")
    other.load_state_dict({**state, "step": np.int64(state["step"]), "epoch": np.uint8(state["epoch"])})
    assert other.state_dict() == state
    with pytest.raises(TypeError, match="object"):
        other.load_state_dict({**state, "step": object()})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_state_goes_through_a_distributed_checkpoint(npy: Case, tmp_path: Any) -> None:
    """It takes dicts in a list apart: those of the saved state and of the new loader have to be the same."""
    import torch.distributed.checkpoint as dcp

    first, second, third = (tb.Loader(npy.data, tb.Plan(npy.data, size)) for size in (20, 30, 30))
    next(first.epochs(1))
    second.load_state_dict(first.state_dict())
    next(second.epochs(1))
    dcp.save({"loader": second}, checkpoint_id=tmp_path / "saved")
    dcp.load({"loader": third}, checkpoint_id=tmp_path / "saved")
    state = third.state_dict()
    assert state == second.state_dict() and state["before"] == [[20, 1, 1]]
    # As states were saved before.
    third.load_state_dict(state | {"before": [{"batch": 20, "world": 1, "steps": 1}]})
    assert third.state_dict() == state
    with pytest.raises(tb.CheckpointError, match="field `before`"):
        third.load_state_dict(state | {"before": [[20, 1]]})


PLANS: dict[str, dict[str, Any]] = {
    "plain": {"batch": 50},
    "schedule": {"batch": [(4, 10), (100, 50)]},
    "steps": {"batch": 50, "steps": 3},
    "list": {"batch": 50, "records": np.random.default_rng(1).permutation(500)},
    "odd": {"batch": 50, "records": range(1, 1001, 2)},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("second", PLANS)
@pytest.mark.parametrize("first", PLANS)
def test_a_distributed_checkpoint_is_the_state(first: str, second: str, tmp_path: Any) -> None:
    """Whatever the new loader's own state is: it loads no other fields than that has."""
    import torch.distributed.checkpoint as dcp

    def result(load: Callable[[tb.Loader], None]) -> Any:
        loader = tb.Loader(Numbers(1000), tb.Plan(1000, **PLANS[second]))
        try:
            load(loader)
        except tb.CheckpointError as error:
            return str(error)
        return loader.state_dict(), [batch.numpy().tolist() for batch in loader.epochs(2)]

    saved_from = tb.Loader(Numbers(1000), tb.Plan(1000, **PLANS[first]))
    for _, _ in zip(range(2), saved_from.epochs(1), strict=False):
        pass
    state = json.loads(json.dumps(saved_from.state_dict()))
    dcp.save({"loader": saved_from}, checkpoint_id=tmp_path / "saved")

    def load(loader: tb.Loader) -> None:
        own = {"loader": loader.state_dict()}
        dcp.load(own, checkpoint_id=tmp_path / "saved")
        loader.load_state_dict(own["loader"])

    assert result(load) == result(lambda loader: loader.load_state_dict(state))


def test_a_wrong_state_is_told_in_the_words_of_python(npy: Case) -> None:
    loader = build(npy, "full")
    state = loader.state_dict()
    for wrong, message in (
        ({"step": None}, "state: field `step`: invalid type: None, expected a whole number"),
        ({"step": -1}, ""),
        ({"version": -1}, "state: field `version`: invalid value: integer `-1`, expected a whole number"),
        ({"plan": 3}, "state: field `plan`: invalid type: integer `3`, expected a dict"),
        ({"epoch": 'x" at line '}, r"field `epoch`: invalid type: string \".* at line \", expected .*"),
        ({"plan": state["plan"] | {"batch": []}}, "field `batch`: invalid type: sequence, expected .*"),
        ({"plan": state["plan"] | {"shuffle": None}}, "field `shuffle`: invalid type: None, expected .*"),
        ({"plan": state["plan"] | {"shuffle": "some"}}, "state: unknown variant `some`, .*"),
        ({"more": 1}, "state: unknown field `more`, .*"),
        ({"before": [20]}, "invalid type: integer `20`, expected a list of 3 whole numbers"),
        ({"before": [[20, 1]]}, "field `before`: invalid length 2, expected a list of 3 whole numbers"),
        ({"before": None}, "state: field `before`: wanted one in version 4, found none"),
        ({"plan": None}, "wanted `plan`, `record_bytes` and `fingerprint`, found some of them None"),
    ):
        with pytest.raises(tb.CheckpointError, match=f"{message}$"):
            loader.load_state_dict({**state, **wrong})
    # The state of Rust's `Checkpoint::start`.
    fields = ("trained", "plan", "record_bytes", "fingerprint")
    start = dict.fromkeys(fields) | {"version": 4, "epoch": 0, "step": 0, "before": []}
    loader.load_state_dict(start)
    assert loader.state_dict() == start | {"list": None}
    for missing in ({}, {"epoch": 1}):
        with pytest.raises(tb.CheckpointError, match="state: missing field `version`"):
            loader.load_state_dict(missing)


def test_a_state_of_another_plan_or_data_set_is_refused(npy: Case, tmp_path: Any) -> None:
    state = build(npy, "full").state_dict()
    begun = tb.Loader(npy.data, tb.Plan(npy.data, 20)).state_dict()
    plan = {"shuffle": "full", "seed": 4, "drop_last": False}
    other = saved(tmp_path / "other.npy", npy.records + 1)
    some = np.random.default_rng(1).permutation(len(npy.data))
    found = r"found range\(0, 203\)$"
    whole = r'another shuffle: wanted Window\(\d+, \d+\), found "full"'
    for data, old, options, message in (
        (npy.data, state, plan | {"seed": 9}, "seed"),
        (npy.data, state, plan | {"shuffle": tb.Window(3, 10)}, whole),
        (npy.data, state, plan | {"drop_last": True}, "another `drop_last`: wanted True, found False"),
        (other, state, plan, "data set"),
        (npy.data, begun, {"records": range(60)}, rf"range of records: wanted range\(0, 60\), {found}"),
        (npy.data, begun, {"records": range(1, 99, 2)}, rf"of records: wanted range\(1, 98, 2\), {found}"),
        (npy.data, begun, {"records": some}, r"fingerprint of the list of records: wanted \d+, found None$"),
        (npy.data, begun, {"steps": 4}, "number of steps in an epoch: wanted 4, found None$"),
    ):
        with pytest.raises(tb.CheckpointError, match=message) as caught:
            tb.Loader(data, tb.Plan(data, 20, **options)).load_state_dict(old)
        assert str(caught.value).startswith("the checkpoint has another "), message
    for wrong in (object(), {(1, 2): 3}):
        with pytest.raises(TypeError, match=r"^state: "):
            build(npy, "full").load_state_dict({**state, "epoch": wrong})
    for value in (float("nan"), state):
        state["plan"] = value
        with pytest.raises(tb.CheckpointError, match="state: "):
            build(npy, "full").load_state_dict(state)


def printed(fingerprint: object, **options: Any) -> Any:
    data: Any = Numbers()
    data.fingerprint = fingerprint
    return loader_of(data, 2, **options)


def test_a_data_set_in_python_may_have_a_fingerprint() -> None:
    state = printed(2**64 - 1).state_dict()
    assert state["fingerprint"] == 2**64 - 1
    printed(2**64 - 1, workers=2).load_state_dict(state)
    with pytest.raises(tb.CheckpointError, match="data set fingerprint"):
        printed(1).load_state_dict(state)
    for wrong in (-1, 2**64, "a", None):
        with pytest.raises((TypeError, tb.OptionError), match=f"fingerprint: wanted .*, found {wrong!r}$"):
            printed(wrong)


@pytest.mark.parametrize("prepare", [lambda batch: batch, None])
def test_the_length_is_that_of_the_state_when_it_begins(prepare: Any) -> None:
    """Some programs ask for the length first, and then load a state or choose the epoch."""
    plan = [(10, 10), (1, 20)]
    loader, other = loader_of(Numbers(100), plan, map=prepare), loader_of(Numbers(100), plan)
    batches = other.epochs(2)
    for _ in range(13):
        next(batches)
    for iterator, before in ((loader.epochs(2), 15), (iter(loader), 10)):
        assert len(iterator) == before
        loader.load_state_dict(other.state_dict())
        assert len(iterator) == 2
        assert len(list(iterator)) == 2 and len(iterator) == 0
        loader.load_state_dict(loader_of(Numbers(100), plan).state_dict())
    loader = loader_of(Numbers(100), plan)
    iterator = iter(loader)
    assert len(iterator) == 10
    loader.set_epoch(3)
    assert len(iterator) == len(list(iterator)) == 5


def test_a_state_loaded_in_the_middle_ends_the_iteration(numbers: Callable[..., tb.Loader]) -> None:
    loader = numbers()
    iterator = loader.epoch(0)
    state = loader.state_dict()
    next(iterator)
    loader.load_state_dict(state)
    with pytest.raises(tb.LoaderError, match="another has begun, or a state was loaded"):
        next(iterator)
    assert len(list(loader.epochs(1))) == 16


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"map": lambda batch: batch}, {"device": Now()}])
@pytest.mark.parametrize("wrong", ["shuffle", "unknown field `more`"])
def test_a_state_that_is_refused_in_the_middle_is_no_end_of_the_epoch(
    npy: Case, wrong: str, options: Any
) -> None:
    """The loop that went on got no error: it seemed to have had all batches. No dict leaves it alone."""
    loader = build(npy, "full", **options)
    iterator = loader.epochs(1)
    next(iterator)
    for no_state in (3, {(1, 2): 3}):
        with pytest.raises(TypeError, match="state"):
            loader.load_state_dict(no_state)  # type: ignore[arg-type]
    next(iterator)
    state = loader.state_dict()
    with pytest.raises(tb.CheckpointError, match=wrong):
        other = build(npy, "in order").state_dict() if wrong == "shuffle" else state | {"more": 1}
        loader.load_state_dict(other)
    with pytest.raises(tb.LoaderError, match="a state was loaded"):
        next(iterator)
    assert loader.state_dict() == state


@pytest.mark.parametrize("end", ["a state", "a refused state", "close"])
def test_the_length_behind_an_interrupted_loop_is_that_of_the_next_epoch(end: str) -> None:
    """It was that of the epoch whose read was interrupted, once the loop had been ended."""

    def stop(indices: np.ndarray) -> None:
        raise SystemExit

    plan = [(2, 3), (5, 6)]
    other = loader_of(Numbers(24), plan)
    assert len(other) == 5 and len(list(other.epochs(1))) == 5 and len(list(other.epoch(1))) == 4
    loader = loader_of(Numbers(24, stop), plan)
    items = loader.epoch(0)
    with pytest.raises(SystemExit):
        next(items)
    assert len(loader) == 5
    if end == "a state":
        loader.load_state_dict(other.state_dict())
    elif end == "close":
        loader.close()
    else:
        with pytest.raises(tb.CheckpointError, match="range of records"):
            loader.load_state_dict(loader_of(Numbers(25), 4).state_dict())
    assert len(loader) == 4
