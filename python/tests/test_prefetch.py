"""Prefetch in a thread: the same items, errors and state, and no thread that is left behind."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import gc
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
from conftest import Rewinding, in_a_fork, in_threads, run_program, saved, spans, wait_for_threads
from sets import Numbers, loader_of

import twinbuf as tb
import twinbuf._prefetch


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_for_threads()


class Source:
    """An iterable that notes what is asked of it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.closed = threading.Event()
        self.fetched = threading.Semaphore(0)
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        try:
            for number in range(self.length):
                self.count += 1
                self.fetched.release()
                yield number
        finally:
            self.closed.set()

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 50])
def test_the_same_items_again_and_again(length: int, depth: int) -> None:
    batches = tb.prefetch(Source(length), depth=depth)
    assert len(batches) == length
    for _ in range(3):
        assert list(batches) == list(range(length))


def test_the_first_items_are_fetched_before_the_loop_asks() -> None:
    source = Source(100)
    items = iter(tb.prefetch(source, depth=3))
    for _ in range(3):
        assert source.fetched.acquire(timeout=300)
    assert list(items) == list(range(100))


def test_depth_items_are_fetched_ahead_and_no_more() -> None:
    source = Source(100)
    items = iter(tb.prefetch(source, depth=3))
    assert next(items) == 0
    for _ in range(4):  # the one in use and three ahead
        assert source.fetched.acquire(timeout=300)
    assert not source.fetched.acquire(timeout=0.05)
    assert source.count == 4


@pytest.mark.parametrize("depth", [0, -1, 2**16 + 1, 2**33, 2**63])
def test_a_depth_of_nothing_or_of_all_memory_is_refused(depth: int) -> None:
    with pytest.raises(tb.OptionError, match=f"depth: wanted .*, found {depth}$"):
        tb.prefetch([1], depth=depth)


@pytest.mark.parametrize("left", ["break", "kept", "close"])
@pytest.mark.parametrize("around", [lambda items: items, tb.watch, tb.prefetch])
def test_an_iterator_that_begins_again_does_so_after_break(
    around: Any, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Exclusive(Rewinding):
        inside = threading.Lock()

        def __iter__(self) -> Rewinding:
            assert not self.inside.locked()
            return super().__iter__()

        def __next__(self) -> int:
            with self.inside:
                return super().__next__()

    items = tb.prefetch(around(Exclusive()))
    kept = []
    for _ in range(20):
        iterator = iter(items)
        assert [next(iterator), next(iterator)] == [1, 2]
        if left == "kept":
            kept.append(iterator)
        if left == "close":
            items.close()
        del iterator
    assert list(items) == [1, 2, 3, 4, 5]
    for iterator in kept:  # the loops before have no part of it
        with pytest.raises(tb.LoaderError, match="this iteration is over: another has begun"):
            next(iterator)
    # Whether it begins again cannot be known. Each prefetcher tells once, if the program has not closed it.
    told = [1 for line in caplog.messages if "fetched ahead are lost" in line]
    assert len(told) == (left != "close") + (around is tb.prefetch)


@pytest.mark.parametrize("around", [lambda items: items, tb.watch, tb.prefetch])
def test_an_iterator_that_goes_on_does_so_after_break(around: Any, tmp_path: Any, caplog: Any) -> None:
    class Counts(Rewinding):
        next = -1

        def __iter__(self) -> Counts:
            """Return it, as a large part of all iterators does."""
            return self

    (tmp_path / "x").write_text("".join(f"{number}\n" for number in range(10)))
    with open(tmp_path / "x") as file:
        generator = (number for number in range(10))
        for iterator in (Counts(9), file, iter(range(10)), map(int, range(10)), generator):
            items = tb.prefetch(around(iterator))
            for number in items:
                if int(number) == 3:
                    break
            assert [int(number) for number in items] == [4, 5, 6, 7, 8, 9]
            assert list(items) == []
    assert caplog.messages == []


def test_a_loop_after_break_tells_that_it_has_the_same_iterator(caplog: pytest.LogCaptureFixture) -> None:
    class Holds:
        """An iterable with one generator for all loops."""

        numbers = (number for number in range(10))

        def __iter__(self) -> Iterator[int]:
            return self.numbers

    items = tb.prefetch(Holds())
    for _ in items:
        break
    assert list(items) == []
    assert "the same iterator: if that does not start again, items that were fetched ahead" in caplog.text


@pytest.mark.parametrize("around", [lambda items: items, tb.watch, tb.prefetch])
def test_a_loop_over_persistent_workers_begins_again_beside_one_that_is_kept(around: Any) -> None:
    """`iter` reset the only iterator while a thread was in it: items were lost, or an AssertionError came."""
    inside, makes, go = threading.Lock(), threading.Event(), threading.Event()

    class Only(Rewinding):
        def __next__(self) -> int:
            with inside:
                if self.next == 1:
                    makes.set()
                    go.wait(300)
                return super().__next__()

    class Workers:
        persistent_workers, only = True, Only()

        def __iter__(self) -> Iterator[int]:
            assert not inside.locked()
            return iter(self.only)

    def replace() -> None:  # the loop waits for the thread then
        go.set()
        type(items)._replace(items)

    items = tb.prefetch(around(Workers()))
    kept = iter(items)
    assert next(kept) == 1 and makes.wait(300)
    items._replace = replace  # type: ignore[method-assign]
    try:
        assert list(items) == [1, 2, 3, 4, 5]
    finally:
        go.set()
    with pytest.raises(tb.LoaderError, match="another has begun"):
        next(kept)


@pytest.mark.parametrize("raised", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_thread_that_was_kept_from_its_start_is_started_by_the_next_loop(
    raised: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter, failures = twinbuf._prefetch.starter, [raised]

    def fails_once(*arguments: Any) -> Any:
        start = starter(*arguments)

        def begin() -> None:
            if failures:
                raise failures.pop()
            start()

        return begin

    monkeypatch.setattr(twinbuf._prefetch, "starter", fails_once)
    numbers = tb.prefetch(number for number in range(9))
    with pytest.raises(type(raised)):
        iter(numbers)
    got: list[int] = []
    loop = threading.Thread(target=lambda: got.extend(numbers), daemon=True)
    loop.start()
    loop.join(60)  # without an end it waits for ever
    assert got == list(range(9))


def test_ctrl_c_in_iter_loses_nothing_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def interrupted(call: int) -> bool:
        """Begin a loop, with Ctrl-C after so many calls. Return whether there were so many."""
        left = call

        def after_each(frame: Any, event: str, function: Any) -> None:
            nonlocal left
            # Where the interpreter handles signals: where a function in Python begins, and after one in C.
            left -= event in ("call", "c_return")
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

        numbers = tb.prefetch(number for number in range(5))
        sys.setprofile(after_each)
        try:
            iter(numbers)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert list(numbers) == list(range(5)), call
        return left < 0

    call = 0
    while interrupted(call):
        call += 1
    assert call > 30 and caplog.messages == []


def test_threads_that_loop_over_a_generator_share_it(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        numbers, got = tb.prefetch(number for number in range(50)), list[int]()
        in_threads(3, lambda _: got.extend(numbers))  # noqa: B023
        assert sorted(got) == list(range(50))
    assert caplog.messages == []


def test_the_second_argument_is_no_device() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        tb.prefetch([1], 4)  # type: ignore[misc]


@pytest.mark.parametrize("around", [tb.prefetch, tb.watch])
def test_nothing_else_moves_a_generator_on(around: Any) -> None:
    wrapped = around(number for number in range(5))
    items = iter(wrapped)
    assert next(items) == 0
    for name in ("send", "throw"):
        assert not hasattr(wrapped, name) and not hasattr(items, name)
    assert list(items) == [1, 2, 3, 4]


def test_an_item_is_made_in_one_context(tmp_path: Any) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    local = threading.local()

    def numbers() -> Iterator[tuple[int, int, int]]:
        for _ in range(5):
            variable.set(variable.get() + 1)
            local.count = getattr(local, "count", 0) + 1
            yield variable.get(), local.count, threading.get_ident()

    variable.set(10)
    path = tmp_path / "trace.json"
    wrapped = tb.prefetch(numbers(), trace=path, name="numbers")
    found = list(wrapped)
    assert [item[:2] for item in found] == [(11 + n, 1 + n) for n in range(5)]
    assert len({item[2] for item in found}) == 1 and found[0][2] != threading.get_ident()
    assert variable.get() == 10
    wrapped.close()
    named = spans(path)
    assert len(named["disk_load"]) == 6 and len(named["train"]) == 5  # the last finds the end
    report = wrapped.report()
    assert (report.name, report.epochs, report.batches) == ("numbers", 1, 5)
    assert "5 batches are too few" in report.advice


def test_epochs_add_up() -> None:
    wrapped = tb.prefetch(range(7), depth=3)
    assert wrapped.report().batches == 0
    for epoch in range(3):
        assert sum(wrapped) == 21
        report = wrapped.report()
        assert (report.epochs, report.batches, report.depth) == (epoch + 1, 7 * (epoch + 1), 3)
    for _ in wrapped:
        break
    assert wrapped.report().batches == 22


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception that refuses attributes, `__traceback__` too."""

    code: int


@pytest.mark.parametrize("error", [KeyError, Frozen])
@pytest.mark.parametrize("kind", ["prefetch", "generate"])
def test_an_error_arrives_in_order_with_its_traceback(kind: str, error: Any) -> None:
    def number(index: int) -> int:
        if index == 1:
            raise raised
        return index

    raised = error(5)
    numbers = map(number, range(2))
    items = iter(tb.prefetch(numbers) if kind == "prefetch" else tb.generate(number, rounds=4))
    assert next(items) == 0
    with pytest.raises(error) as caught:
        next(items)
    assert caught.value is raised
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-1] == "number"
    assert list(items) == []


@pytest.mark.parametrize("kind", ["prefetch", "generate", "in line", "after"])
def test_code_that_asks_for_the_item_after_its_own_is_told(kind: str) -> None:
    def number(index: int) -> int:
        ready.wait()
        if index == 1 and kind == "in line":
            asked.wait()
        return next(items) if index == 1 and kind != "after" else index

    ready, asked = threading.Event(), threading.Event()
    # The loop calls `after` when it is its turn, and then waits for the code.
    after = {"in line": lambda _: asked.set(), "after": lambda _: next(items)}
    hooks: dict[str, Any] = {"after": after[kind]} if kind in after else {}
    rounds: Any = tb.prefetch(map(number, range(4))) if kind == "prefetch" else None
    items = iter(rounds or tb.generate(number, rounds=4, **hooks))
    ready.set()
    assert next(items) == 0
    wanted = "would wait for itself" if kind == "after" else "used it, which would wait for itself"
    with pytest.raises(tb.LoaderError, match=wanted):
        next(items)


def test_code_that_closes_what_runs_it_is_told() -> None:
    def number(index: int) -> int:
        ready.wait()
        try:
            items.close(timeout=None)
        except tb.LoaderError as error:
            told.append(str(error))
        return index

    ready, told = threading.Event(), list[str]()
    items = tb.prefetch(map(number, range(4)))
    iterator = iter(items)
    ready.set()
    assert list(iterator) == []
    items.close(timeout=None)
    assert told == ["code that makes the items of an iterator used it, which would wait for itself"]


def test_code_that_iterates_what_runs_it_is_told_also_while_a_loop_waits_for_it() -> None:
    class Numbers:
        def __iter__(self) -> Iterator[int]:
            return map(number, range(3))

    def number(index: int) -> int:
        if index == 1 and not waits.is_set():
            makes.set()
            waits.wait(300)
            try:
                iter(numbers)
            except tb.LoaderError as error:
                told.append(str(error))
        return index

    def replace() -> None:  # in the turn of the loop, which waits for the thread then
        waits.set()
        type(numbers)._replace(numbers)

    makes, waits, told, got = threading.Event(), threading.Event(), list[str](), list[int]()
    numbers = tb.prefetch(Numbers())
    iterator = iter(numbers)
    assert next(iterator) == 0 and makes.wait(300)
    numbers._replace = replace  # type: ignore[method-assign]
    del iterator
    loop = threading.Thread(target=lambda: got.extend(numbers), daemon=True)
    loop.start()
    loop.join(60)  # it waited for ever
    assert got == [0, 1, 2]
    assert told == ["code that makes the items of an iterator used it, which would wait for itself"]


def test_an_iterator_that_goes_on_after_an_error_is_asked_only_if_the_caller_asks() -> None:
    class Flaky(Rewinding):
        count = 0
        asked = threading.Semaphore(0)

        def __next__(self) -> int:
            self.count += 1
            self.asked.release()
            if self.count % 2 == 0:
                raise OSError(self.count)
            return self.count

    flaky = Flaky()
    items = iter(tb.prefetch(flaky))
    assert next(items) == 1
    with pytest.raises(OSError, match="2"):
        next(items)
    assert flaky.asked.acquire(timeout=300) and flaky.asked.acquire(timeout=300)
    assert not flaky.asked.acquire(timeout=0.05)
    assert next(items) == 3
    del items


@pytest.mark.parametrize("left", ["break", "a held generator", "cycle"])
def test_leaving_the_loop_closes_the_generator_and_ends_the_thread(left: str) -> None:
    source = Source(1000)

    def leave() -> None:
        items = iter(tb.prefetch(held))
        assert next(items) == 0
        if left == "cycle":
            cycle: list[Any] = [items]
            cycle.append(cycle)

    held = iter(source) if left == "a held generator" else source
    leave()
    if left == "cycle":
        gc.collect()
    assert source.closed.wait(300)
    if left == "a held generator":
        assert list(held) == []


def test_a_new_iteration_waits_for_the_thread_of_the_one_before() -> None:
    class Exclusive:
        busy = False

        def __iter__(self) -> Iterator[int]:
            assert not self.busy
            self.busy = True
            try:
                yield from range(100)
            finally:
                self.busy = False

    batches = tb.prefetch(Exclusive())
    for _ in range(50):
        for _ in batches:
            break


def test_an_exception_that_is_kept_does_not_hold_the_next_loop() -> None:
    """Its frames refer to those of the thread, which may have raised it after the loop was left."""
    left, kept = threading.Event(), []

    class Failing(Rewinding):
        def __next__(self) -> int:
            if (number := super().__next__()) == 2:
                left.wait()
                raise ValueError
            return number

    class Files:
        def __iter__(self) -> Iterator[int]:
            return iter(Failing())

    fetched = tb.prefetch(Files())
    for _ in range(3):
        left.clear()
        for item in fetched:
            assert item == 1
            break
        left.set()
        fetched.close(timeout=30)
        with pytest.raises(ValueError) as raised:
            list(fetched)
        kept.append(raised.value)
        fetched.close(timeout=30)
    assert len(kept) == 3


def test_close_ends_it() -> None:
    source = Source(1000)
    batches = tb.prefetch(source)
    items = iter(batches)
    next(items)
    batches.close()
    assert source.closed.is_set()
    assert list(items) == []


def test_items_are_not_kept() -> None:
    made: list[weakref.ref[Rewinding]] = []

    def make(_: int) -> Rewinding:
        item = Rewinding()
        made.append(weakref.ref(item))
        return item

    batches = iter(tb.prefetch(map(make, range(4)), depth=1))
    for count in range(4):
        item = next(batches)
        assert made[count]() is item
        del item
        assert made[count]() is None
    assert list(batches) == []


def test_attributes_are_those_of_the_iterable() -> None:
    source = Source(3)
    batches = tb.prefetch(source)
    assert batches.length == 3
    with pytest.raises(AttributeError):
        _ = batches.nothing
    with pytest.raises(TypeError):
        len(tb.prefetch(iter([1])))
    assert tb.prefetch(iter([1])) and tb.watch([1]) and not tb.prefetch([])
    with pytest.raises(AttributeError, match="state_dict"):
        tb.prefetch([1]).state_dict()


@runtime_checkable
class HasState(Protocol):
    """As Lightning and torchdata ask for a state."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("around", [tb.prefetch, tb.watch])
def test_a_state_is_there_if_the_iterable_has_one(around: Any) -> None:
    assert not isinstance(around([1]), HasState)
    stateful = around(Stateful())
    assert isinstance(stateful, HasState)
    stateful.load_state_dict({"next": 7})
    assert list(stateful) == [7, 8, 9]


def test_a_state_that_is_switched_off_is_none() -> None:
    class Off(Source):
        state_dict = None

    assert len(list(tb.prefetch(Off(3)))) == 3


def test_a_state_that_begins_with_the_iteration_is_none() -> None:
    class Late:
        def __iter__(self) -> Iterator[int]:
            for self.at in range(9):
                yield self.at

        def state_dict(self) -> int:
            return self.at

    batches = tb.prefetch(Late(), depth=4)
    items = iter(batches)
    assert next(items) == 0
    with pytest.raises(AttributeError, match="'at'"):
        batches.state_dict()  # its own counts what was fetched ahead
    assert list(items) == list(range(1, 9)) and batches.state_dict() == 8


def test_a_state_of_the_items_may_be_none() -> None:
    """It was that of the item before."""

    class Ends:
        at: int | None = 0

        def __iter__(self) -> Iterator[int]:
            for at in range(3):
                self.at = at + 1 if at < 2 else None
                yield at

        def state_dict(self) -> int | None:
            return self.at

    batches = tb.prefetch(Ends())
    assert [(batch, batches.state_dict()) for batch in batches] == [(0, 1), (1, 2), (2, None)]


class Stateful:
    """Counts as StatefulDataLoader does, and hands out its own dictionary."""

    def __init__(self) -> None:
        self.state = {"next": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < 10:
            self.state["next"] += 1
            yield self.state["next"] - 1
        self.state["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_the_state_is_that_of_the_items_received(depth: int) -> None:
    for taken in range(11):
        batches = tb.prefetch(Stateful(), depth=depth)
        items = iter(batches)
        assert [next(items) for _ in range(taken)] == list(range(taken))
        state = batches.state_dict()
        del items
        assert batches.state_dict() == state
        resumed = tb.prefetch(Stateful(), depth=depth)
        resumed.load_state_dict(state)
        assert list(resumed) == list(range(taken, 10)), taken
        assert resumed.state_dict() == {"next": 0}
        batches.load_state_dict(state)
        assert list(batches) == list(range(taken, 10)), taken


@pytest.mark.parametrize("between", [lambda items: items, tb.watch])
def test_around_another_one(between: Any) -> None:
    plain = tb.prefetch(between(tb.prefetch([1, 2, 3])))
    assert list(plain) == [1, 2, 3]
    assert not hasattr(plain, "state_dict")
    assert not hasattr(plain, "load_state_dict")


def test_a_state_is_loaded_while_the_thread_runs() -> None:
    batches = tb.prefetch(Stateful(), depth=5)
    items = iter(batches)
    assert [next(items), next(items)] == [0, 1]
    batches.load_state_dict({"next": 7})
    with pytest.raises(tb.LoaderError, match="a state was loaded"):
        next(items)
    assert list(batches) == [7, 8, 9]


def test_a_state_that_is_refused_in_the_middle_is_no_end_of_the_items() -> None:
    """The loop that went on got no error, as around a `Loader`: it seemed to have had all items."""
    batches = tb.prefetch(loader_of(Numbers(40), 4))
    items = iter(batches)
    assert next(items).step == 0
    state = batches.state_dict()
    with pytest.raises(tb.CheckpointError, match="range of records"):
        batches.load_state_dict(loader_of(Numbers(41), 4).state_dict())
    with pytest.raises(tb.LoaderError, match="a state was loaded"):
        next(items)
    assert batches.state_dict() == state
    batches.load_state_dict(state)
    assert [batch.step for batch in batches] == list(range(1, 10))


def test_the_device_of_the_thread_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `torch.cuda.set_device`, which each rank calls in its main thread."""
    current = threading.local()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        current.index = index
        yield
        del current.index

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "index", 0))
    monkeypatch.setattr(torch.cuda, "device", device)
    with torch.cuda.device(3):
        items = iter(tb.prefetch(torch.cuda.current_device() for _ in range(3)))
        made = tb.generate(lambda _: torch.cuda.current_device(), rounds=2)
    assert list(items) == [3] * 3 and list(made) == [3] * 2


@pytest.mark.parametrize("there", ["", "cuda", "cuda is_grad_enabled is_inference_mode_enabled"])
def test_a_loop_may_begin_while_another_thread_imports_torch(
    there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module lacks most names then: a third of the loops that began raised AttributeError."""
    partial = types.ModuleType("torch")
    for name in there.split():
        setattr(partial, name, getattr(torch, name))
    monkeypatch.setitem(sys.modules, "torch", partial)
    assert list(tb.prefetch([1, 2])) == list(tb.generate(lambda number: number + 1, rounds=2)) == [1, 2]


def test_the_mode_of_the_thread_is_the_callers() -> None:

    def modes() -> Iterator[tuple[bool, bool]]:
        yield torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    assert list(tb.prefetch(modes())) == [(True, False)]
    with torch.no_grad():
        assert list(tb.prefetch(modes())) == [(False, False)]
    with torch.inference_mode():
        assert list(tb.prefetch(modes())) == [(False, True)]


def loader(**options: Any) -> Any:
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(40.0), torch.arange(40))
    generator = torch.Generator().manual_seed(7)
    return DataLoader(data, batch_size=4, shuffle=True, generator=generator, **options)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_around_a_data_loader(options: dict[str, Any]) -> None:
    plain, wrapped = loader(**options), tb.prefetch(loader(**options))
    assert len(wrapped) == 10 and wrapped.batch_size == 4
    for _ in range(2):
        assert [x.tolist() for x, _ in wrapped] == [x.tolist() for x, _ in plain]
    for _ in wrapped:  # and left early
        break
    assert len(list(wrapped)) == 10


def resumes(make: Any, counts: Iterable[int]) -> None:
    """Assert that the state after so many items brings those that follow."""
    wanted = [np.asarray(item).tolist() for item in make()]
    for taken in counts:
        batches = make()
        items = iter(batches)
        first = [np.asarray(next(items)).tolist() for _ in range(taken)]
        state = batches.state_dict()
        batches.close()
        resumed = make()
        resumed.load_state_dict(state)
        assert first + [np.asarray(item).tolist() for item in resumed] == wanted, taken


@pytest.mark.parametrize("workers", [0, 2])
def test_around_a_stateful_data_loader(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        options = {"shuffle": True, "generator": torch.Generator().manual_seed(7), "num_workers": workers}
        return tb.prefetch(stateful.StatefulDataLoader(torch.arange(24), batch_size=4, **options))

    resumes(make, range(1, 6, 2 if workers else 1))


@pytest.mark.parametrize("depth", [1, 3])
def test_around_a_loader_of_files(depth: int, tmp_path: Any) -> None:
    data = saved(tmp_path / "x.npy", np.arange(40, dtype="int64"))
    plan = tb.Plan(data, batch=4, shuffle="full", seed=3)
    resumes(lambda: tb.prefetch(tb.Loader(data, plan), depth=depth), range(1, 10))


def test_a_forked_child_is_told_and_can_start_its_own() -> None:
    batches = tb.prefetch(range(100))
    items = iter(batches)
    next(items)
    numbers = tb.prefetch(number for number in range(9))
    next(iter(numbers))

    def tells() -> int:
        for of in (items, iter(numbers)):
            with pytest.raises(RuntimeError, match=r"threads do not survive a fork.*: make the iterator"):
                next(of)
        return sum(tb.prefetch(range(5)))

    assert in_a_fork(tells) == 10


def test_a_child_of_the_iterables_code_ends() -> None:
    """It has no loop that takes its items: its thread, which is its main thread, ends as without twinbuf."""
    program = """
import os, sys, time, twinbuf as tb
def numbers():
    yield 0
    if not os.fork():
        sys.exit(3)
    yield 1
assert list(tb.prefetch(numbers())) == [0, 1]
for _ in range(6000):
    if os.waitpid(-1, os.WNOHANG)[0]:
        raise SystemExit
    time.sleep(0.01)
os.killpg(0, 9)
"""
    assert run_program("import os; os.setpgid(0, 0)" + program)[:2] == (0, "")


def test_the_interpreter_exits_with_iterators_left() -> None:
    program = """
import twinbuf as tb
left = [iter(tb.prefetch(iter(range(10**9)))) for _ in range(4)]
print([next(each) for each in left])
"""
    assert run_program(program) == (0, "[0, 0, 0, 0]\n", "")


# A program that is stopped for longer than a thread that sleeps may take to leave.
STOPPED = """
import os, subprocess
subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -STOP {os.getpid()}; sleep 2; kill -CONT {os.getpid()}"])
raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["raise SystemExit(3)", "raise KeyError", STOPPED])
def test_the_interpreter_exits_while_an_item_is_computed(how: str) -> None:
    program = f"""
import threading, torch, twinbuf as tb
torch.set_num_threads(1)
begun = threading.Event()
def items():
    x = torch.rand(400, 400)
    yield x
    begun.set()
    for _ in range(1000):  # longer than a second
        x = x @ x / 400
    yield x
iterator = iter(tb.prefetch(items()))
next(iterator)
begun.wait()
{how}
"""
    status, _, err = run_program(program)
    assert status == (3 if "3" in how else 1), err
    assert "abort" not in err.lower() and "fatal" not in err.lower()


def test_torch_is_not_needed() -> None:
    program = """
import sys
sys.modules["torch"] = None
import numpy, twinbuf as tb
print(sum(int(x.sum()) for x in tb.prefetch([numpy.arange(3), numpy.arange(4)])))
"""
    status, out, err = run_program(program)
    assert (status, out) == (0, "9\n"), err
