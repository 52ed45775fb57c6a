"""The Python programs in this README and in the one of the repository run."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

README = Path(__file__).parents[1] / "README.md"


def test_the_programs_in_the_readmes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 1024 * 100 + 1
    tokens = np.arange(1024 * 100 + 1, dtype=np.uint16)
    for number in range(2):
        (tmp_path / f"fineweb_train_{number}.bin").write_bytes(header.tobytes() + tokens.tobytes())
        np.save(tmp_path / f"images_{number}.npy", np.zeros((200, 4, 4, 3), dtype=np.uint8))
        np.save(tmp_path / f"labels_{number}.npy", np.zeros(200, dtype=np.int64))
    save_file({f"layers.{layer}.up": torch.ones(3) for layer in range(2)}, tmp_path / "a.safetensors")
    index = {"weight_map": {f"layers.{layer}.up": "a.safetensors" for layer in range(2)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for split in ("train", "val"):
        tokens.tofile(tmp_path / f"{split}.bin")
    monkeypatch.chdir(tmp_path)
    steps = 0

    def train(inputs: torch.Tensor, targets: torch.Tensor | None = None) -> None:
        nonlocal steps
        steps += 1
        if targets is not None:
            assert inputs.shape == targets.shape == (32, 1024)
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            assert inputs.dtype == torch.int64
            targets.view(-1)  # as nanoGPT's model does

    names: dict[str, Any] = {"np": np, "npt": npt, "os": os, "torch": torch, "Iterator": Iterator}
    names |= {"train": train, "use": torch.sum, "dataloader": [torch.ones(3)] * 4}
    names |= {"data_dir": ".", "block_size": 64, "batch_size": 12, "device": "cpu"}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 10
    for block in blocks:
        exec(block.replace('"cuda"', '"cpu"'), names)
    assert steps == 18 + 18
    for split in ("train", "val", "train"):
        x, y = names["get_batch"](split)
        assert x.shape == y.shape == (12, 64) and torch.equal(x[:, 1:], y[:, :-1])
        y.view(-1)
    assert sum(len(batch) for batch in names["loader"].epochs(1)) == 1000
    assert "3 epochs, 18 batches" in capsys.readouterr().out
    np.save(tmp_path / "train.npy", np.zeros((1024, 3), dtype=np.float32))
    blocks = re.findall(r"```python\n(.*?)```", (README.parents[1] / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(blocks[0], names)
    assert steps == 18 + 18 + 12
    assert "3 epochs, 12 batches" in capsys.readouterr().out
