"""The examples run, and the loops that were changed have the losses of those that were not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "common.py")


@pytest.mark.parametrize("name", NAMES)
def test_an_example(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "plain loop " in done.stdout and "the same losses" in done.stdout, done.stdout
