"""The examples run, and the loops that were changed have the losses of those that were not."""

from __future__ import annotations

import ast
import difflib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted({path.name for path in EXAMPLES.glob("*.py")} - {"common.py", "llama.py"})


def run(name: str, temporary: Path, **variables: str) -> str:
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
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[str]]]:
    """All of them, two at a time."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "torch.py").write_text("raise ImportError('there is none')")
    with ThreadPoolExecutor(2) as pool:
        runs = {"": pool.submit(run, "tokens.py", folder / "no torch", PYTHONPATH=str(folder))}
        runs |= {name: pool.submit(run, name, folder / name) for name in NAMES}
        yield runs


def lines_changed(name: str) -> int:
    """Lines of `changed` that are not those of `plain`; a line that is gone and has no other counts too."""
    text = (EXAMPLES / name).read_text()
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}

    def body(name: str) -> list[str]:
        node = functions[name]
        lines = [line.split("  # ")[0] for line in text.splitlines()[node.lineno : node.end_lineno]]
        return [line for line in lines if not line.lstrip().startswith("#")]

    changes = difflib.SequenceMatcher(a=body("plain"), b=body("changed"), autojunk=False).get_opcodes()
    return sum(max(a - b, c - d) for tag, b, a, d, c in changes if tag != "equal")


@pytest.mark.parametrize("name", NAMES)
def test_an_example(name: str, runs: dict[str, Future[str]], capsys: pytest.CaptureFixture[str]) -> None:
    out, changed = runs[name].result(), lines_changed(name)
    with capsys.disabled():
        print(f"\n{name}: {changed} lines changed\n{out}", end="")
    assert changed <= 5


def test_the_tokens_without_torch(runs: dict[str, Future[str]]) -> None:
    runs[""].result()


def test_the_copies_by_hand_need_each_of_their_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import copies
    from late import Late

    monkeypatch.setattr(copies, "network", lambda: None)
    for eager in ("main", "side", ""):
        assert copies.overwritten(copies.plain(Late(eager))) == 0
        assert copies.overwritten(copies.changed(Late(eager))) == 0
    for eager, edge in (("", "slot"), ("side", "keep"), ("main", "wait")):
        assert copies.overwritten(copies.plain(Late(eager, edge))) > 0
