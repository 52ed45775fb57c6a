"""Data sets written in Python."""

import contextlib
import dataclasses
import gc
import itertools
import operator
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import in_threads, saved
from interrupts import Now, handled
from sets import Numbers, loader_of

import twinbuf as tb
import twinbuf._drive
import twinbuf._loader
import twinbuf._loop


class Squares(Numbers):
    dtype, shape = np.dtype("float32"), (3,)

    def __init__(self, before: Callable[[Any], object] = lambda indices: None) -> None:
        super().__init__(50, before)
        self.threads: set[Any] = set()

    def read_into(self, indices: np.ndarray, out: memoryview) -> None:
        assert indices.dtype == np.int64
        assert (out.shape, out.format, out.readonly) == ((len(indices), 3), "f", False)
        self.threads.add(threading.current_thread().ident)
        self.before(indices)
        np.asarray(out)[...] = indices[:, None] ** 2


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"workers": 3}, {"depth": 4}])
def test_batches_are_what_was_filled_in(options: dict[str, Any]) -> None:
    data = Squares()
    plan = tb.Plan(data, 8, shuffle="full", seed=2, drop_last=False)
    loader = tb.Loader(data, plan, **options)
    seen = []
    for batch in loader.epochs(2):
        assert (batch.numpy() == (plan.indices(batch.epoch, batch.step) ** 2)[:, None]).all()
        seen += batch.indices.tolist()
    assert sorted(seen) == sorted(list(range(50)) * 2)
    main = threading.main_thread().ident
    assert data.threads == {main} if options.get("overlap") is False else main not in data.threads
    assert len(data.threads) <= options.get("workers", 1)


@pytest.mark.parametrize("kind", ["read_into", "map", "device", "device read_into"])
@pytest.mark.parametrize("overlap", [True, False])
def test_threads_that_share_an_iterator_get_each_batch_once(kind: str, overlap: bool, tmp_path: Path) -> None:
    inside: list[int] = []

    def alone(record: Any, seed: int = 0) -> Any:
        assert not inside, "two threads make a batch"
        inside.append(0)
        time.sleep(0.001)  # another thread runs
        inside.pop()
        return record

    data: Any = Squares(alone)
    if "read_into" not in kind:
        squares = np.repeat(np.arange(50, dtype="float32")[:, None] ** 2, 3, axis=1)
        data = saved(tmp_path / "a.npy", squares).map(alone, "float32", (3,))
    items = loader_of(data, 2, overlap=overlap, device=Now() if "device" in kind else None).epochs(2)
    found: list[list[tuple[int, int]]] = [[] for _ in range(4)]

    def use(thread: int) -> None:
        for batch in items:
            assert (batch.torch().numpy() == (batch.indices**2)[:, None]).all()
            found[thread].append((batch.epoch, batch.step))

    in_threads(4, use)
    assert all(places == sorted(places) for places in found)
    assert sorted(itertools.chain(*found)) == list(itertools.product(range(2), range(25)))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("errors", "again"),
    [
        ([SystemExit, SystemExit], [(0, 1), (1, 2)]),
        ([SystemExit, ValueError], [(0, 2)]),
        ([ValueError, SystemExit], [(1, 2)]),
    ],
)
def test_batches_that_two_threads_give_back_come_again(
    errors: list[type[BaseException]], again: list[tuple[int, int]], first: int
) -> None:
    """The one that was given back last took the place of the other, also if `map` had failed for it."""
    begun, go = ([threading.Event() for _ in errors] for _ in range(2))

    def map(batch: tb.Batch) -> int:
        if batch.step < 2 and not go[batch.step].is_set():
            begun[batch.step].set()
            assert go[batch.step].wait(60)
            raise errors[batch.step]
        return batch.step

    def take() -> None:
        with contextlib.suppress(*errors):
            next(items)

    loader, threads = loader_of(Numbers(8), 1, map=map), [threading.Thread(target=take) for _ in errors]
    items = loader.epoch(0)
    for thread, event in zip(threads, begun, strict=True):
        thread.start()
        assert event.wait(60)
    for step in (first, 1 - first):
        go[step].set()
        threads[step].join()
    rest = [(step, step + 1) for step in range(2, 8)]
    assert [(step, loader.state_dict()["step"]) for step in items] == [*again, *rest]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("device", [None, Now()])
def test_close_does_not_raise_an_interrupt_again(
    raised: type[BaseException], overlap: bool, device: Any
) -> None:
    read: list[int] = []

    def before(indices: np.ndarray) -> None:
        if indices[0] == 8:
            read.append(8)
            raise raised

    for reads in (1, 2):
        read.clear()
        loader = loader_of(Numbers(50, before), 8, overlap=overlap, device=device)
        items = loader.epoch(0)
        next(items)
        for _ in range(reads):
            with pytest.raises(raised):
                next(items)
            time.sleep(0.01)  # longer than a read
            assert (len(loader), loader.state_dict()["step"]) == (6, 1)
        try:
            loader.close()
        except raised:
            pytest.fail("close raised it again")
        assert len(read) == reads


@pytest.mark.parametrize("overlap", [True, False])
def test_its_exception_reaches_the_loop_as_it_was_raised(overlap: bool) -> None:
    class Failing(Numbers):
        def read_into(self, indices: np.ndarray, out: memoryview) -> None:
            if 30 in indices:
                raise LookupError("thirty")

    loader = loader_of(Failing(50), 8, name="train", overlap=overlap)
    steps = []
    with pytest.raises(LookupError, match="thirty") as caught:
        for batch in loader.epoch(0):
            steps.append(batch.step)
    assert steps == [0, 1, 2]
    assert caught.value.__notes__ == ["train: epoch 0, step 3: the batch could not be read"]
    assert "read_into" in "".join(traceback.format_exception(caught.value))
    assert len(list(zip(range(3), loader.epoch(0), strict=False))) == 3


class Silent(LookupError):
    """Its text is made by code of the program, which must not run below the native code that hands it on."""

    texts = 0

    def __str__(self) -> str:
        Silent.texts += 1
        return "silent"


class Tagged(LookupError):
    """Its `with_traceback` forgets `return self`, and it is false."""

    def with_traceback(self, trace: Any) -> Any:
        super().with_traceback(trace)

    def __len__(self) -> int:
        return 0


@dataclasses.dataclass
class Arrays(LookupError):
    """Two of them cannot be compared."""

    rows: np.ndarray = dataclasses.field(default_factory=lambda: np.arange(2))


class Raises(LookupError):
    """Its attributes raise."""

    def wrong(self) -> Any:
        raise ZeroDivisionError

    __cause__ = __context__ = __traceback__ = property(wrong)  # type: ignore[assignment]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", [Silent, Tagged, Arrays, Raises])
def test_an_exception_with_methods_of_its_own_reaches_the_loop(kind: Any, overlap: bool) -> None:
    def before(indices: np.ndarray) -> None:
        try:
            if 8 in indices:
                raise kind
        except LookupError as error:
            raise kind from error

    items = loader_of(Numbers(50, before), 8, overlap=overlap).epoch(0, timeout=60)
    assert next(items).step == 0
    with pytest.raises(kind) as caught:
        next(items)
    if kind is Silent:
        assert Silent.texts == 0
        assert caught.value.__notes__ == ["epoch 0, step 1: the batch could not be read"]


def test_what_fails_after_a_call_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: type[Exception], _: object) -> None:
        raise error

    monkeypatch.setattr(twinbuf._drive, "_clear", partial(fail, MemoryError))
    with pytest.raises(MemoryError):
        next(loader_of(Numbers(8, partial(fail, LookupError)), 8).epoch(0, timeout=60))


@pytest.mark.parametrize("grouped", [False, True])
def test_an_exception_with_others_in_it_keeps_nothing(grouped: bool) -> None:
    class Chained(Numbers):
        failing = True

        def fill(self, out: memoryview) -> None:
            if self.failing:
                raise KeyError("inner")

        def read_into(self, indices: np.ndarray, out: memoryview) -> None:
            try:
                self.fill(out)
            except KeyError as error:
                inner = error
                if not grouped:
                    raise LookupError("outer") from error
            else:
                return
            raise ExceptionGroup("outer", [ValueError(), inner])

    data = Chained()
    gone = weakref.ref(data)
    loader = loader_of(data, 2)
    with pytest.raises(ExceptionGroup if grouped else LookupError, match="outer") as caught:
        next(loader.epoch(0))
    inner = caught.value.exceptions[1] if isinstance(caught.value, ExceptionGroup) else caught.value.__cause__
    assert isinstance(inner, KeyError)
    assert "out" not in list(traceback.walk_tb(inner.__traceback__))[-1][0].f_locals
    data.failing = False
    assert len(list(loader.epoch(0))) == 4
    # A loader whose slots were kept would never go, nor what it reads from.
    del data, loader, caught, inner
    gc.collect()
    assert gone() is None


KEPT: dict[str, Callable[[memoryview], Any]] = {
    "view": lambda out: out,
    "slice": lambda out: out[1:],
    "array": np.asarray,
    "tensor": lambda out: torch.frombuffer(out, dtype=torch.float32),
}


@pytest.mark.parametrize("what", KEPT)
def test_one_that_keeps_its_slot_is_told_off(what: str) -> None:
    class Keeping(Squares):
        def read_into(self, indices: np.ndarray, out: memoryview) -> None:
            kept.append(KEPT[what](out))

    kept: list[Any] = []
    loader = loader_of(Keeping(), 8)
    with pytest.raises(BufferError, match="kept `out`"):
        next(loader.epoch(0))
    del loader
    gc.collect()
    if what == "view":
        with pytest.raises(ValueError, match="released"):
            kept[0][0]
        return
    # The memory is still there.
    np.asarray(kept[0])[:] = 1


def test_a_cycle_that_is_over_keeps_nothing() -> None:
    class Cyclic(Numbers):
        def read_into(self, indices: np.ndarray, out: memoryview) -> None:
            cycle: list[Any] = [out]
            cycle.append(cycle)

    assert len(list(loader_of(Cyclic(), 2).epoch(0))) == 4


def test_what_it_lacks_is_named() -> None:
    class Empty:
        shape: Any = (2,)

        def __len__(self) -> int:
            return 8

        def read_into(self, indices: np.ndarray, out: memoryview) -> None: ...

    def loader() -> Any:
        return tb.Loader(Empty(), tb.Plan(8, 2))  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="without `dtype`"):
        loader()
    Empty.dtype = property(lambda _: 1 / 0)  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        loader()
    Empty.dtype = torch.bfloat16  # type: ignore[attr-defined]
    assert next(loader().epoch(0)).torch().dtype == torch.bfloat16
    Empty.shape = (0,)
    with pytest.raises(tb.OptionError, match="at least one element"):
        loader()


@pytest.mark.parametrize("workers", [1, 3])
def test_one_that_refers_to_its_loader_is_collected(workers: int) -> None:
    data: Any = Numbers()
    data.loader = loader_of(data, 2, workers=workers)
    assert len(list(data.loader.epoch(0))) == 4
    gone, loader = weakref.ref(data), weakref.ref(data.loader)
    iterator = data.loader.epoch(1)
    del data
    gc.collect()
    # In use by way of the iterator.
    assert next(iterator).epoch == 1
    gone().iterator = iterator
    del iterator
    gc.collect()
    assert gone() is loader() is None


def test_a_map_style_data_set_of_torch() -> None:
    class Adapter(torch.utils.data.Dataset[Any]):
        dtype, shape = torch.float32, (2,)

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index, -index], dtype=torch.float32)

        def read_into(self, indices: np.ndarray, out: memoryview) -> None:
            rows = torch.frombuffer(out, dtype=torch.float32).view(-1, 2)
            for row, index in zip(rows, indices, strict=True):
                row.copy_(self[int(index)])

    data = Adapter()
    for batch in tb.Loader(data, tb.Plan(data, 5, shuffle="full")).epoch(0):
        assert (batch.torch()[:, 0].numpy() == batch.indices).all()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("use", ["keeps", "threads", "keeps, threads"])
def test_no_wait_outlasts_what_it_waits_for(use: str, overlap: bool) -> None:
    """Each of the batches took 0.05 s more: without overlap, or where threads keep batches."""
    # Another thread runs.
    data = Numbers(400, lambda indices: time.sleep(0.001 if "threads" in use else 0))
    items = loader_of(data, 2, overlap=overlap).epochs(1)
    since, steps = time.monotonic(), []

    def loop(_: int) -> None:
        kept: list[Any] = []
        for batch in items:
            steps.append(batch.step)
            kept = [*kept, batch][-3:] if "keeps" in use else []
            del batch

    in_threads(4 if "threads" in use else 1, loop)
    assert sorted(steps) == list(range(200))
    assert time.monotonic() - since < 2


@pytest.mark.parametrize("kind", ["read_into", "map"])
def test_a_signals_handler_asks_while_a_batch_is_made_in_its_thread(kind: str, tmp_path: Path) -> None:
    """The handler runs in the code that makes the batch, as that of a job that is preempted may."""

    def slow(record: np.ndarray, _: int = 0) -> np.ndarray:
        if record[-1] % 2:  # once for each batch
            signal.raise_signal(signal.SIGUSR1)
        return record

    def ask(*_: object) -> None:
        report, state = loader.report(), loader.state_dict()
        assert loader.reading() is None or loader.reading()["epoch"] == 0
        assert report.batches == len(got) == state["step"] and len(loader) == len(loader.plan)
        for call in (loader.close, lambda: next(items)):
            with pytest.raises(tb.LoaderError, match="a signal's handler"):
                call()
        asked.append(len(got))

    files = saved(tmp_path / "x.npy", np.arange(40)[:, None])
    data: Any = Numbers(50, slow) if kind == "read_into" else files.map(slow, "int64", (1,))
    if kind == "read_into":
        data.fingerprint = 1
    loader = loader_of(data, 2, overlap=False)
    items, asked, got = loader.epochs(1), [], []
    with handled(signal.SIGUSR1, ask):
        for batch in items:
            got.append(batch.step)
    assert asked == got == list(range(len(loader.plan)))


@pytest.mark.parametrize("kind", ["", "map", "device", "prefetch"])
def test_a_signals_handler_finds_the_state_before_the_batch_that_is_waited_for(kind: str) -> None:
    """It was the one after that batch: a job that saved it and ended had lost the batch."""

    def read(_: np.ndarray) -> None:
        assert asked.wait(60)
        asked.clear()
        signal.pthread_kill(main, signal.SIGUSR1)

    asked, main, ahead, got = threading.Event(), threading.get_ident(), [], []
    options: dict[str, Any] = {"map": {"map": lambda batch: batch}, "device": {"device": Now()}}
    loader = loader_of(Numbers(200, read), 2, **options.get(kind, {}))
    around = tb.prefetch(loader, device=Now()) if kind == "prefetch" else loader
    with handled(signal.SIGUSR1, lambda *_: ahead.append(around.state_dict()["step"] - len(got))):
        items = iter(around)
        for _ in range(100):
            asked.set()
            next(items)
            got.append(0)
    assert ahead == [0] * 100


def test_a_signals_handler_that_ends_the_loop_meanwhile_gives_it_no_batch() -> None:
    """The loop had one more batch, which the closed loader's state did not count."""

    def read(indices: np.ndarray) -> None:
        if indices[0] == 4:
            assert asked.wait(60)
            signal.pthread_kill(main, signal.SIGUSR1)

    asked, main = threading.Event(), threading.get_ident()
    loader = loader_of(Numbers(20, read), 2)
    items = loader.epoch(0)
    with handled(signal.SIGUSR1, lambda *_: loader.close()):
        assert [next(items).step for _ in range(2)] == [0, 1]
        asked.set()
        with pytest.raises(tb.LoaderError, match="closed"):
            next(items)
    assert loader.state_dict()["step"] == 2


def test_a_signals_handler_may_take_the_batch_that_was_read_without_overlap(tmp_path: Path) -> None:
    """The next one was read with the GIL, and no signal was handled before it counted."""

    def take(got: list[int]) -> None:  # one call from C: no signal is handled between the two
        got.extend(map(operator.attrgetter("step"), itertools.islice(items, 1)))

    def interrupt(*_: object) -> None:
        if taken:
            ahead.append(loader.state_dict()["step"] - len(got) - len(taken))
        else:
            take(taken)
            signal.setitimer(signal.ITIMER_REAL, 0.002)

    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "uint8", (4, 1 << 26))
    loader = loader_of(tb.Records.open_npy(tmp_path / "x.npy"), 1, overlap=False)
    items, got, taken, ahead = loader.epoch(0), list[int](), list[int](), list[int]()
    with handled(signal.SIGALRM, interrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        take(got)
    assert sorted([*got, *taken]) == list(range(len(got) + len(taken))) and not any(ahead)


def test_a_handler_that_asks_for_a_batch_at_any_time_takes_nothing_away() -> None:
    def ask(*_: object) -> None:
        try:
            got.append(next(items).step)
        except (StopIteration, tb.LoaderError) as error:
            asked.add(type(error))

    asked, got = set(), []
    items = loader_of(Numbers(4000, lambda indices: sum(range(300))), 2, overlap=False).epochs(1)
    with handled(signal.SIGALRM, ask):
        signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
        for batch in items:
            got.append(batch.step)
    assert sorted(got) == list(range(2000))
    assert any(issubclass(kind, tb.LoaderError) for kind in asked)


@pytest.mark.parametrize("sends", [False, True])
def test_a_handler_that_asks_for_a_batch_and_fails_costs_no_batch(sends: bool) -> None:
    """While a batch is read, and while one is sent to a device."""

    def signals(number: int) -> None:
        if number in raises:
            raises.remove(number)
            signal.raise_signal(signal.SIGUSR1)

    class Signals(Now):
        def copy(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
            super().copy(out, tensor)
            signals(int(tensor.flatten()[0]))

    raises, got = [0, 10, 38], []
    data = Numbers(40) if sends else Numbers(40, lambda indices: signals(indices[0]))
    items = loader_of(data, 2, overlap=False, device=Signals() if sends else None).epochs(1)
    with handled(signal.SIGUSR1, lambda *_: next(items)):
        for _ in range(3):
            with pytest.raises(tb.LoaderError, match="a signal's handler"):
                for batch in items:
                    got.append(batch.step)
        got += [batch.step for batch in items]
    assert got == list(range(20))


@pytest.mark.parametrize("device", [None, Now()])
def test_a_loop_goes_on_at_once_after_an_interrupt(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait first for a batch that only its own thread makes: one is wanted whenever it looks."""
    interrupted: set[int] = set()
    were_wanted: list[bool] = []

    def before(indices: np.ndarray) -> None:
        if indices[0] not in interrupted:
            interrupted.add(indices[0])
            raise KeyboardInterrupt

    def noted(make: Callable[..., bool], *arguments: Any) -> bool:
        were_wanted.append(make(*arguments))
        return were_wanted[-1]

    for module, name in ((twinbuf._loader, "fill_one"), (twinbuf._loop, "make_one")):
        monkeypatch.setattr(module, name, partial(noted, getattr(module, name)))
    items = loader_of(Numbers(20, before), 2, overlap=False, device=device).epoch(0)
    for step in range(10):
        with pytest.raises(KeyboardInterrupt):
            next(items)
        assert next(items).step == step
    assert len(were_wanted) >= 10 and all(were_wanted)


def test_a_batch_that_an_interrupt_kept_from_the_device_goes_with_its_loop() -> None:
    class Interrupts(Now):
        def copy(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
            super().copy(out, tensor)
            if out.flatten()[0] == 2:
                raise KeyboardInterrupt

    def batches() -> int:
        gc.collect()
        return sum(type(each) is tb.Batch for each in gc.get_objects())

    before = batches()
    loader = loader_of(Numbers(10), 2, overlap=False, device=Interrupts())
    items = loader.epoch(0)
    next(items)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            next(items)
    assert batches() == before + 1
    assert next(loader.epoch(1)).step == 0
    assert batches() == before


def test_sending_in_the_loop_changes_no_mode_of_its_thread() -> None:
    """Ctrl-C between a change and its end would leave the training without gradients."""
    modes: list[bool] = []

    class Sees(Now):
        def copy(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
            modes.append(torch.is_grad_enabled())
            super().copy(out, tensor)

    for batch in loader_of(Numbers(6), 2, overlap=False, device=Sees()).epoch(0):
        assert not batch.torch().requires_grad
    assert modes == [True] * 3


@pytest.mark.parametrize("device", [None, Now()])
def test_an_interrupt_stays_in_its_thread(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one that shares the iterator asks for the batch before the interrupted one would ask again."""
    kept: list[np.ndarray] = []
    got: list[int] = []

    class Interrupted(Squares):
        def read_into(self, indices: np.ndarray, out: memoryview) -> None:
            super().read_into(indices, out)
            if indices[0] == 8 and not kept:
                kept.append(np.asarray(out))  # nothing else may be read there any more
                other.start()
                raise KeyboardInterrupt

    def monotonic() -> float:
        # With a device, the loop that sends the batch asks first, in its turn.
        if kept and threading.current_thread() is not other and not skipped.pop():
            other.join(60)
        return time.monotonic()

    monkeypatch.setattr(twinbuf._loop, "monotonic", monotonic)
    data, skipped = Interrupted(), [False, device is not None]
    items = tb.Loader(data, tb.Plan(data, 8), overlap=False, device=device).epoch(0)
    other = threading.Thread(target=lambda: got.extend(batch.step for batch in items))
    next(items)
    with pytest.raises(KeyboardInterrupt):
        next(items)
    other.join()
    assert got == [1, 2, 3, 4, 5]
    assert kept[0][:, 0].tolist() == [number**2 for number in range(8, 16)]
