"""A loader whose batches are on a device: the same loop, order, state and report, every copy waited for."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sets
import torch
from conftest import every_dtype, model_of, no_forced_switch, saved, spans
from late import Late

import twinbuf as tb

Numbers = Callable[..., tb.Loader]


def all_right(loader: tb.Loader, device: Late, epochs: int) -> bool:
    """Whether every kernel of the loop has read what its batch should be."""
    read: list[tuple[np.ndarray, torch.Tensor]] = []
    for batch in loader.epochs(epochs):
        indices = batch.indices
        device.kernel(batch.torch(), lambda values, indices=indices: read.append((indices, values)))
        del batch
    device.finish()
    assert len(read) == epochs * len(loader)
    return all((values.numpy() == indices[:, None]).all() for indices, values in read)


def groups_of(count: int, folder: Path) -> tuple[tb.Tensors, list[list[str]]]:
    """A model, and so many groups of one tensor."""
    groups = [[str(step)] for step in range(count)]
    return model_of(folder, {name: torch.full((4,), int(name)) for (name,) in groups}), groups


@pytest.mark.parametrize("eager", ["main", "side", ""])
@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"depth": 2}, {"depth": 6, "workers": 2}])
def test_every_kernel_reads_its_batch(numbers: Numbers, eager: str, options: dict[str, Any]) -> None:
    device = Late(eager)
    assert all_right(numbers(device=device, **options), device, 3)
    # Read into page-locked slots, and copied from there.
    assert device.hosts == options.get("depth", 3 if options.get("overlap", True) else 2)


@pytest.mark.parametrize("eager", ["main", "side", ""])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("switch", ["", "0", "1"])
def test_a_copy_is_on_the_stream_that_the_switch_selects(
    numbers: Numbers, monkeypatch: pytest.MonkeyPatch, eager: str, overlap: bool, switch: str
) -> None:
    if switch:
        monkeypatch.setenv("TWINBUF_COPY_STREAM", switch)
    for copy_stream in (True, False):
        device = Late(eager)
        loader = numbers(device=device, overlap=overlap, copy_stream=copy_stream)
        assert all_right(loader, device, 2)
        copies = [stream for what, stream in device.log if what == "copy"]
        on_side = switch == "1" if switch else copy_stream
        assert copies == ["side" if on_side else "main"] * 2 * len(loader), copy_stream


@pytest.mark.parametrize(("edge", "eager"), [("direct", ""), ("keep", "side")])
def test_no_edge_can_be_left_out(numbers: Numbers, edge: str, eager: str) -> None:
    def is_right() -> bool:
        device = Late(eager, edge)
        try:
            return all_right(numbers(device=device), device, 3)
        except MemoryError:
            # Noticed when a slot of page-locked memory would have to be given up.
            assert edge == "direct"
            return False

    # A loop may be in time by chance, as where the sending thread waits for a processor.
    assert not all(is_right() for _ in range(20))


def test_an_interrupt_of_the_start_does_not_block_the_next_one(
    numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start waited for a thread that was never started."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    loader, ahead = numbers(device=Late("side")), tb.prefetch(range(4))
    for module, items in (("_loop", loader.epoch(0)), ("_prefetch", ahead)):
        with monkeypatch.context() as patch:
            patch.setattr(f"twinbuf.{module}._Items", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iter(items))
    assert sum(1 for _ in loader.epoch(0)) == 16
    assert list(ahead) == [0, 1, 2, 3]


def test_ctrl_c_in_close_ends_all_of_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came while the sending thread was waited for: close then waited for the load, up to its timeout."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def ask() -> None:
        with contextlib.suppress(tb.errors.LoaderError):  # that it was closed
            next(items)

    data = sets.Gated()
    loader = sets.loader_of(data, 4, device=Late("side"))
    items = iter(loader.epoch(0))
    thread = threading.Thread(target=ask)
    thread.start()
    assert data.asked.wait(60)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loader._sender, "_thread", types.SimpleNamespace(join=interrupted))
        loader.close(timeout=60)
    data.go.set()
    thread.join()


def test_a_batch_is_what_it_is_in_host_memory(numbers: Numbers) -> None:
    device = Late("side")
    loader = numbers(device=device)
    assert len(loader) == 16
    kept = list(loader.epoch(0))
    for step, batch in enumerate(kept):
        assert (batch.epoch, batch.step, len(batch)) == (0, step, 4)
        assert (batch.indices == loader.plan.indices(0, step)).all()
        assert device.owns(batch.torch()) and batch.torch() is batch.torch()
        assert torch.from_dlpack(batch).data_ptr() == batch.torch().data_ptr()
        assert repr(batch) == f"<Batch: epoch 0, step {step}, on a device>"
        for use in (batch.numpy, lambda batch=batch: memoryview(batch)):
            with pytest.raises(TypeError, match="on a device: use `torch\\(\\)`"):
                use()
        with batch:
            gone = weakref.ref(batch.torch())
        assert gone() is None
        with pytest.raises(ValueError, match="released"):
            batch.torch()


def test_a_batch_may_have_more_records_than_there_are(tmp_path: Path) -> None:
    data = saved(tmp_path / "three.npy", np.repeat(np.arange(3, dtype=np.int64)[:, None], 40, axis=1))
    device = Late("side")
    plan = tb.Plan(data, 8, drop_last=False, rank=1, world=2)
    (batch,) = tb.Loader(data, plan, device=device)
    # The ranks repeat records until all have as many.
    assert batch.indices.tolist() == [2, 0, 1, 2, 0, 1, 2, 0]
    assert batch.torch()[:, 0].tolist() == batch.indices.tolist()
    assert device.hosts == 16


def test_several_data_sets_and_every_type(tmp_path: Path) -> None:
    for dtype, path in every_dtype(tmp_path):
        device = Late("side")
        x = tb.Records.open_safetensors(path, "x").to(dtype)
        loader = tb.Loader((x, x), tb.Plan(x, 4, drop_last=False), device=device)
        whole = torch.arange(24).remainder(2).reshape(6, 4).to(dtype).view(torch.uint8)
        for batch, rows in zip(loader.epoch(0), whole.split(4), strict=True):
            pair = batch.torch()
            assert [each.dtype for each in pair] == [dtype, dtype]
            assert all(torch.equal(each.view(torch.uint8), rows) for each in pair)


def test_a_data_set_in_python() -> None:
    def before(indices: np.ndarray) -> None:
        if 36 in indices:
            raise LookupError("thirty-six")

    seen = 0
    loader = sets.loader_of(sets.Numbers(40, before), 4, name="train", device=Late("side"))
    with pytest.raises(LookupError, match="thirty-six") as caught:
        for batch in loader.epoch(0):
            assert (batch.torch().numpy() == batch.indices[:, None]).all()
            seen += 1
    assert seen == 9
    assert caught.value.__notes__ == ["train: epoch 0, step 9: the batch could not be read"]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_state_counts_what_was_received(numbers: Numbers, overlap: bool) -> None:
    def places(batches: Iterator[tb.Batch]) -> list[tuple[int, list[int]]]:
        return [(batch.epoch, batch.indices.tolist()) for batch in batches]

    host = numbers()
    states = [host.state_dict()]
    steps = []
    for batch in host.epochs(2):
        states.append(host.state_dict())
        steps.append((batch.epoch, batch.indices.tolist()))
    for taken in (0, 1, 2, 15, 16, 17, 31, 32):
        loader, resumed = (numbers(device=Late("side"), overlap=overlap) for _ in range(2))
        iterator = loader.epochs(2)
        first = places(itertools.islice(iterator, taken))
        assert loader.state_dict() == states[taken]
        del iterator
        gc.collect()
        assert loader.state_dict() == states[taken]
        json.dumps(states[taken])
        resumed.load_state_dict(loader.state_dict())
        assert resumed.state_dict() == states[taken]
        assert first + places(resumed.epochs(2)) == steps, taken
        assert resumed.state_dict() == host.state_dict()
        # Back to the middle of an iteration that continues.
        loader.load_state_dict(states[3])
        assert places(loader.epochs(2)) == steps[3:], taken


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("device", [None, "late"])
def test_the_state_within_map_counts_the_batch(numbers: Numbers, overlap: bool, device: str | None) -> None:
    """On a device it was the one before: whoever kept a state with each batch had that batch again."""

    def with_state(batch: tb.Batch) -> tuple[int, int]:
        return batch.step, loader.state_dict()["step"]

    loader = numbers(device=device and Late("side"), overlap=overlap, map=with_state)
    assert list(loader.epoch(0)) == [(step, step + 1) for step in range(16)]


def test_the_state_does_not_go_back_where_threads_share_the_loop(numbers: Numbers) -> None:
    """A slow `map` set the position after its own batch, behind that of another thread."""
    begun, go = threading.Event(), threading.Event()

    def slow(batch: tb.Batch) -> int:
        if batch.step == 0:
            begun.set()
            assert go.wait(60)
        return batch.step

    loader = numbers(device=Late("side"), map=slow)
    items = loader.epoch(0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(next, items)
        assert begun.wait(60)
        assert next(items) == 1
        go.set()
        assert first.result() == 0
    assert loader.state_dict()["step"] == 2


@pytest.mark.parametrize("device", [None, "late"])
def test_the_state_goes_on_after_a_batch_comes_again(numbers: Numbers, device: str | None) -> None:
    """On a device it stayed before a batch that was put back after a later one was taken."""
    inner = list[int]()

    def interrupted_once(batch: tb.Batch) -> int:
        if batch.step == 0 and not inner:
            inner.append(next(items))
            raise KeyboardInterrupt
        return batch.step

    loader = numbers(device=device and Late("side"), map=interrupted_once)
    items = loader.epoch(0)
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert inner == [1] and loader.state_dict()["step"] == 0
    assert [(next(items), loader.state_dict()["step"]) for _ in range(2)] == [(0, 2), (2, 3)]


def test_epochs_go_on_as_without_a_device(numbers: Numbers) -> None:
    loader = numbers(device=Late("side"))
    for epoch in range(3):
        for batch in loader:
            assert batch.epoch == epoch
            if batch.step == 5:
                break
    loader.set_epoch(7)
    assert next(iter(loader)).epoch == 7
    assert [batch.epoch for batch in loader.epochs(range(3, 5))] == [3] * 16 + [4] * 16


def test_an_iteration_over_no_epoch_keeps_the_position(numbers: Numbers) -> None:
    """It became that of the batches which were sent ahead: the next run would not have had them."""
    loader = numbers(device=Late("side"))
    items = loader.epochs(2)
    assert next(items).step == 0
    while json.loads(loader._position().text())["step"] < 2:
        time.sleep(0.001)
    assert list(loader.epochs(0)) == []
    assert loader.state_dict()["step"] == 1


def test_a_later_epoch_begins_behind_what_the_loop_received() -> None:
    """It began behind what was sent ahead, and so without the steps of another batch size before it."""
    data, found = sets.Numbers(48), list[Any]()
    first = sets.loader_of(data, 4)
    next(first.epochs(1))
    for device in (None, Late("side")):
        loader = sets.loader_of(data, [(6, 2), (14, 3), (1, 8)], device=device)
        loader.load_state_dict(first.state_dict())
        items = loader.epochs(3)
        while next(items).step < len(loader) - 1:
            pass
        while device and json.loads(loader._position().text())["epoch"] == 0:
            time.sleep(0.001)
        later = [batch.indices.tolist() for batch in loader.epochs(range(1, 2))]
        found.append((later, loader.state_dict()))
    assert found[0] == found[1]


def test_the_length_is_that_of_the_loops_epoch() -> None:
    """It was that of the epoch that batches were sent ahead of."""
    data = sets.Numbers(24)
    plan = tb.Plan(data, [(2, 3), (5, 6)])
    lengths: list[list[tuple[int, ...]]] = []

    def sent(loader: tb.Loader[tb.Batch]) -> tuple[int, ...]:
        position = json.loads(loader._position().text())
        return position["epoch"], position["step"]

    for device in (None, Late("side")):
        loader = tb.Loader(data, plan, device=device)
        lengths.append([])
        for items in (loader.epochs(2), loader, loader.epoch(1)):
            for batch in items:
                following = lengths[0][len(lengths[1]) + 1] if device else ()
                while len(following) == 3 and sent(loader) <= following[:2]:
                    time.sleep(0.001)
                lengths[-1].append((batch.epoch, batch.step, len(loader)))
            lengths[-1].append((len(loader),))
        loader.set_epoch(0)
        next(iter(loader))
        lengths[-1].append((len(loader),))
    assert lengths[0] == lengths[1]


def test_it_is_let_go_of(numbers: Numbers) -> None:
    loader = numbers(device=Late("side"))
    gone = weakref.ref(loader)
    iterator = loader.epoch(0)
    batch = next(iterator)
    del loader, iterator
    # Its thread ends as soon as it is out of the loader.
    while gone() is not None:
        gc.collect()
    assert (batch.torch().numpy() == batch.indices[:, None]).all()


def test_the_report_is_that_of_the_loop(numbers: Numbers) -> None:
    loader = numbers(device=Late("side"), name="train")
    assert "Nothing was measured" in str(loader.report())
    iterator: Iterator[tb.Batch] = loader.epochs(2)
    for _ in range(20):
        next(iterator)
    report = loader.report()
    # The thread is ahead, and does not count.
    assert (report.name, report.epochs, report.batches) == ("train", 2, 20)
    assert report.overlap and report.load > 0 and report.wait > 0 and report.transfer > 0 and report.advice
    assert report.wall == pytest.approx(report.wait + report.compute)
    assert str(report).startswith("train: 2 epochs, 20 batches") and "transfer" in f"{report:#}"
    assert list(iterator) and loader.report().batches == 32


def test_the_wait_for_the_device_is_use_and_not_a_childs(numbers: Numbers) -> None:
    loader, order = numbers(device=Late("side")), list[str]()
    iterator = loader.epochs(1)
    next(iterator)
    sender: Any = loader._sender  # type: ignore[attr-defined]
    real, upload = sender.recorder, sender._upload
    upload.catch_up, wait = lambda: (order.append("wait"), wait()), upload.catch_up
    asked = lambda: (order.append("asked"), real.asked())  # noqa: E731
    sender.recorder = types.SimpleNamespace(asked=asked, received=real.received, ended=real.ended)
    next(iterator)
    assert order[:2] == ["wait", "asked"]
    sender._pid += 1
    order.clear()
    sender.catch_up()
    assert not order


@pytest.mark.parametrize("of_stream", [False, True])
def test_the_time_of_copies_is_that_of_sending(
    numbers: Numbers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_stream: bool
) -> None:
    """A copy does not last until the sender's next request, for which that waits for the loop."""
    path, sent = tmp_path / "trace.json", list[int]()
    options: dict[str, Any] = {"device": Late("side"), "trace": path}
    loader: Any = tb.stream(*groups_of(16, tmp_path), **options) if of_stream else numbers(**options)
    begin = type(loader._sender).begin

    def noting(self: Any, loop: Any, batches: Any, is_sent: Any, *rest: Any) -> None:
        begin(self, loop, batches, lambda: (is_sent(), sent.append(0)), *rest)

    monkeypatch.setattr(type(loader._sender), "begin", noting)
    for step, batch in enumerate(loader if of_stream else loader.epochs(1)):
        del batch
        while len(sent) < min(step + 2, 16):
            time.sleep(0.001)
    report = loader.report()
    del loader
    gc.collect()
    copies, uses = spans(path)["gpu_transfer"], spans(path)["train"]
    assert len(copies) == len(uses) == 16
    end = lambda event: event["ts"] + event["dur"]  # noqa: E731
    assert all(end(copy) <= end(use) + 0.01 for copy, use in zip(copies[1:], uses, strict=False))
    assert report.transfer == pytest.approx(sum(copy["dur"] for copy in copies) / 1e6)


def test_groups_in_memory_are_copies_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    model, groups = groups_of(6, tmp_path)
    stream = tb.stream(model, groups, device=Late("side"), keep=4, trace=path)
    on_host = tb.stream(model, groups)
    for turn in (on_host, stream, stream, stream):
        assert [group.number for group in turn] == [*range(6)]
    report = stream.report()
    del stream, turn
    gc.collect()
    copies = spans(path)["gpu_transfer"]
    places = [(event["args"]["epoch"], event["args"]["step"]) for event in copies]
    assert places == [(turn, step) for turn in range(3) for step in range(6)]
    assert report.transfer == pytest.approx(sum(copy["dur"] for copy in copies) / 1e6)
    assert (report.batches, report.bytes) == (18, 3 * on_host.report().bytes)


def test_one_trace_has_the_reads_the_copies_and_the_loop(numbers: Numbers, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    loader = numbers(device=Late("side"), trace=path, name="train")
    for batch in loader.epochs(2):
        batch.release()
    loader.close()
    del loader
    gc.collect()
    events = json.loads(path.read_text())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            row = f"{rows[event['tid']]}: {event['name']}"
            spans.setdefault(row, []).append((event["args"]["epoch"], event["args"].get("step")))
    every = [(epoch, step) for epoch in range(2) for step in range(16)]
    assert spans["read: disk_load"] == spans["upload: gpu_transfer"] == spans["train: train"] == every
    assert spans["train: gpu_queue_wait"][:32] == every
    assert {row.partition(":")[0] for row in spans} == {"read", "upload", "train"}


def test_the_loop_is_a_row_of_its_loaders_process(
    numbers: Numbers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever names the file, which `close` completes."""
    numbers()  # makes the file
    data = tb.Records.open_npy(tmp_path / "numbers.npy")
    argument, environment = tmp_path / "argument.json", str(tmp_path / "environment.json")
    for trace, variable, written in (
        (argument, None, ["argument.json"]),
        (None, environment, ["environment.rank3.json"]),
        (argument, environment, ["environment.rank3.json"]),
        (argument, "", []),
    ):
        if variable is not None:
            monkeypatch.setenv("TWINBUF_TRACE", variable)
        plan = tb.Plan(data, 4, rank=3, world=4)
        with tb.Loader(data, plan, device=Late("side"), name="train", trace=trace) as loader:
            for batch in loader.epochs(1):
                batch.release()
        assert [path.name for path in tmp_path.glob("*.json")] == written
        for name in written:
            events = json.loads((tmp_path / name).read_text())
            named = lambda kind: {e["args"]["name"] for e in events if e["name"] == kind}  # noqa: B023, E731
            assert named("process_name") == {"train rank 3 of 4"}
            assert named("thread_name") == {"read", "upload", "train"}
            assert len({event["pid"] for event in events}) == 1
            assert sum(event["name"] == "train" for event in events) == 4
            (tmp_path / name).unlink()


@pytest.mark.parametrize("of_stream", [False, True])
def test_the_trace_is_whole_after_the_loop(numbers: Numbers, tmp_path: Path, of_stream: bool) -> None:
    """The last `next` waits for the thread, which refers to the loader until it ends.

    Without that wait this thread has the GIL from there to the assertion, and the other one needs it to end.
    """
    path = tmp_path / "trace.json"
    options: dict[str, Any] = {"device": Late("side"), "trace": path}
    with no_forced_switch():
        loader = tb.stream(*groups_of(16, tmp_path), **options) if of_stream else numbers(**options)
        gone = weakref.ref(loader)
        assert [item.number if of_stream else item.step for item in loader] == list(range(16))
        del loader
        assert gone() is None
    for name in ("disk_load", "gpu_transfer"):
        assert [event["args"]["step"] for event in spans(path)[name]] == list(range(16)), name


@pytest.mark.parametrize("device_depth", [2, 3, 5])
def test_as_many_batches_are_on_the_device_as_asked_for(numbers: Numbers, device_depth: int) -> None:
    device = Late("side")
    iterator = numbers(device=device, device_depth=device_depth).epochs(2)
    batch = next(iterator)
    copies = lambda: sum(entry == ("copy", "side") for entry in device.log)  # noqa: E731
    while copies() < device_depth:
        time.sleep(0.001)
    time.sleep(0.02)
    assert copies() == device_depth
    assert batch.step == 0


@pytest.mark.parametrize("options", [{}, {"device_depth": 4}, {"overlap": False}])
def test_a_loop_that_only_enqueues_work_is_held_back(numbers: Numbers, options: dict[str, Any]) -> None:
    device, ran = Late("side"), list[torch.Tensor]()
    for step, batch in enumerate(numbers(device=device, **options).epochs(2)):
        device.kernel(batch.torch(), ran.append)
        del batch
        assert step + 1 - len(ran) <= 2, f"step {step}"
    assert len(device._free) <= options.get("device_depth", 2) + 3


def test_a_device_of_host_memory_changes_nothing(numbers: Numbers) -> None:
    for device in ("cpu", torch.device("cpu"), None):
        batch = next(numbers(device=device).epoch(0))
        assert batch.torch().data_ptr() == batch.numpy().__array_interface__["data"][0]


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_on_a_real_device(numbers: Numbers, tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    for overlap in (True, False):
        loader = numbers(device=device, overlap=overlap)
        for batch in loader.epochs(20):
            tensor = batch.torch()
            assert tensor.device.type == device.type  # type: ignore[union-attr]
            wanted = torch.from_numpy(batch.indices)[:, None].expand(4, 4)
            assert torch.equal(tensor.cpu(), wanted)
    data = saved(tmp_path / "large.npy", np.repeat(np.arange(16, dtype=np.int64)[:, None], 5 << 17, axis=1))
    for batch in tb.Loader(data, tb.Plan(data, 4, shuffle="full"), device=device).epochs(20):
        assert (batch.torch().cpu().numpy() == batch.indices[:, None]).all()
