"""Trainers with their own loops, killed in the middle and resumed: every record once an epoch."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_program
from late import Late
from sets import Numbers

import twinbuf as tb

COMMON = """
import os, sys, numpy as np, torch, twinbuf as tb
folder, kill = sys.argv[1], int(sys.argv[2])
data = tb.Records.open_npy(folder + "/numbers.npy")
plan = tb.Plan(data, 4, shuffle="full", seed=5)
steps = 0

def use(numbers):
    global steps
    if steps == kill:
        os._exit(9)
    steps += 1
    with open(folder + "/seen", "a") as seen:
        print(*np.asarray(numbers, int).flatten(), file=seen)
"""

LIGHTNING = """
import lightning
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, numbers, index):
        use(numbers)
        loss = self.layer(numbers.float()).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

loader = tb.Loader(data, plan, map=tb.Batch.torch)
every = {"every_n_train_steps": 1, "save_top_k": 0, "save_last": True}
checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(folder, **every)
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", callbacks=[checkpoint], logger=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), loader, ckpt_path="last" if kill < 0 else None, weights_only=False)
"""

FLAX = """
import json, jax.numpy as jnp, optax
from flax import nnx
model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

@nnx.jit
def step(model, optimizer, numbers):
    optimizer.update(model, nnx.grad(lambda model: model(numbers).mean())(model))

loader = tb.Loader(data, plan)
if kill < 0:
    with open(folder + "/state") as state:
        loader.load_state_dict(json.load(state))
kept = []
for batch in loader.epochs(3):
    numbers = jnp.asarray(batch.numpy())
    kept.append((numbers, batch.numpy().copy()))  # more of them than the loader has slots
    step(model, optimizer, numbers)
    use(numbers)
    with open(folder + "/state", "w") as state:
        json.dump(loader.state_dict(), state)
assert all((numbers == copy).all() for numbers, copy in kept)
"""

TRANSFORMERS = """
import transformers
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, numbers):
        use(numbers)
        return {"loss": self.layer(numbers.float()).mean()}

class Trainer(transformers.Trainer):
    def get_train_dataloader(self):
        return tb.Loader(data, plan, map=lambda batch: {"numbers": batch.torch()})

arguments = transformers.TrainingArguments(
    folder + "/out", num_train_epochs=3, save_steps=1, save_total_limit=1, report_to=[], use_cpu=True,
    disable_tqdm=True,
)
Trainer(Model(), arguments, train_dataset=range(64)).train(resume_from_checkpoint=kill < 0)
"""


PROGRAMS = {
    "flax": FLAX,
    "lightning": LIGHTNING,
    # Saved at the end of an epoch alone, in its last step or behind it.
    "lightning 16": LIGHTNING.replace('"every_n_train_steps": 1', '"every_n_train_steps": 16'),
    "lightning end": LIGHTNING.replace('"every_n_train_steps": 1, "save_top_k": 0', '"every_n_epochs": 1'),
    "transformers": TRANSFORMERS,
}


@pytest.mark.parametrize("trainer", PROGRAMS)
def test_every_record_once_an_epoch(tmp_path: Path, trainer: str) -> None:
    pytest.importorskip(trainer.split()[0])
    np.save(tmp_path / "numbers.npy", np.arange(64, dtype=np.float32)[:, None])
    program = COMMON + PROGRAMS[trainer]
    for kill, status in ((32 if " " in trainer else 21, 9), (-1, 0)):
        found, _, errors = run_program(program, tmp_path, kill)
        assert found == status, errors[-3000:]
    batches = (tmp_path / "seen").read_text().splitlines()
    assert len(batches) == 48
    orders = [" ".join(batches[epoch * 16 : epoch * 16 + 16]).split() for epoch in range(3)]
    plan = tb.Plan(64, 4, shuffle="full", seed=5)
    for epoch, order in enumerate(orders):
        assert Counter(order) == Counter(map(str, range(64)))
        # In the plan's order.
        assert order == [str(number) for step in range(16) for number in plan.indices(epoch, step)]


RECIPE = """
import sys, twinbuf as tb, numpy as np, transformers
folder, map = sys.argv[1], eval(sys.argv[2])
np.arange(6400, dtype=np.uint16).astype(np.uint16).tofile(folder + "/tokens.bin")
data = tb.Records.open_headerless(folder + "/tokens.bin", "uint16").windows(8, 8)
plan = tb.Plan(data, 4)

class Trainer(transformers.Trainer):
    def get_train_dataloader(self):
        return tb.Loader(data, plan, map=map)

config = transformers.GPT2Config(vocab_size=6400, n_positions=8, n_embd=8, n_layer=1, n_head=1)
arguments = transformers.TrainingArguments(
    folder + "/out", max_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
)
trained = Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=range(len(data))).train()
assert 0 < trained.training_loss < 100, trained
print(trained.global_step)
"""


def test_the_recipe_for_transformers_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (recipe,) = re.findall(r"`get_train_dataloader`.*`map=(lambda batch: .*?)`", readme)
    _, out, errors = run_program(RECIPE, tmp_path, recipe)
    assert out.strip().splitlines()[-1:] == ["3"], errors[-3000:]


@pytest.mark.parametrize(
    ("received", "epochs", "wanted"),
    [
        (37, (0, 1, 2), [(2, 5), (3, 0), (4, 0)]),  # the trainer counts from 0 on
        (37, (2, 3, 9), [(2, 5), (3, 0), (9, 0)]),
        (16, (1, 2), [(1, 0), (2, 0)]),  # saved in the last step of an epoch
        (17, (0, 1), [(1, 1), (2, 0)]),  # as a short loader that a trainer goes through twice in its epoch 0
        (5, (1, 2), [(1, 0), (2, 0)]),  # saved in the last step of an epoch that the trainer leaves early
        (0, (4, 1), [(4, 0), (1, 0)]),  # another training with the same loader
    ],
)
def test_the_epoch_of_a_trainer_drops_no_state(received: int, epochs: Any, wanted: Any) -> None:
    """Lightning chooses the epoch after it has loaded the state, or after the program has."""
    first, second = (tb.Loader(Numbers(64), tb.Plan(64, 4, shuffle="full")) for _ in range(2))
    batches = first.epochs(3)
    for _ in range(received):
        next(batches)
    if received:
        second.load_state_dict(first.state_dict())
    found = []
    for epoch in epochs:
        second.sampler.set_epoch(epoch)
        found.append([(batch.epoch, batch.step) for batch in second])
    assert [each[0] for each in found] == wanted
    assert [each[-1][1] for each in found] == [15] * len(wanted)


@pytest.mark.parametrize("drop_last", [True, False])
def test_accelerate_takes_a_loader(drop_last: bool) -> None:
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader
    loader = tb.Loader(Numbers(1000), tb.Plan(1000, 300, drop_last=drop_last))
    assert loader.drop_last is loader.plan.drop_last is drop_last
    prepared = prepare(loader)
    found = [number for batch in prepared for number in batch.numpy().ravel().tolist()]
    assert found == list(range(900 if drop_last else 1000))


@pytest.mark.parametrize("stateful", [False, True])
def test_a_loader_of_accelerate_is_prefetched(stateful: bool) -> None:
    """Its class has ``state_dict``, which raises around a `DataLoader` without a state."""
    accelerate = pytest.importorskip("accelerate.data_loader")
    if stateful:
        pytest.importorskip("torchdata")
    batches = tb.prefetch(
        accelerate.DataLoaderShard(range(10), batch_size=2, use_stateful_dataloader=stateful)
    )
    items = iter(batches)
    found = [next(items).tolist(), next(items).tolist()]
    if stateful:
        state = batches.state_dict()
        batches.load_state_dict(state)
        items = iter(batches)
    else:
        with pytest.raises(AttributeError, match="state_dict"):
            batches.state_dict()
    assert found + [item.tolist() for item in items] == [[at, at + 1] for at in range(0, 10, 2)]
    if not stateful:
        assert len(list(batches)) == 5


AROUND = {
    "prefetch": tb.prefetch,
    "deep": lambda loader: tb.prefetch(loader, depth=50),
    "device": lambda loader: tb.prefetch(loader, device=Late("side")),
    "watch": lambda loader: tb.prefetch(tb.watch(loader)),
    "twice": lambda loader: tb.prefetch(tb.watch(tb.prefetch(loader))),
}


@pytest.mark.parametrize("around", AROUND)
def test_accelerate_sees_where_the_loop_is(around: str) -> None:
    """The thread is ahead, and gets to the end of the prepared loader first."""
    accelerate = pytest.importorskip("accelerate")
    import torch

    def epochs(prepare: Any) -> list[tuple[int, int, bool, int]]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        accelerator.step = 0
        train, test = (
            prepare(accelerator.prepare(torch.utils.data.DataLoader(torch.arange(count), batch_size=4)))
            for count in (42, 10)
        )
        found = []

        def use(batch: torch.Tensor) -> None:
            state = accelerator.gradient_state
            gathered = len(accelerator.gather_for_metrics(batch))
            found.append((int(batch[0]), gathered, state.end_of_dataloader, state.remainder))

        for epoch in range(3):
            for step, batch in enumerate(train):
                with accelerator.accumulate():
                    found.append((-1, int(accelerator.sync_gradients), False, 0))
                use(batch)
                if step == 5:  # a validation in the middle
                    for batch in test:
                        use(batch)
                if epoch == 1 and step == 7:
                    break
        assert not accelerator.gradient_state.in_dataloader
        return found

    prepared = []

    def once(loader: Any) -> Any:
        prepared.append(loader)
        return AROUND[around](loader)

    wanted = epochs(lambda loader: loader)
    assert epochs(once) == wanted
    again = iter(prepared)
    assert epochs(lambda _: next(again)) == wanted, "a loop over the loader itself"


@pytest.mark.parametrize("batch", [7, [(3, 7), (10, 20)]])
def test_the_data_set_has_the_length_of_the_records(batch: Any) -> None:
    data = np.arange(1000)
    loader = tb.Loader(Numbers(1000), tb.Plan(data, batch, rank=1, world=3))
    assert len(loader.dataset) == 1000
    assert loader.batch_size == 7


def test_a_plan_without_a_rank_under_a_launcher_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate's ``prepare`` leaves a loader as it is, so each process would read every record."""
    accelerate = pytest.importorskip("accelerate")
    data = Numbers(1000)
    accelerate.Accelerator(cpu=True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(tb.Plan(data, 4, rank="env")) == len(tb.Plan(data, 4, rank=0, world=2)) == 125
    assert len(tb.Plan(data, 4, rank=0, world=1)) == 250 and caplog.messages == []
    assert len(tb.Plan(data, 4)) == 250
    (message,) = caplog.messages
    assert "2 processes" in message and 'rank="env"' in message and "rank=0, world=1" in message
