"""mypy and pyright, both strict: they find nothing in programs that work, and each line that raises."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKERS = {"mypy": [sys.executable, "-m", "mypy", "--strict"], "pyright": [sys.executable, "-m", "pyright"]}

# What the programs of the two READMEs take from their surroundings.
AROUND = """\
# pyright: strict, reportUnusedVariable=false, reportUnusedImport=false
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

import twinbuf as tb

data_dir, block_size, batch_size, device = "data", 64, 12, "cuda"
dataloader = [torch.ones(3)]


def train(inputs: torch.Tensor, targets: torch.Tensor | None = None) -> None: ...
def use(item: torch.Tensor) -> None: ...


"""


@pytest.fixture(params=list(CHECKERS))
def checker(request: pytest.FixtureRequest) -> list[str]:
    if shutil.which(request.param) is None:
        pytest.skip(f"without {request.param}")
    return CHECKERS[request.param]


def lines_of(checker: list[str], program: Path) -> tuple[set[int], str]:
    """Return the lines with errors."""
    done = subprocess.run([*checker, program.name], cwd=program.parent, text=True, capture_output=True)
    errors = [line for line in done.stdout.splitlines() if re.search(r"\berror\b.*[:-]", line)]
    found = {int(line) for line in re.findall(rf"{program.name}:(\d+)", "\n".join(errors))}
    assert bool(found) == bool(done.returncode), done.stdout + done.stderr
    return found, done.stdout


@pytest.mark.parametrize("name", ["typed.py", "typed_wrong.py", "README.md", "../README.md"])
def test_the_lines_that_are_refused(checker: list[str], name: str, tmp_path: Path) -> None:
    program = tmp_path / Path(name).with_suffix(".py").name
    text = (HERE / name if name.endswith(".py") else HERE.parent / name).read_text()
    if name.endswith(".md"):
        # Each in a function of its own: they reuse names.
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        blocks = [block.replace("import twinbuf as tb\n", "") for block in blocks]
        before = "data: tb.Records, plan: tb.Plan, loader: tb.Loader[tb.Batch]"
        bodies = ["".join(f"    {line}\n" for line in block.splitlines()) for block in blocks]
        text = AROUND + "\n".join(
            f"def program_{at}({before}) -> None:\n{body}" for at, body in enumerate(bodies)
        )
    program.write_text(text)
    wanted = {at for at, line in enumerate(text.splitlines(), 1) if line.endswith("# wrong")}
    found, told = lines_of(checker, program)
    assert found == wanted, told
