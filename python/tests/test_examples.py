"""The examples run, and the loops that were changed have the losses of those that were not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "common.py")


def run(name: str, temporary: Path, **variables: str) -> None:
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", **variables},
    )
    assert done.returncode == 0, done.stderr
    assert "plain loop " in done.stdout and "the same losses" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """All of them, two at a time."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "torch.py").write_text("raise ImportError('there is none')")
    with ThreadPoolExecutor(2) as pool:
        runs = {"": pool.submit(run, "tokens.py", folder / "no torch", PYTHONPATH=str(folder))}
        if importlib.util.find_spec("torch"):
            runs |= {name: pool.submit(run, name, folder / name) for name in NAMES}
        yield runs


@pytest.mark.parametrize("name", NAMES)
def test_an_example(name: str, runs: dict[str, Future[None]]) -> None:
    pytest.importorskip("torch")
    runs[name].result()


def test_the_tokens_without_torch(runs: dict[str, Future[None]]) -> None:
    runs[""].result()
