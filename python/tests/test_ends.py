"""A program ends with its own exit code, whatever foreign code does. `ends.py` has all of the programs."""

from __future__ import annotations

import sys

import ends
import pytest


@pytest.fixture(scope="module")
def results() -> dict[str, ends.Result]:
    # Slow is no fault here: only what does not end is one.
    limit = 3 * ends.LIMIT
    found = ends.run_all(ends.quick_cases(), sys.executable, 2, limit)
    # Once more, alone: on a busy machine all takes longer.
    wrong = [result.case for result in found if result.wrong not in ends.RIGHT]
    again = ends.run_all(wrong, sys.executable, 1, limit) if wrong else []
    return {str(result.case): result for result in [*found, *again]}


@pytest.mark.parametrize("case", list(map(str, ends.quick_cases())))
def test_a_program_ends_as_without_twinbuf(results: dict[str, ends.Result], case: str) -> None:
    result = results[case]
    late = (result.wrong or "").startswith("late")  # which is measured, and no test
    assert late or result.wrong in ends.RIGHT, f"{result.wrong}\n{result.output}"
