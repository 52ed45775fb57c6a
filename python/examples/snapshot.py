"""A snapshot of a model and its optimizer every few steps, written while the next steps run.

The tensors are copied into memory, so the next step may change them. The file is `safetensors`, and has its
name when it is whole: a program that is killed leaves the snapshot before.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from common import compare, descend, folder
from safetensors.torch import load_file, save_file

import twinbuf as tb

STEPS, EVERY, WIDTH = 40, 10, 1024
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def snapshot(path: Path, state: dict[str, torch.Tensor]) -> tb.Writer:
    """Copy the tensors, and return while they are being written. `finish` waits, and names the file."""
    header, size = {}, 0
    for name, tensor in state.items():
        place = [size, size := size + tensor.nbytes]
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Slots of 4 MiB that hold all of it: no call waits for the disk, which writes from the first one on.
    out = tb.Writer(path, None, depth=(size + len(text)) // 2**22 + 2)
    out.append(np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))
    for tensor in state.values():
        out.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return out


class Model:
    """Three layers, and Adam: 36 MiB."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.batches = torch.randn(STEPS, 64, WIDTH)

    def train(self, step: int) -> float:
        loss = torch.nn.functional.mse_loss(self.net(self.batches[step]), self.batches[step])
        return descend(self.optimizer, loss)

    def state(self) -> dict[str, torch.Tensor]:
        state = dict(self.net.state_dict())
        for number, values in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
        return state


def plain(path: Path) -> list[float]:
    model, losses = Model(), []
    for step in range(STEPS):
        losses.append(model.train(step))
        if step % EVERY == EVERY - 1:
            save_file(model.state(), path)
    return losses


def changed(path: Path) -> list[float]:
    model, losses = Model(), []
    saving = None  # added
    for step in range(STEPS):
        losses.append(model.train(step))
        if step % EVERY == EVERY - 1:
            if saving:  # added
                saving.finish()  # added
            saving = snapshot(path, model.state())  # changed
    saving.finish()  # added
    return losses


def main() -> None:
    torch.set_num_threads(1)
    with folder() as here:
        paths = [here / "plain.safetensors", here / "changed.safetensors"]
        compare(lambda: plain(paths[0]), lambda: changed(paths[1]))
        saved, written = map(load_file, paths)
        assert saved.keys() == written.keys()
        assert all(torch.equal(saved[name], written[name]) for name in saved)


if __name__ == "__main__":
    main()
