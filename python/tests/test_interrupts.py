"""A short run of `interrupts.py`: 300 interrupts for each kind of loop, at random points."""

from __future__ import annotations

import threading
from pathlib import Path

import interrupts
import pytest

KINDS = list(interrupts.makers(Path()))


CASES = [(kind, KeyboardInterrupt) for kind in KINDS]
# A handler may raise another exception. Without overlap, one raised while a batch is sent is an error of it.
CASES += [
    (kind, TimeoutError) for kind in KINDS if not kind.startswith("watch") and "overlap=False" not in kind
]


@pytest.mark.parametrize(("kind", "raised"), CASES)
def test_no_item_is_lost(kind: str, raised: type[BaseException], tmp_path: Path) -> None:
    found = interrupts.run(kind, 300, tmp_path, raised)
    assert (found.interrupts, found.lost, found.twice, found.broken) == (300, 0, 0, 0)
    # Where the handler with another exception runs within `before`, that fails, and ends the rounds.
    assert found.items > 0 or (kind, raised) == ("generate(before=)", TimeoutError)


def test_threads_are_started_where_no_signal_is_handled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of a handler within `Thread.start` can break the locks of `threading`."""
    starting, start = [], threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        starting.append((thread.name, threading.get_ident()))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    for make in interrupts.makers(tmp_path).values():
        next(make())
    assert {"twinbuf-upload", "twinbuf-prefetch", "twinbuf-generate"} <= {name for name, _ in starting}
    assert threading.get_ident() not in [where for _, where in starting]
