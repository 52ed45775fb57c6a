"""The examples run, and the loops that were changed have the losses of those that were not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "common.py")


def run(name: str, temporary: Path, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", **variables},
    )
    assert done.returncode == 0, done.stderr
    assert "plain loop " in done.stdout and "the same losses" in done.stdout, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_example(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run(name, tmp_path)


def test_the_tokens_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('there is none')")
    run("tokens.py", tmp_path, PYTHONPATH=str(tmp_path))
