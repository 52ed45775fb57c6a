"""A program ends with its own exit code, whatever foreign code does. `ends.py` has all of the programs."""

from __future__ import annotations

import sys

import ends
import pytest


@pytest.fixture(scope="module")
def results() -> dict[str, ends.Result]:
    found = ends.run_all(ends.quick_cases(), sys.executable, jobs=3)
    return {str(result.case): result for result in found}


@pytest.mark.parametrize("case", map(str, ends.quick_cases()))
def test_a_program_ends_as_without_twinbuf(results: dict[str, ends.Result], case: str) -> None:
    result = results[case]
    assert result.wrong in ends.RIGHT, f"{result.wrong}\n{result.output}"
