"""The attributes of a `DataLoader` that trainers read, for a `Loader`.

Hugging Face's ``Trainer``, when it resumes, makes another `DataLoader` of the first one's ``dataset`` and
``batch_sampler``, and leaves out the first batches. The sampler of a loader yields steps, so batches that are
left out are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._loader import Loader


class Steps:
    """The steps of an epoch, as a batch sampler."""

    def __init__(self, loader: Loader[Any], epoch: int) -> None:
        self._loader = loader
        self._epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self._epoch, step) for step in range(len(self)))

    def __len__(self) -> int:
        return self._loader.plan.steps(self._epoch)


class Batches:
    """The batches as a data set whose indices are steps. It is fast for steps that follow each other.

    Its length is the number of records of the plan, as for the data set of a `DataLoader`.
    """

    def __init__(self, loader: Loader[Any]) -> None:
        self._loader = loader
        self._next: tuple[int, int] | None = None
        self._batches: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return self._loader.plan.records

    def __getitems__(self, at: tuple[int, int]) -> Any:
        epoch, step = at
        if at != self._next:
            state = self._loader.state_dict()
            if state["epoch"] != epoch:
                # For another epoch, the plan alone tells the steps before it.
                steps = sum(self._loader.plan.steps(before) for before in range(epoch))
                state |= {"trained": steps, "before": []}
            self._loader.load_state_dict(state | {"epoch": epoch, "step": step})
            self._batches = iter(self._loader.epoch(epoch))
        self._next = epoch, step + 1
        return next(self._batches)


def attribute(loader: Loader[Any], name: str, epoch: int) -> Any:
    """Return the attribute ``name`` of a loader; ``epoch`` is its next one."""
    if name == "dataset":
        return Batches(loader)
    if name == "batch_sampler":
        return Steps(loader, epoch)
    if name == "batch_size":
        plan = loader.plan
        return len(plan.indices(epoch, 0)) if plan.steps(epoch) else plan.batch
    if name == "drop_last":
        return loader.plan.drop_last
    if name == "sampler":
        return SimpleNamespace(set_epoch=loader._reach_epoch)  # Lightning chooses the epoch of that
    if name == "prefetch_factor":
        return None
    if name == "collate_fn":
        return lambda batch: batch
    raise AttributeError(f"'Loader' object has no attribute {name!r}")
