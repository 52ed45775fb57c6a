"""A program whose foreign code never returns, and how it is left. Run by test_blocked.py, or alone:

python python/tests/blocked.py  # the time that each of them takes to end
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

WAITS = ("sleep", "event", "lock", "pipe", "socket")
CODES = ("read_into", "record map", "prefetch", "generate", "device")
ENDS = ("end", "close", "del", "sys.exit", "exception", "Ctrl-C in the loop", "Ctrl-C in close")


def forever(how: str) -> Callable[[], object]:
    """Return what waits for ever, without the GIL."""
    if how == "sleep":
        return lambda: time.sleep(1e6)
    if how == "event":
        return threading.Event().wait
    if how == "lock":
        lock = threading.Lock()
        lock.acquire()
        return lock.acquire
    if how == "pipe":
        pipe = os.pipe()
        return lambda: os.read(pipe[0], 1)
    assert how == "socket"
    pair = socket.socketpair()
    return lambda: pair[0].recv(1)


def program(how: str, code: str, end: str) -> None:
    # Registered first, so called last: what follows is the end of the interpreter, and of torch where that is
    # imported, which takes seconds on a busy machine.
    atexit.register(lambda: print(time.perf_counter(), flush=True))
    import numpy as np
    from sets import Numbers

    import twinbuf as tb

    signal.signal(signal.SIGINT, signal.default_int_handler)
    wait, inside = forever(how), threading.Event()

    first = 2 if code in ("prefetch", "generate") else 4  # the first two items arrive

    def block(number: int) -> int:
        if number >= first:
            inside.set()
            wait()
        return number

    class Data(Numbers):
        def read_into(self, indices: Any, out: Any) -> None:
            if code in ("read_into", "device"):
                block(int(indices[-1]))
            super().read_into(indices, out)

        def __iter__(self) -> Iterator[int]:
            return map(block, range(100))

    def mapped(record: Any, seed: int) -> Any:
        block(int(record[0]))
        return record

    things: Any
    if code == "prefetch":
        things = tb.prefetch(Data(100))
        items = iter(things)
    elif code == "generate":
        things = items = tb.generate(block)  # type: ignore[assignment]
    else:
        data: Any = Data(100)
        options: dict[str, Any] = {}
        if code == "device":
            from late import Late

            options["device"] = Late("side")
        if code == "record map":
            np.save(sys.argv[4], np.arange(100)[:, None])
            data = tb.Records.open_npy(sys.argv[4]).map(mapped, "int64", (1,))
        things = tb.Loader(data, tb.Plan(data, 2), **options)
        items = things.epochs(1)
    next(items)
    next(items)
    inside.wait()
    print("blocked", flush=True)
    sys.stdin.readline()
    if end == "close":
        things.close()
    elif end == "del":
        del things, items
    elif end == "sys.exit":
        sys.exit(0)
    elif end == "exception":
        raise KeyError("of the loop")
    elif end == "Ctrl-C in the loop":
        next(items)
    elif end == "Ctrl-C in close":
        things.close(**({} if code == "generate" else {"timeout": 60}))
        next(items)  # where close does not wait


def run(how: str, code: str, end: str, folder: str) -> tuple[float, int, str]:
    """Return the seconds from what ends the program to the end of its exit hooks, its status, its errors."""
    command = [sys.executable, "-X", "faulthandler", __file__, how, code, end, f"{folder}/blocked.npy"]
    environment = os.environ | {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as child:
        assert child.stdin and child.stdout
        assert child.stdout.readline() == "blocked\n", child.communicate()[1]
        child.stdin.write("\n")
        child.stdin.flush()
        if end.startswith("Ctrl-C"):
            time.sleep(0.3)  # until it waits
            child.send_signal(signal.SIGINT)
        start = time.perf_counter()
        try:
            ended, told = child.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
        # One clock for all processes.
        return float(ended or "nan") - start, child.returncode, told


if __name__ == "__main__":
    if len(sys.argv) > 1:
        program(*sys.argv[1:4])
        sys.exit(0)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        took = {}
        for case in itertools.product(WAITS, CODES, ENDS):
            took[case] = run(*case, folder)[0]
            print(f"{took[case]:6.2f} s", *case, sep=", ", flush=True)
    print(f"{len(took)} programs, {max(took.values()):.2f} s at most")
