"""Arrays look into the slot: one address, and writes are seen by all."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Case, every_dtype, saved

import twinbuf as tb


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_all_views_share_the_slots_memory(npy: Case) -> None:
    loader = tb.Loader(npy.data, tb.Plan(npy.data, 7))
    for batch in loader.epoch(0):
        views = [batch.numpy(), np.asarray(memoryview(batch)), np.from_dlpack(batch)]
        tensors = [batch.torch(), torch.from_dlpack(batch), torch.frombuffer(batch, dtype=torch.float32)]
        addresses = {address(view) for view in views} | {tensor.data_ptr() for tensor in tensors}
        assert len(addresses) == 1
        assert addresses.pop() % 64 == 0
        assert all(view.flags.writeable for view in views)
        tensors[0][0, 0, 0] = 42.0
        assert all(view[0, 0, 0] == 42.0 for view in views)
        assert tensors[1][0, 0, 0] == tensors[2][0] == 42.0
        del views, tensors


@pytest.mark.parametrize("number", range(15))
def test_every_type_of_torch(tmp_path: Path, number: int) -> None:
    dtype, path = every_dtype(tmp_path)[number]
    data = tb.Records.open_safetensors(path, "x").to(dtype)
    assert f"torch.{data.dtype}" == str(dtype)
    expected = torch.arange(24).remainder(2).reshape(6, 4).to(dtype)
    (batch,) = tb.Loader(data, tb.Plan(data, 6)).epoch(0)
    tensor = batch.torch()
    assert tensor.dtype == dtype
    assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    if dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        with pytest.raises(TypeError, match=r"use `torch\(\)`"):
            batch.numpy()
        with pytest.raises(BufferError):
            memoryview(batch)
    else:
        assert np.array_equal(batch.numpy(), expected.numpy())


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers(tmp_path: Path, dtype: str) -> None:
    array = (np.arange(12) * (1 + 2j)).reshape(6, 2).astype(dtype)
    data = saved(tmp_path / "a.npy", array)
    (batch,) = tb.Loader(data, tb.Plan(data, 6)).epoch(0)
    assert np.array_equal(batch.numpy(), array)
    assert np.array_equal(batch.torch().numpy(), array)


def test_records_of_one_number(tmp_path: Path) -> None:
    data = saved(tmp_path / "a.npy", np.arange(10))
    (batch,) = tb.Loader(data, tb.Plan(data, 10)).epoch(0)
    assert batch.numpy().tolist() == batch.torch().tolist() == list(range(10))
    assert bytes(batch) == np.arange(10).tobytes()


def test_dlpack_refuses_what_it_cannot_do(npy: Case) -> None:
    (batch,) = tb.Loader(npy.data, tb.Plan(npy.data, 203)).epoch(0)
    assert batch.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError):
        batch.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        batch.__dlpack__(dl_device=(2, 0))
    with pytest.raises(ValueError, match="stream"):
        batch.__dlpack__(stream=1)  # type: ignore[arg-type]
    assert batch.__dlpack__(dl_device=(1, 0), copy=False) is not None
    assert "dltensor_versioned" in repr(batch.__dlpack__(max_version=(1, 0)))
    assert "dltensor_versioned" not in repr(batch.__dlpack__())
