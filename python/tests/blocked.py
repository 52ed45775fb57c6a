"""A program whose foreign code never returns, and how it is left. Run by test_blocked.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from sets import Numbers, loader_of

CODES = ("read_into", "record map", "prefetch", "generate", "device")
ENDS = ("end", "close", "del", "sys.exit", "exception", "Ctrl-C in the loop", "Ctrl-C in close")


def program(code: str, end: str, folder: str) -> None:
    import numpy as np

    import twinbuf as tb

    signal.signal(signal.SIGINT, signal.default_int_handler)
    inside = threading.Event()
    first = 2 if code in ("prefetch", "generate") else 4  # the first two items arrive

    def block(number: int) -> int:
        if number >= first:
            inside.set()
            time.sleep(1e6)
        return number

    class Data(Numbers):
        def __iter__(self) -> Iterator[int]:
            return map(block, range(100))

    def mapped(record: Any, seed: int) -> Any:
        block(int(record[0]))
        return record

    things: Any
    data: Any = Data(100, lambda indices: block(int(indices[-1])))
    if code == "prefetch":
        things = tb.prefetch(data)
        items = iter(things)
    elif code == "generate":
        things = items = tb.generate(block)  # type: ignore[assignment]
    else:
        options: dict[str, Any] = {}
        if code == "device":
            from late import Late

            options["device"] = Late("side")
        if code == "record map":
            np.save(f"{folder}/blocked.npy", np.arange(100)[:, None])
            data = tb.Records.open_npy(f"{folder}/blocked.npy").map(mapped, "int64", (1,))
        things = loader_of(data, 2, **options)
        items = things.epochs(1)
    next(items)
    next(items)
    inside.wait()
    if end.startswith("Ctrl-C"):  # when it waits
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
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
