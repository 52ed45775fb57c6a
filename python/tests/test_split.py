"""Which records a plan has: those that it was told, and never others in silence."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Case, run_program

import twinbuf as tb


def records_of(data: Any, plan: tb.Plan) -> list[int]:
    batches = [batch.indices.tolist() for batch in tb.Loader(data, plan).epochs(1)]
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        (range(100, 200), range(100, 200)),
        (range(199, 3, -5), range(199, 3, -5)),
        (slice(100, None), range(100, 203)),
        (slice(-50, -10, 2), range(153, 193, 2)),
        (np.arange(7, 203, 3), range(7, 203, 3)),
        (np.array([5, 5, 9, 2], dtype=np.uint8), [5, 5, 9, 2]),
        ([3, 1, 2], [3, 1, 2]),
        (torch.arange(4), range(4)),
    ],
)
@pytest.mark.parametrize("shuffle", [None, "full"])
def test_a_plan_of_some_of_the_records(npy: Case, records: Any, wanted: Any, shuffle: Any) -> None:
    plan = tb.Plan(npy.data, 7, records=records, shuffle=shuffle, drop_last=False)
    found = records_of(npy.data, plan)
    assert found == list(wanted) if shuffle is None else Counter(found) == Counter(wanted)
    assert plan.records == len(list(wanted))
    other = pickle.loads(pickle.dumps(plan))
    assert other == plan and repr(other) == repr(plan) and records_of(npy.data, other) == found
    batch = next(tb.Loader(npy.data, plan).epochs(1))
    assert np.array_equal(batch.numpy(), npy.records[batch.indices])


def test_a_split_is_every_record_once(npy: Case) -> None:
    held_out = np.arange(203) % 10 == 0
    train, valid = (
        tb.Plan(npy.data, 5, records=np.flatnonzero(at), drop_last=False) for at in (~held_out, held_out)
    )
    assert Counter(records_of(npy.data, train) + records_of(npy.data, valid)) == Counter(range(203))


def test_steps_of_an_epoch(npy: Case) -> None:
    plan = tb.Plan(npy.data, 5, shuffle="full", steps=7)
    assert len(plan) == len(tb.Loader(npy.data, plan)) == 7 and "steps=7" in repr(plan)
    with pytest.raises(tb.OptionError, match="steps"):
        tb.Plan(npy.data, 5, steps=41)


def test_the_plan_of_another_data_set_is_refused(npy: Case) -> None:
    some = [
        range(100, 200),
        npy.data[100:],
        torch.utils.data.Subset(npy.records, list(range(100, 203))),  # type: ignore[arg-type]
    ]
    for data in some:
        with pytest.raises(tb.OptionError, match=r"203 records, found that of one with .*records="):
            tb.Loader(npy.data, tb.Plan(data, 10))
    # The first records of any data set that has as many; labels of the same number.
    assert records_of(npy.data, tb.Plan(100, 10)) == list(range(100))
    assert len(records_of(npy.data, tb.Plan(range(203), 10))) == 200


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([0, 203], "below 203, found 203"),
        (range(2**31), "below 203, found 2147483647"),
        (range(2**31, 2, -1), "below 203, found 2147483648"),
        (range(0, 2**70, 3), "below 203, found 1180591620717411303423"),
        (range(-3, 3), "from 0 on, found -3"),
        (range(3, -(2**70), -1), "from 0 on, found -1180591620717411303423"),
        (range(0), "record"),
        ([0.5], "whole numbers, found float64"),
        (np.ones(203, dtype=bool), "whole numbers, found bool"),
        ([[1, 2]], r"found int64 \(1, 2\)"),
        ([], "record"),
    ],
)
def test_records_that_cannot_be(npy: Case, records: Any, message: str) -> None:
    with pytest.raises((TypeError, tb.OptionError), match=message):
        tb.Plan(npy.data, 2, records=records)


def test_records_by_a_list(npy: Case) -> None:
    doubled = npy.data.map(lambda record, _: 2 * record, npy.data.dtype, npy.data.shape)
    back = [-1, 0, -203], np.int8([-5]), range(-3, 0), range(9, -2, -1)
    for numbers in ([1, 2], np.array([200, 3, 3]), range(5, 9), range(9, 1, -3), range(0), [], *back):
        assert np.array_equal(npy.data[numbers], npy.records[np.asarray(numbers, dtype=int)])
        assert np.array_equal(doubled[numbers], 2 * npy.data[numbers])
    for numbers, found in (([0, 203], 203), (range(2**70), 2**70 - 1), (range(9, -205, -1), -204)):
        with pytest.raises(IndexError, match=f"from -203 to 202, found {found}"):
            npy.data[numbers]


LARGE = """
import resource, tracemalloc
import numpy
import twinbuf as tb

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

tb.Plan(1000, 2, records=range(3, 900, 2)), tb.Plan(1000, 2, records=slice(3, 900))
tracemalloc.start()
before = peak()
for data, records, last in (
    (3 * 10**8, range(3 * 10**8), 3 * 10**8 - 1),
    (3 * 10**8, range(1, 3 * 10**8, 2), 3 * 10**8 - 1),
    (10**8, slice(None, 9 * 10**7), 9 * 10**7 - 1),
    (10**8, slice(10**7, None, 3), 10**8 - 3),
):
    plan = tb.Plan(data, 1, records=records)
    assert plan.indices(0, len(plan) - 1).tolist() == [last], plan
print(tracemalloc.get_traced_memory()[1] // 1024, peak() - before)
"""


def test_a_range_takes_no_memory() -> None:
    status, out, errors = run_program(LARGE)
    assert (status, errors) == (0, "")
    traced, resident = map(int, out.split())
    assert traced <= 1024 and resident <= 1024, f"{traced} and {resident} KiB"
