"""Programs and their ends: foreign code is left running, and the program must end with its own exit code.

python python/tests/ends.py [--python PATH]... [--only REGEX] [--every N] [--jobs N] [--limit SECONDS]
    [--quick] [--list] [--verbose]

Each case is a process. It prints a mark when its end begins. It is right if it has the exit code that it
would have without twinbuf, within 2 s of the mark, and prints what it should and no fatal error. `control`
cases are the same programs with a daemon thread of Python in place of twinbuf.

A thread in torch's C++ that wants the GIL while the interpreter ends aborts the process, in a plain program
too: where foreign code is in torch then, this counts as "plain", not as wrong. Packages are those of each
interpreter; torch is imported by the cases that name it or a device.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import gc
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

HOMES = ("read_into", "map", "prefetch", "prefetch next", "generate", "device", "stream")
POLLS = ("poll1", "poll10", "poll50", "queue", "retry")
WAITS = ("event", "spin", "matmul", "native")
STAYS = ("poll10", "event", "spin", "slow1.30")
TORCH = ("torch mm", "torch native")
CLOSED = ("read_into", "map", "prefetch", "device")  # where `close` waits
SLOW = tuple(f"slow{1 + step / 20:.2f}" for step in range(1, 21))
NEIGHBOURS = tuple(f"{kind}{percent}" for kind in ("python", "numpy") for percent in (3, 10, 100))
ENDS = ("fall", "exit3", "raise", "sigint", "sigterm")
LEFT = ("exception", "global", "cycle", "close", "close.2")
LOOPS = (
    *("files", "read_into", "prefetch", "prefetch loader", "generate", "stream", "device", "watch"),
    *("read_into in turn", "made", "hooks"),  # code of the program in the loop's thread
)
CALLS = (
    *("prefetch", "prefetch next", "prefetch list", "prefetch files", "prefetch read_into"),
    *("generate", "generate hooks", "files", "files in turn", "read_into", "read_into 2"),
    *("map", "made", "tuple", "stream", "watch", "watch prefetch", "records"),
    *("rest of files", "rest of read_into", "rest of prefetch", "rest of generate"),
)
WHENS = ("atexit before", "atexit after", "finalize", "del", "del cycle")
# Where something of twinbuf's calls a method of the program's objects.
PLACES = (
    *("len", "dtype", "fingerprint", "fspath", "array", "index", "groups", "order", "record", "log"),
    *("import", "trace"),
    *("device side", "device host", "device current"),
)
# What a daemon thread uses when a hook, called after twinbuf's own, waits for that thread.
JOINED = ("loader", "prefetch", "again", "load", "writer", "records", "open", "thread")
# What a daemon thread drops while the program ends.
DAEMONS = ("daemon items", "daemon rounds", "daemon data set")
# What a daemon thread asks for without a pause.
ASKED = ("report", "watched", "paths", "tensors", "file", "stream", "state")

CODES = {"raise": 1, "exit3": 3, "close raises": 1}
CODES |= dict.fromkeys(("sigint", "sigint wait", "close sigint"), -2)
CODES |= dict.fromkeys(("sigterm", "sigterm wait", "second"), 5)
# What is printed of the exception that ends the program.
TEXTS = {"raise": "ValueError: mine", "close raises": "LoaderTimeoutError: "}
TEXTS |= dict.fromkeys(("sigint", "sigint wait", "close sigint"), "KeyboardInterrupt")
LIMIT = 2.0  # seconds from the mark to the end of the process
# Not wrong: it was not run, or it ended as a program without twinbuf does.
RIGHT = ("", "skipped", "plain")
FATAL = re.compile("Fatal Python|terminate called|panicked|PanicException|FATAL|Segmentation|core dumped")
SKIPPED = 77


@dataclass(frozen=True)
class Case:
    group: str
    # foreign code: home, code, end, neighbour, how the loop is left
    words: tuple[str, ...]

    def __str__(self) -> str:
        return ":".join((self.group, *self.words))

    @property
    def row(self) -> str:
        """The line of the table that counts it."""
        at = {"control": 1, "busy": 3, "left": 4, "slow": 0, "finalizer": 1, "wait": 2}.get(self.group, 0)
        return f"{self.group}: {self.words[at]}"


def product(group: str, *words: Iterable[str]) -> list[Case]:
    return [Case(group, each) for each in itertools.product(*words)]


def foreign(group: str, *words: Iterable[str], busy: Any = ("quiet",), left: Any = ("break",)) -> list[Case]:
    """Homes, codes and ends, and what else the case has."""
    return product(group, *words, busy, left)


def every_case() -> list[Case]:
    homes = (*HOMES, "thread")
    cases = [
        *product("lock", ("files in turn",), ("fall", "exit3", "raise")),
        *foreign("poll", homes, POLLS, ENDS),
        *foreign("block", homes, WAITS, ENDS),
        *foreign("torch", homes, TORCH, ENDS),
        *foreign("slow", ("loader torch",), SLOW, ("fall", "raise", "sigint", "atexit")),
        *foreign("slow", ("map torch", "generate torch", "tokens torch"), SLOW, ("fall",)),
        *foreign("slow", ("device", "stream", "thread torch"), SLOW[::4], ("fall", "raise")),
        *foreign("busy", homes, ("event", "poll10", "spin"), ("fall", "exit3"), busy=NEIGHBOURS),
        *foreign("wait", homes, ("queue", *STAYS), ("sigint wait", "sigterm wait")),
        *foreign("second", homes, STAYS, ("second",)),
        *foreign("close", CLOSED, ("event", "poll10"), ("close raises", "close sigint")),
        *foreign("left", homes, ("poll10", "slow1.30"), ("fall",), left=LEFT),
        *product("daemon", (*LOOPS, "thread"), ("1 ms", "50 ms"), ("held", "free")),
        *product("preempted", LOOPS, ("50 ms",), ("held",)),
        *product("finalizer", (*CALLS, "thread"), WHENS),
        *product("called", (*PLACES, "thread"), ("poll10", "queue", "spin"), ("fall", "exit3")),
        *product("asked", ASKED, ("1", "2", "3"), ("fall", "exit3")),
        *product("joined", JOINED, ("fall",)),
        *product("dropped", ("items", "iterator", "thread", *DAEMONS), ("1", "2", "3")),
    ]
    none = {("generate", "close.2"), ("stream", "close"), ("stream", "close.2")}  # there is no such method
    cases = [case for case in cases if (case.words[0], case.words[-1]) not in none]
    return [
        Case("control", (*case.words[1:], case.group)) if case.words[0].startswith("thread") else case
        for case in cases
    ]


QUICK = re.compile(
    "|".join(
        (
            r"poll:(read_into|map|prefetch|prefetch next|generate):poll10:(fall|sigterm):.*",
            r"poll:(prefetch:queue:raise|read_into:retry:exit3|generate:poll1:sigint):.*",
            r"block:(prefetch:spin:fall|read_into:native:fall|map:matmul:exit3):.*",
            r"(block|wait|close):(read_into|map|prefetch|generate|device):event:(?!sigterm|sigint:).*",
            r"busy:(prefetch:event:fall:python10|read_into:event:exit3:numpy100):.*",
            r"wait:(read_into:queue|prefetch:spin):.*|second:(prefetch:poll10|generate:event):.*",
            r"lock:files in turn:exit3|preempted:prefetch:.*",
            r"called:(len|fingerprint|groups|record|import|trace):poll10:exit3|asked:.*:1:exit3",
            r"left:(prefetch:poll10:fall:quiet:global|generate:poll10:fall:quiet:cycle)",
            r"left:read_into:poll10:fall:quiet:close.2|slow:device:slow1.05:fall:.*",
            r"daemon:(files|read_into|prefetch|generate|made|hooks):50 ms:held",
            r"finalizer:(prefetch|generate|read_into):(atexit before|del)",
            r"joined:.*|dropped:(items|iterator|daemon .*):1",
            r"control:poll10:fall:quiet:break:poll",
        )
    )
)

# -----------------------------------------------------------------------------
# The child.


def mark() -> None:
    os.write(1, f"mark {time.monotonic()}\n".encode())


def finish(end: str) -> None:
    """The end of the program begins, with the exit code of its own."""
    mark()
    if end == "exit3":
        sys.exit(3)
    if end == "raise":
        raise ValueError("mine")


def daemon_thread(run: Callable[[], object]) -> None:
    threading.Thread(target=run, daemon=True).start()


def calibrated(multiply: Callable[[Any, Any], Any], square: Callable[[int], Any]) -> Callable[[], None]:
    """Return a single call that takes about 1.5 s without the GIL."""
    matrix = square(256)
    multiply(matrix, matrix)
    start = time.perf_counter()
    multiply(matrix, matrix)
    took = time.perf_counter() - start
    large = square(int(256 * (1.5 / took) ** (1 / 3)))
    return lambda: multiply(large, large)


def repeated(step: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        while True:
            step()

    return run


def foreign_code(code: str) -> Callable[[], object]:
    """Return what an item does once the loop is to be left."""
    if code.startswith("poll"):
        seconds = int(code[4:]) / 1000
        return repeated(lambda: time.sleep(seconds))
    if code.startswith("slow"):
        return lambda: time.sleep(float(code[4:]))
    if code == "queue":
        import queue

        waiting: queue.Queue[int] = queue.Queue()

        def get() -> None:
            with contextlib.suppress(queue.Empty):
                waiting.get(timeout=0.01)

        return repeated(get)
    if code == "retry":

        def attempt() -> None:
            try:
                open("/nowhere/at/all")  # noqa: SIM115
            except OSError:
                time.sleep(0.002)

        return repeated(attempt)
    if code == "event":
        return threading.Event().wait
    if code == "spin":

        def spin() -> None:
            while True:
                pass

        return spin
    if code in ("matmul", "native"):
        import numpy as np

        if code == "native":
            # Of whole numbers, without BLAS: that frees its memory at the exit of the process, also
            # while a thread is in it.
            return calibrated(np.matmul, lambda size: np.ones((size, size), "int64"))
        matrix = np.ones((300, 300))
        return repeated(lambda: matrix @ matrix)
    import torch

    torch.set_num_threads(1)
    if code == "torch native":
        return calibrated(torch.mm, lambda size: torch.ones(size, size))
    assert code == "torch mm"
    square = torch.ones(300, 300)
    return repeated(lambda: torch.mm(square, square))


def neighbour(kind: str) -> None:
    """Start a daemon thread that uses so many percent of a processor."""
    if kind == "quiet":
        return
    import numpy as np

    share, matrix = int(re.sub(r"\D", "", kind)) / 100, np.ones((200, 200))

    def work() -> None:
        while True:
            end = time.perf_counter() + 0.02 * share
            while time.perf_counter() < end:
                if kind.startswith("numpy"):
                    matrix @ matrix
            if share < 1:
                time.sleep(0.02 * (1 - share))

    daemon_thread(work)


class Squares:
    """A data set of Python's: two records in a batch, each its own number."""

    dtype, shape = "int64", (1,)

    def __init__(self, step: Callable[[int], object] = lambda number: None, length: int = 100) -> None:
        import numpy as np

        self.step, self.length, self.array = step, length, np.asarray

    def __len__(self) -> int:
        return self.length

    def read_into(self, indices: Any, out: memoryview) -> None:
        self.step(int(indices[-1]) // 2)
        self.array(out)[:] = indices[:, None]


class Next:
    def __init__(self, step: Callable[[int], int], length: int = 100) -> None:
        self.step, self.number, self.length = step, -1, length

    def __iter__(self) -> Next:
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number == self.length:
            raise StopIteration
        return self.step(self.number)


def plain(step: Callable[[int], object]) -> Iterator[int]:
    """Items from a daemon thread of Python: the control."""
    import queue

    items: queue.Queue[int] = queue.Queue(2)

    def work() -> None:
        for number in range(100):
            step(number)
            items.put(number)

    daemon_thread(work)
    while True:
        yield items.get()


def numbers(folder: str, name: str, records: int) -> Any:
    """Records in a file, each its own number."""
    import numpy as np

    import twinbuf as tb

    np.save(f"{folder}/{name}.npy", np.arange(records)[:, None])
    return tb.Records.open_npy(f"{folder}/{name}.npy")


def layers(folder: str) -> Any:
    """A model of 40 groups, each with its own number."""
    import json
    import struct

    import numpy as np

    import twinbuf as tb

    head, data = {}, b""
    for layer in range(40):
        place = [len(data), len(data) + 32]
        head[f"layers.{layer}.w"] = {"dtype": "F32", "shape": [8], "data_offsets": place}
        data += np.full(8, layer, "float32").tobytes()
    text = json.dumps(head).encode()
    with open(f"{folder}/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    return tb.Tensors.open(f"{folder}/model.safetensors")


def layer_of(name: str) -> int:
    return int(name.split(".")[1])


def device(step: Callable[[int], object]) -> Any:
    """A device whose copies are foreign code."""
    from late import Late

    class Device(Late):
        copies = -1

        def copy(self, out: Any, tensor: Any) -> None:
            self.copies += 1
            step(self.copies)
            super().copy(out, tensor)

    return Device("side")


def home_of(home: str, step: Callable[[int], int], folder: str) -> tuple[Any, Iterator[Any]]:
    """Return what has `close`, and the iterator."""
    if home.endswith(" torch"):
        import torch

        home = home.removesuffix(" torch")
    if home == "thread":
        items: Any = plain(step)
        return items, items

    import twinbuf as tb

    if home in ("prefetch", "prefetch next", "loader"):
        around: Any = Next(step) if home == "prefetch next" else (step(number) for number in range(100))
        if home == "loader":

            class Data(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
                def __len__(self) -> int:
                    return 100

                def __getitem__(self, index: int) -> Any:
                    return torch.tensor(step(index))

            around = torch.utils.data.DataLoader(Data(), batch_size=None)
        things = tb.prefetch(around)
        return things, iter(things)
    if home == "generate":
        items = tb.generate(step)
        return items, items
    if home == "stream":
        items = iter(tb.stream(layers(folder), layer_of, device=device(step)))
        return items, items
    if home == "read_into":
        data: Any = Squares(step)
    elif home == "tokens":
        data = tokens(step)
    elif home == "map":
        data = numbers(folder, "map", 100).map(lambda record, seed: mapped(step, record), "int64", (1,))
    else:
        assert home == "device"
        data = numbers(folder, "device", 100)
    loader = tb.Loader(data, tb.Plan(data, 2), device=device(step) if home == "device" else None)
    return loader, loader.epochs(1)


def mapped(step: Callable[[int], int], record: Any) -> Any:
    if record[0] % 2:
        step(int(record[0]) // 2)
    return record


def tokens(step: Callable[[int], int]) -> Any:
    """A data set that uses a tokenizer of transformers."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        os._exit(SKIPPED)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(200)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)

    class Text(Squares):
        def read_into(self, indices: Any, out: memoryview) -> None:
            indices[:] = tokenizer(" ".join(map(str, indices)))["input_ids"]
            super().read_into(indices, out)

    return Text(step)


kept: list[Any] = []  # until the end of the interpreter


def program(words: tuple[str, ...], folder: str) -> None:
    """The loop is left while an item is being made by foreign code."""
    home, code, end, busy, left = words
    if end == "atexit":
        # Called before twinbuf's own, and before that of `concurrent.futures`.
        import atexit

        import twinbuf as tb  # noqa: F401

        atexit.register(last, lambda: program((home, code, "fall", busy, left), folder))
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    act, inside = foreign_code(code), threading.Event()

    def step(number: int) -> int:
        if number >= 2:
            inside.set()
            act()
        return number

    things, items = home_of(home, step, folder)
    neighbour(busy)
    if left == "global":
        kept.append(items)
    elif left == "cycle":
        cycle: list[Any] = [items]
        cycle.append(cycle)
        gc.disable()
        del cycle

    def leave() -> None:
        assert inside.wait(20), "no item was begun"
        time.sleep(0.05)
        if end == "raise":
            finish(end)
        if end.endswith("wait"):
            number = signal.SIGINT if end == "sigint wait" else signal.SIGTERM
            daemon_thread(lambda: soon(number, 0.2, True))
        elif end.startswith("sig"):
            mark()
            os.kill(os.getpid(), signal.SIGINT if end == "sigint" else signal.SIGTERM)
            time.sleep(1)
            raise AssertionError("no signal was delivered")
        elif end == "second":
            mark()
            daemon_thread(lambda: soon(signal.SIGTERM, 0.3, False))
            sys.exit(5)
        elif left == "exception":
            raise KeyError("of the loop")

    try:
        for count, _ in enumerate(items):
            if count == 1:
                leave()
                if not end.endswith("wait"):
                    break
    except KeyError:
        pass
    if left == "close" or left == "close.2":
        with contextlib.suppress(TimeoutError):
            things.close(**({"timeout": 0.2} if left == "close.2" and home != "thread" else {}))
    if end in ("close raises", "close sigint"):
        mark()
        if end == "close sigint":
            daemon_thread(lambda: soon(signal.SIGINT, 0.3, False))
        things.close(**({"timeout": 60} if end == "close sigint" else {}))
    del items, things
    finish(end)


def last(run: Callable[[], None]) -> None:
    """Run a program in an exit function. CPython 3.12 before 3.12.2 starts no thread there: `LoaderError`."""
    try:
        run()
    except RuntimeError as error:
        if "LoaderError" not in [kind.__name__ for kind in type(error).__mro__]:
            raise
        try:
            threading.Thread(target=int, daemon=True).start()
        except RuntimeError:
            mark()
        else:
            raise


def soon(number: int, seconds: float, begins: bool) -> None:
    time.sleep(seconds)
    if begins:
        mark()
    os.kill(os.getpid(), number)


def lock(words: tuple[str, ...], folder: str) -> None:
    """A daemon thread reads a batch itself for seconds, with the loader's lock, when the program ends."""
    import twinbuf as tb

    path, going = f"{folder}/long", threading.Event()
    with open(path, "wb") as file:
        file.truncate(10**10)
    data = tb.Records.open_headerless(path, "uint8")
    # Many small reads, anywhere in a file of holes.
    loader = tb.Loader(data, tb.Plan(data, 3 * 10**7, shuffle="full", seed=1), overlap=False)

    def loop() -> None:
        items = loader.epochs(1)
        going.set()
        next(items)
        os.write(1, b"read\n")

    daemon_thread(loop)
    going.wait()
    time.sleep(0.2)
    finish(words[1])


def daemon(words: tuple[str, ...], folder: str) -> None:
    """A daemon thread loops when the program ends: the end must not look like that of its loop."""
    kind, pace, hold = words
    seconds = int(pace.split()[0]) / 1000
    if hold == "held":
        import atexit

        # Registered before twinbuf's own, so called after it: the thread has time to see the error.
        atexit.register(lambda: time.sleep(0.3))
    write, going = os.write, threading.Event()

    def slow(number: int) -> int:
        time.sleep(seconds)
        return number

    def items() -> Any:
        if kind == "thread":
            return map(slow, range(10**6))
        import twinbuf as tb

        if kind == "prefetch":
            return tb.prefetch(map(slow, range(10**6)))
        if kind == "generate":
            return tb.generate(slow)
        if kind == "watch":
            return tb.watch(map(slow, range(10**6)))
        if kind == "hooks":
            return tb.generate(lambda number: number, before=slow, after=slow)
        if kind == "stream":
            stream = tb.stream(layers(folder), layer_of, cycle=True)
            return itertools.chain.from_iterable(itertools.repeat(stream))  # pass after pass
        of_files = kind in ("files", "made", "device")
        data: Any = numbers(folder, "files", 10**6) if of_files else Squares(slow, 10**6)
        made: Any = {"map": lambda batch: slow(batch.step)} if kind == "made" else {}
        if kind == "device":
            made = {"device": device(slow)}
        loader = tb.Loader(data, tb.Plan(data, 2), overlap=kind != "read_into in turn", **made)
        return tb.prefetch(loader) if kind == "prefetch loader" else loader.epochs(1)

    things = items()

    def loop() -> None:
        error = "epoch complete"
        try:
            for count, _ in enumerate(things):
                if count == 3:
                    going.set()
                if kind in ("files", "stream"):
                    time.sleep(seconds)
        except BaseException as caught:
            error = "saw " + type(caught).__name__
        write(1, f"{error}\n".encode())

    daemon_thread(loop)
    going.wait()
    time.sleep(0.12)
    mark()


def called(words: tuple[str, ...], folder: str) -> None:
    """A daemon thread is in a method of the program's objects, which twinbuf called, at the end."""
    place, code, end = words
    act, inside = foreign_code(code), threading.Event()

    def stay(*_: object) -> Any:
        inside.set()
        act()

    def use() -> None:
        if place == "thread":
            return stay()
        import logging

        import twinbuf as tb

        class Data(Squares):
            if place in ("dtype", "fingerprint"):
                locals()[place] = property(stay)

        class Own(list[Any]):
            if place in ("len", "fspath", "array", "index"):
                locals()[f"__{place}__"] = stay
            __iter__ = stay  # type: ignore[assignment]

        files, model = numbers(folder, "files", 8), layers(folder)
        if place == "len":
            tb.Plan(Own(), 2)
        elif place in ("dtype", "fingerprint"):
            tb.Loader(Data(), tb.Plan(100, 2))  # type: ignore[arg-type]
        elif place == "fspath":
            tb.Records.open_npy(Own())  # type: ignore[arg-type]
        elif place == "array":
            tb.Plan(files, 2, records=Own())
        elif place == "index":
            tb.Plan(files, 2, seed=Own())  # type: ignore[arg-type]
        elif place == "groups":
            tb.stream(model, stay)
        elif place == "order":
            tb.stream(model, [["layers.0.w"]], order=Own())
        elif place == "import":
            # The first import of torch, which takes seconds.
            sys.meta_path.insert(0, type("Finder", (), {"find_spec": stay}))  # type: ignore[arg-type]
            next(iter(tb.Loader(files, tb.Plan(files, 2)))).torch()
        elif place == "trace":
            tb.watch([], trace=type("Own", (), {"__fspath__": stay})())
        elif place == "record":
            files.map(stay, "int64", (1,))[0]
        elif place == "log":
            logging.getLogger("twinbuf").addFilter(stay)
            list(tb.Loader(files, tb.Plan(files, 2), depth=2))
        else:
            place_of_device = device(lambda number: number)
            setattr(place_of_device, place.split()[1], stay)
            if place == "device current":
                iter(tb.stream(model, [["layers.0.w"]], device=place_of_device))
            else:
                tb.Loader(files, tb.Plan(files, 2), device=place_of_device)

    daemon_thread(use)
    assert inside.wait(20), "it was not called"
    time.sleep(0.05)
    finish(end)


def asked(words: tuple[str, ...], folder: str) -> None:
    """A daemon thread asks without a pause at the end: what answers must not run Python below Rust."""
    import twinbuf as tb

    files, model = numbers(folder, "files", 8), layers(folder)
    loader, going = tb.Loader(files, tb.Plan(files, 2)), threading.Event()
    watched = tb.watch([1, 2])
    list(loader), list(watched)

    def fail() -> None:
        with contextlib.suppress(tb.Error, KeyError):
            tb.Records.open_npy("/none") if words[0] == "file" else tb.stream(model, [["none"]])

    asks: dict[str, Callable[[], Any]] = {
        "report": loader.report,
        "watched": watched.report,
        "paths": lambda: files.paths,
        "tensors": lambda: model.paths,
        "file": fail,
        "stream": fail,
        "state": loader.state_dict,
    }

    def loop() -> None:
        while True:
            asks[words[0]]()
            going.set()

    daemon_thread(loop)
    assert going.wait(20), "no answer"
    time.sleep(0.05)
    finish(words[-1])


def joined(words: tuple[str, ...], folder: str) -> None:
    """A hook that was registered before twinbuf's own, so is called after it, stops a daemon thread."""
    import atexit

    kind, going, stops, ended = words[0], threading.Event(), threading.Event(), threading.Event()
    write = os.write

    def stop() -> None:
        stops.set()
        ended.wait()
        write(1, b"joined\n")

    atexit.register(stop)

    def step() -> bool:
        going.set()
        return not stops.wait(0.001)

    if kind != "thread":
        import twinbuf as tb

        rows = numbers(folder, "rows", 1000)

    class Stays:
        def __iter__(self) -> Iterator[int]:
            yield 0
            going.set()
            threading.Event().wait()

        def state_dict(self) -> Any:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    def use() -> None:
        if kind == "loader":
            with tb.Loader(rows, tb.Plan(rows, 2)) as loader:
                for _ in loader.epochs(100):
                    going.set()
                    stops.wait()
        elif kind == "prefetch":
            things = tb.prefetch(range(10**6))
            for _ in things:
                going.set()
                stops.wait()
                break
            things.close()
        elif kind in ("again", "load"):
            things = tb.prefetch(Stays())
            next(iter(things))
            stops.wait()
            iter(things) if kind == "again" else things.load_state_dict({})
        elif kind == "writer":
            with tb.Writer(f"{folder}/out.npy", "int64", (1,)) as out:
                while step():
                    out.append([[1]])
        elif kind == "records":
            while step():
                _ = rows[5]
            _ = rows[5]
        elif kind == "open":
            while step():
                pass
            numbers(folder, "more", 10)
        else:
            while step():
                pass

    def run() -> None:
        try:
            use()
        except BaseException as error:
            write(1, f"saw {type(error).__name__}\n".encode())
        finally:
            ended.set()

    daemon_thread(run)
    assert going.wait(20), "it does not loop"
    mark()


def dropped(words: tuple[str, ...], folder: str) -> None:
    """What no loop needs is freed by slow Python code at the end, in the thread that used it."""

    class Slow:
        def __del__(self, sleep: Any = time.sleep, steps: range = range(3000)) -> None:
            for _ in steps:
                sleep(0.001)

    class Numbers(Slow):
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return 0

    def make(number: int) -> Slow:
        return Slow()

    if words[0] == "thread":
        made, going = [Slow()], threading.Event()

        def free() -> None:
            going.set()
            made.clear()

        daemon_thread(free)
        going.wait()
    else:
        import twinbuf as tb

        if words[0] in DAEMONS:
            going = threading.Event()

            class SlowSquares(Slow, Squares):
                """A data set that is freed by slow code."""

            def use() -> None:
                if words[0] == "daemon data set":
                    data: Any = SlowSquares()
                    loader = tb.Loader(data, tb.Plan(data, 2))
                    del data
                    next(loader.epochs(1))
                else:
                    rounds = words[0] == "daemon rounds"
                    items = tb.generate(make) if rounds else iter(tb.prefetch(map(make, range(10)), depth=4))
                    kept.append(next(items))
                    time.sleep(0.1)
                going.set()  # and then it drops them

            daemon_thread(use)
            going.wait()
        elif words[0] == "items":
            kept.append(items := iter(tb.prefetch(map(make, range(10)), depth=4)))
            kept.append(next(items))
        else:
            next(iter(tb.prefetch(Numbers())))
        time.sleep(0.1)
    finish("exit3")


def calls(folder: str) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Return functions that iterate, and return what came and what should have. They need no global name."""
    import numpy as np

    import twinbuf as tb

    files, squares, model = numbers(folder, "files", 8), Squares(length=8), layers(folder)
    plan, ten, next_kind = tb.Plan(files, 2), range(10), Next
    of_files = tb.Loader(files, plan)
    in_turn = tb.Loader(files, plan, overlap=False)
    of_squares: Any = tb.Loader(squares, plan)  # type: ignore[arg-type]
    two: Any = tb.Loader(squares, plan, workers=2)  # type: ignore[arg-type]
    changed = files.map(lambda record, seed: record + 1, "int64", (1,))
    of_map = tb.Loader(changed, plan)
    made = tb.Loader(files, plan, map=lambda batch: int(batch.numpy().sum()))
    pair = tb.Loader((files, files), plan)
    stream = tb.stream(model, lambda name: int(name.split(".")[1]))
    rest = [of_files.epochs(2), tb.Loader(squares, plan).epochs(2), iter(tb.prefetch(n for n in ten))]  # type: ignore[arg-type]
    rest.append(tb.generate(lambda number: number, rounds=10))
    for items in rest:
        next(items)
    kept.append(rest)
    tens, eights = list(ten), [0, 1, 2, 3, 4, 5, 6, 7]

    def flat(batches: Iterable[Any]) -> list[int]:
        return [int(number) for batch in batches for number in batch.numpy().ravel()]

    def hooked() -> list[Any]:
        seen: list[Any] = []
        for number in tb.generate(lambda number: number, before=lambda n: None, after=seen.append, rounds=3):
            seen.append(number)
        return seen

    return {
        "prefetch": lambda: (list(tb.prefetch(n for n in ten)), tens),
        "prefetch next": lambda: (list(tb.prefetch(next_kind(lambda n: n, 10))), tens),
        "prefetch list": lambda: (list(tb.prefetch(tens, depth=4)), tens),
        "prefetch files": lambda: (flat(tb.prefetch(of_files)), eights),
        "prefetch read_into": lambda: (flat(tb.prefetch(of_squares)), eights),
        "generate": lambda: (list(tb.generate(lambda number: number, rounds=10)), tens),
        "generate hooks": lambda: (hooked(), [0, 0, 1, 1, 2, 2]),
        "files": lambda: (flat(of_files.epochs(1)), eights),
        "files in turn": lambda: (flat(in_turn.epochs(1)), eights),
        "read_into": lambda: (flat(of_squares.epochs(1)), eights),
        "read_into 2": lambda: (flat(two.epochs(1)), eights),
        "map": lambda: (flat(of_map.epochs(1)), [number + 1 for number in eights]),
        "made": lambda: (list(made.epochs(1)), [1, 5, 9, 13]),
        "tuple": lambda: ([int(batch.numpy()[1][1, 0]) for batch in pair.epochs(1)], [1, 3, 5, 7]),
        "stream": lambda: ([group.number for group in stream], list(range(40))),
        "watch": lambda: (list(tb.watch(tens)), tens),
        "watch prefetch": lambda: (list(tb.watch(tb.prefetch(tens))), tens),
        "records": lambda: (np.asarray(files[:]).ravel().tolist(), eights),
        "rest of files": lambda: (flat(rest[0]), [*eights[2:], *eights]),
        "rest of read_into": lambda: (flat(rest[1]), [*eights[2:], *eights]),
        "rest of prefetch": lambda: (list(rest[2]), tens[1:]),
        "rest of generate": lambda: (list(rest[3]), tens[1:]),
        "thread": lambda: (list(map(int, ten)), tens),
    }


class Finalized:
    """Calls a function when it is freed."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def __del__(self) -> None:
        self.function()


_finalized: list[Finalized] = []  # an underscore: cleared first when the module is


def finalizer(words: tuple[str, ...], folder: str) -> None:
    """An iteration begins while the interpreter ends: a right result or LoaderError."""
    import atexit
    import weakref

    call, when = words
    function: list[Callable[[], tuple[Any, Any]]] = []
    write = os.write

    def run() -> None:
        try:
            found, wanted = function[0]()
            text = "right" if found == wanted else f"wrong: {found}"
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            text = "LoaderError" if "LoaderError" in names else f"wrong: {type(error).__name__}: {error}"
        write(1, f"{text}\n".encode())

    if when == "atexit before":
        atexit.register(run)
    function.append(calls(folder)[call])
    if when == "atexit after":
        atexit.register(run)
    elif when == "finalize":
        kept.append(Finalized(lambda: None))
        weakref.finalize(kept[-1], run)
    elif when == "del":
        _finalized.append(Finalized(run))
    elif when == "del cycle":
        gc.disable()
        cycle: list[Any] = [Finalized(run)]
        cycle.append(cycle)
    mark()


def child(name: str, folder: str) -> None:
    group, *words = name.split(":")
    if group == "control":
        *words, group = words
        words = ["thread torch" if group in ("slow", "torch") else "thread", *words]
    if any(word.startswith("device") or word == "stream" or "torch" in word for word in words):
        import torch

        torch.set_num_threads(1)
    programs = {"daemon": daemon, "preempted": daemon, "finalizer": finalizer, "lock": lock}
    programs |= {"called": called, "asked": asked, "joined": joined, "dropped": dropped}
    run = programs.get(group, program)
    run(tuple(words), folder)


# -----------------------------------------------------------------------------
# The runner.


@dataclass
class Result:
    case: Case
    # "" if it is right.
    wrong: str
    took: float
    output: str


def judge(case: Case, code: int | None, took: float, out: str, err: str, limit: float = LIMIT) -> str:
    """Return what is wrong with it, the kind as the first word."""
    words = case.words[:-1] if case.group == "control" else case.words
    group = case.words[-1] if case.group == "control" else case.group
    if code is None:
        return f"hang: no end {took:.1f} s after the mark" if took == took else "hang: no mark"
    end = "exit3" if group == "dropped" else next((word for word in words if word in CODES), "")
    wanted = CODES.get(end, 0)
    aborted = code == -signal.SIGABRT and "terminate called without an active exception" in err
    if aborted and set(words) & set(TORCH):
        return "plain"
    if code != wanted:
        return f"code: {code} in place of {wanted}"
    if "mark " not in out:
        return "mark: none was printed"
    fatal = FATAL.search(err)
    if fatal:
        return f"text: {fatal.group()}"
    if TEXTS.get(end, "") not in err:
        return "text: its own exception is not shown"
    if end in ("", "exit3") and "event" in words and err:
        return f"text: {err}"
    if group in ("daemon", "preempted"):
        if "epoch complete" in out:
            return "complete: the loop ended as if it were over"
        cut_off = case.group != "control" and words[0] != "watch"  # which has no thread
        if cut_off and "held" in words and "saw LoaderError" not in out:
            return "unseen: no LoaderError in the loop"
    if group == "joined" and "joined" not in out:
        return "unseen: the hook did not get to its end"
    if group == "finalizer" and not re.search("^(right|LoaderError)$", out, re.MULTILINE):
        found = re.search("^wrong.*$", out, re.MULTILINE)
        if words[0] == "records" and found and "sys.meta_path is None" in found.group():
            return ""  # no iteration, and the interpreter has no numpy any more
        return f"result: {found.group() if found else 'none'}"
    if took > limit:
        return f"late: {took:.2f} s"
    return ""


# A thread that wakes another one, by Rust's locks, runs on 5 ms later, as if the other had preempted it.
PREEMPTED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>
long syscall(long number, ...) {
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall"), p[6];
    va_list all;
    va_start(all, number);
    for (int at = 0; at < 6; at++) p[at] = va_arg(all, long);
    va_end(all);
    long found = real(number, p[0], p[1], p[2], p[3], p[4], p[5]);
    if (number == SYS_futex && ((p[1] & 127) == 1 || (p[1] & 127) == 10) && found > 0) usleep(5000);
    return found;
}
"""


def preempted(folder: str) -> dict[str, str]:
    """Return the environment in which `PREEMPTED` holds; none without Linux and a C compiler."""
    if not (compiler := shutil.which("cc")) or not sys.platform.startswith("linux"):
        return {}
    command = [compiler, "-shared", "-fPIC", "-xc", "-", "-o", f"{folder}/preempted.so", "-ldl"]
    subprocess.run(command, input=PREEMPTED, text=True, check=True)
    return {"LD_PRELOAD": f"{folder}/preempted.so"}


def run(case: Case, python: str, limit: float = LIMIT) -> Result:
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryDirectory() as folder,
        open(f"{folder}/out", "w+") as out,
        open(f"{folder}/err", "w+") as err,
    ):
        environment |= preempted(folder) if case.group == "preempted" else {}
        command = [python, "-X", "faulthandler", os.path.abspath(__file__), "--case", str(case), folder]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment)
        started, began, code = time.monotonic(), float("nan"), None
        while True:
            code = process.poll()
            now = time.monotonic()
            if code is not None:
                break
            if began != began:
                with open(f"{folder}/out") as text:
                    found = re.search(r"^mark (.*)\n", text.read(), re.MULTILINE)
                began = float(found.group(1)) if found else began
            if now - started > 20 * limit or now - began > 2 * limit:
                process.send_signal(signal.SIGABRT)  # prints the stacks
                time.sleep(0.2)
                process.kill()
                process.wait()
                break
            time.sleep(0.01)
        out.seek(0)
        err.seek(0)
        told, errors = out.read(), err.read()
        marks = re.findall(r"^mark (.*)$", told, re.MULTILINE)
        took = now - float(marks[0]) if marks else float("nan")
        if code == SKIPPED:
            return Result(case, "skipped", took, "")
        return Result(case, judge(case, code, took, told, errors, limit), took, told + errors)


def run_all(cases: list[Case], python: str, jobs: int, limit: float, report: Any = None) -> list[Result]:
    """Run the cases; one that is only late is run once more, alone: the machine may have been busy."""
    results = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(lambda case: run(case, python, limit), cases):
            results.append(result)
            if report:
                report(result)
    for at, result in enumerate(results):
        if result.wrong.startswith("late"):
            results[at] = run(result.case, python, limit)
    return results


def quick_cases() -> list[Case]:
    return [case for case in every_case() if QUICK.fullmatch(str(case))]


def table(found: dict[str, list[Result]]) -> str:
    """Wrong / all by group and interpreter, and what was wrong."""
    rows: dict[str, dict[str, list[Result]]] = {}
    for python, results in found.items():
        for result in results:
            if result.wrong != "skipped":
                rows.setdefault(result.case.row, {}).setdefault(python, []).append(result)
    lines = [f"{'wrong / all':28}" + "".join(f"{python:>14}" for python in found)]

    def line(name: str, each: dict[str, list[Result]]) -> str:
        cells = ""
        kinds: collections.Counter[str] = collections.Counter()
        for python in found:
            results = each.get(python, [])
            wrong = [result.wrong for result in results if result.wrong not in RIGHT]
            kinds.update(result.wrong.split(":")[0] for result in results if result.wrong)
            cells += f"{f'{len(wrong)} / {len(results)}':>14}"
        return f"{name:28}{cells}  " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())

    lines += [line(name, each) for name, each in rows.items()]
    total = {python: [r for r in results if r.wrong != "skipped"] for python, results in found.items()}
    lines.append(line("all", total))
    return "\n".join(lines)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--python", action="append", metavar="PATH", help="an interpreter; default: this one")
    add("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="found in the name")
    add("--jobs", type=int, default=2)
    add("--limit", type=float, default=LIMIT, metavar="SECONDS", help="more than 2 on a busy machine")
    add("--quick", action="store_true", help="the cases of test_ends.py")
    add("--every", type=int, default=1, metavar="N", help="only each Nth case")
    add("--list", action="store_true", help="print the names of the cases")
    add("--verbose", action="store_true", help="print what wrong cases printed")
    add("--case", nargs=2, metavar=("NAME", "FOLDER"), help="be one case")
    options = parser.parse_args()
    if options.case:
        child(*options.case)
        return 0
    cases = quick_cases() if options.quick else every_case()
    cases = [case for case in cases if options.only.search(str(case))][:: options.every]
    if options.list:
        print(*cases, sep="\n")
        return 0

    def report(result: Result) -> None:
        if result.wrong not in RIGHT:
            print(f"{result.case}: {result.wrong}", flush=True)
            if options.verbose:
                print("    " + result.output.strip().replace("\n", "\n    "), flush=True)

    found = {}
    for python in options.python or [sys.executable]:
        version = [python, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"]
        name = subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()
        start = time.monotonic()
        found[name] = run_all(cases, python, options.jobs, options.limit, report)
        late = sum(result.took > LIMIT for result in found[name])
        took = f"{time.monotonic() - start:.0f} s, {late} of them in more than {LIMIT} s after the mark"
        print(f"{name}: {len(cases)} cases in {took}", flush=True)
    print(table(found))
    return int(any(result.wrong not in RIGHT for results in found.values() for result in results))


if __name__ == "__main__":
    sys.exit(main())
