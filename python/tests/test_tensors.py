"""Weights, group by group."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import model_of, spans
from late import Late
from safetensors.torch import save_file

import twinbuf as tb

LAYERS = 5
Saved = dict[str, torch.Tensor]


@pytest.fixture
def tensors(tmp_path: Path) -> Saved:
    """A model in two files, with an index."""
    torch.manual_seed(0)
    tensors = {"embed": torch.randn(7, 4)}
    for layer in range(LAYERS):
        tensors[f"layers.{layer}.up"] = torch.randn(4, 6).to(torch.bfloat16)
        tensors[f"layers.{layer}.down"] = torch.randn(6, 4)
    names = sorted(tensors)
    files = {"a.safetensors": names[:6], "b.safetensors": names[6:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


@pytest.fixture
def opened(tensors: Saved, tmp_path: Path) -> tb.Tensors:
    return tb.Tensors.open(tmp_path / "model.safetensors.index.json")


def layer_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def is_right(layer: tb.Group, tensors: Saved) -> bool:
    found = layer.torch()
    names = [f"layers.{layer.number}.down", f"layers.{layer.number}.up"]
    return sorted(found) == names and all(torch.equal(found[name], tensors[name]) for name in found)


def test_what_a_model_has(tensors: Saved, opened: tb.Tensors, tmp_path: Path) -> None:
    assert isinstance(opened, Mapping)
    assert list(opened) == list(opened.keys()) == sorted(tensors)
    assert opened.keys() & {"embed", "x"} == {"embed"}
    assert dict(opened.items()) == dict(opened) and list(opened.values()) == [opened[name] for name in opened]
    assert opened.get("embed") == opened["embed"] and opened.get("x") is None and opened.get("x", 3) == 3
    assert (len(opened), "embed" in opened, "x" in opened, 3 in opened) == (11, True, False, False)
    assert opened["layers.0.up"] == tb.TensorInfo("bfloat16", (4, 6), 48)
    assert [path.name for path in opened.paths] == ["a.safetensors", "b.safetensors"]
    with pytest.raises(KeyError, match="missing"):
        opened["missing"]
    with pytest.raises(FileNotFoundError):
        tb.Tensors.open(tmp_path / "c.safetensors")


@pytest.mark.parametrize(
    "options", [{}, {"cycle": True}, {"memory_limit": 16 << 20}, {"depth": 4, "cycle": True}]
)
def test_every_pass_has_every_group(tensors: Saved, opened: tb.Tensors, options: dict[str, int]) -> None:
    layers = tb.stream(opened, layer_of, **options)
    assert (len(layers), layers.kept) == (LAYERS, LAYERS if "memory_limit" in options else 0)
    for _ in range(3):
        numbers = []
        for layer in layers:
            assert is_right(layer, tensors)
            numbers.append(layer.number)
            del layer
        assert numbers == list(range(LAYERS))
    report = layers.report()
    # The use of a group that is kept counts as that of the one before it.
    assert (report.epochs, report.batches) == (3, LAYERS if layers.kept else 3 * LAYERS)


def test_groups_by_name_in_any_order(tensors: Saved, tmp_path: Path) -> None:
    opened = tb.Tensors.open([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    lists = [["layers.4.down", "embed"], ["layers.0.down"]]
    for group, names in zip(tb.stream(opened, lists), lists, strict=True):
        arrays = group.numpy()
        assert list(arrays) == names
        for name, array in arrays.items():
            assert np.array_equal(array, tensors[name].numpy())
            assert not array.flags.writeable
    with pytest.raises(TypeError, match="bfloat16"):
        next(iter(tb.stream(opened, [["layers.0.up"]]))).numpy()
    with pytest.raises(tb.FileError, match="nothing"):
        tb.stream(opened, [["nothing"]])
    with pytest.raises(tb.OptionError, match="group"):
        tb.stream(opened, lambda name: None)
    with pytest.raises(TypeError, match="a list of lists"):
        tb.stream(opened, 3)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        tb.stream(opened, lambda name: 1 / 0)


def test_a_tensor_outlives_everything(tensors: Saved, tmp_path: Path) -> None:
    layers = tb.stream(tb.Tensors.open(tmp_path / "a.safetensors"), lambda name: name)
    passing = iter(layers)
    kept = next(passing).torch()["embed"]
    assert next(passing).number == 1
    del passing, layers
    gc.collect()
    assert torch.equal(kept, tensors["embed"])


def test_one_slot_would_be_held_by_the_loop(opened: tb.Tensors) -> None:
    with pytest.raises(tb.OptionError, match="`depth`: wanted at least 2 slots, found 1"):
        tb.stream(opened, layer_of, depth=1)


def test_groups_that_are_kept_take_their_memory_along(
    tensors: Saved, opened: tb.Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    layers = tb.stream(opened, layer_of, name="layers")
    groups = list(layers)
    # A slot that nothing frees is waited for for 10 s.
    assert time.monotonic() - started < 5
    assert [group.number for group in groups] == list(range(LAYERS))
    assert all(is_right(group, tensors) for group in groups)
    assert layers.report().kept == LAYERS - 2
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("layers: all slots were in use for 0.1 s, so one got new memory")


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("cycle", [True, False])
def test_a_loop_variable_of_an_earlier_pass_holds_nothing_up(
    tensors: Saved, opened: tb.Tensors, depth: int, cycle: bool
) -> None:
    layers = tb.stream(opened, layer_of, depth=depth, cycle=cycle)
    kept = []
    started = time.monotonic()
    for left in (2, 0, LAYERS - 1, 3, 1, 2):
        for layer in layers:
            if layer.number == left:
                kept.append(layer)
                break
    # A slot that is held is waited for for 10 s.
    assert time.monotonic() - started < 5
    assert len(kept) == 6 and all(is_right(layer, tensors) for layer in kept)


def test_a_limit_spares_the_slot_of_a_loop_variable(tmp_path: Path) -> None:
    opened, found = model_of(tmp_path, {f"layers.{n}.up": torch.zeros(50_000) for n in range(8)}), set()
    for room in range(0, 2_000_000, 50_000):
        try:
            layers = tb.stream(opened, layer_of, memory_limit=(10 << 20) + room)
        except tb.OptionError:
            continue  # no room for the slots alone
        if layers.kept:
            found.add(layers.kept)
            numbers = []
            for _ in range(3):
                for layer in layers:
                    numbers.append(layer.number)
                    break
            assert numbers == [0, 0, 0]
    assert {1, 2, 3, 8} <= found


def test_a_loop_without_memory_goes_on_once_there_is_some(tmp_path: Path) -> None:
    opened = model_of(tmp_path, {f"layers.{n}.up": torch.full((50_000,), n) for n in range(8)})
    # Room for two slots, and for one group more.
    layers = tb.stream(opened, layer_of, keep=0, memory_limit=(10 << 20) + 3 * 410_000)
    passing, held, errors = iter(layers), [], 0
    while len(passing):
        try:
            held.append(next(passing))
        except MemoryError:
            errors += 1
            held.pop(0)
    assert errors == 5 and [layer.number for layer in held] == [5, 6, 7]


def test_a_new_pass_ends_the_one_before(opened: tb.Tensors) -> None:
    layers = tb.stream(opened, layer_of)
    old = iter(layers)
    assert next(old).number == 0
    iter(layers)  # a peek
    assert next(old).number == 1
    new = iter(layers)
    assert [layer.number for layer in new] == list(range(LAYERS))
    with pytest.raises(tb.LoaderError, match="another has begun"):
        next(old)
    assert list(new) == [], "it has ended, and stays so"


@pytest.mark.parametrize("eager", ["main", "side", ""])
@pytest.mark.parametrize("options", [{}, {"cycle": True}, {"keep": 2, "cycle": True}, {"depth": 3}])
def test_groups_on_a_device(
    tensors: Saved, opened: tb.Tensors, tmp_path: Path, eager: str, options: dict[str, Any]
) -> None:
    """Every kernel reads what its group is, also after a pass that was left early."""
    # Those of other tests: one whose start a signal cut off is listed for ever, though it never ran.
    others = threading.enumerate()
    device = Late(eager)
    layers = tb.stream(opened, layer_of, device=device, trace=tmp_path / "trace.json", **options)
    read: list[bool] = []
    kept = []

    def use(layer: tb.Group) -> None:
        for name, tensor in layer.torch().items():
            assert device.owns(tensor)
            device.kernel(tensor, lambda values, name=name: read.append(torch.equal(values, tensors[name])))

    for left in (LAYERS, 2, LAYERS, LAYERS):
        numbers = []
        for layer in layers:
            numbers.append(layer.number)
            assert repr(layer) == f"<Group {layer.number}: 2 tensors>" and len(layer) == 2
            use(layer)
            with pytest.raises(TypeError, match="the group is on a device: use `torch\\(\\)`"):
                layer.numpy()
            kept.append(layer)
            if len(numbers) == left:
                break
        assert numbers == list(range(left))
    device.finish()
    assert read == [True] * 2 * (3 * LAYERS + 2)
    for layer in kept:
        use(layer)
    device.finish()
    assert read == [True] * 4 * (3 * LAYERS + 2)
    report = layers.report()
    assert (report.epochs, report.batches) == (4, 3 * LAYERS + 2)
    gone, started = weakref.ref(layers), time.monotonic()
    del layers, layer
    # The thread of the last pass has a reference until it ends, and then closes the trace.
    while gone() is not None or any(
        of.name == "twinbuf-upload" and of not in others for of in threading.enumerate()
    ):
        gc.collect()
        assert time.monotonic() - started < 60, "its thread ends"
    assert {"gpu_queue_wait", "disk_load"} <= spans(tmp_path / "trace.json").keys()


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float8_e4m3fnuz"])
def test_floats_that_only_torch_has_are_bytes(tmp_path: Path, name: str) -> None:
    saved = torch.arange(8, dtype=torch.uint8).view(getattr(torch, name)).reshape(2, 4)
    (group,) = tb.stream(model_of(tmp_path, {"x": saved}), lambda _: 0)
    (found,) = group.torch().values()
    assert (found.dtype, found.shape) == (torch.uint8, (8,)) and np.array_equal(group.numpy()["x"], range(8))
    assert torch.equal(found.view(saved.dtype).reshape(2, 4).view(torch.uint8), saved.view(torch.uint8))
    with pytest.raises(tb.FileError, match=r"found F8_E.*: records cannot have this type, but a stream"):
        tb.Records.open_safetensors(tmp_path / "model.safetensors", "x")


def test_groups_in_another_order(tensors: Saved, opened: tb.Tensors) -> None:
    forward = range(LAYERS)
    layers = tb.stream(opened, layer_of, order=[forward, forward[::-1]], keep=2, cycle=True)
    assert layers.kept == 2
    for turn in range(4):
        numbers = []
        for layer in layers:
            numbers.append(layer.number)
            assert is_right(layer, tensors)
        assert numbers == list(forward[::-1] if turn % 2 else forward)
    for order in ([], [[0, 1]], [forward, [0] * LAYERS], [range(1, LAYERS + 1)]):
        with pytest.raises(tb.OptionError, match="order: wanted lists of 5 groups, each once, found"):
            tb.stream(opened, layer_of, order=order)


def test_page_locked_memory_counts(opened: tb.Tensors) -> None:
    layers = tb.stream(opened, layer_of, device=Late("side"), memory_limit=64 << 20)
    assert layers.kept == len(layers) == len(list(layers))
    with pytest.raises(tb.OptionError, match=r"memory_limit: wanted .* bytes for page-locked memory"):
        tb.stream(opened, layer_of, device=Late("side"), memory_limit=10)


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="without transformers")
def test_a_llama_in_a_third_of_its_memory(tmp_path: Path) -> None:
    program = Path(__file__).parent.parent / "examples/llama.py"
    assert len(program.read_text().splitlines()) <= 80
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, program, "12"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "the same logits" in done.stdout
