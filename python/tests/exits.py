"""A program that ends while its last thread waits in the drop of a loader. Run by test_blocked.py."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from late import Late
from sets import Numbers

within: list[None] = []


@atexit.register
def check() -> None:
    """Before twinbuf is imported, so called after its own: the interpreter takes no more threads."""
    assert not within, "a thread is left in the loop that a device has it in"


if __name__ == "__main__":
    import twinbuf as tb

    forever, reading, sending, left, dropped = (threading.Event() for _ in range(5))

    class Data(Numbers):
        def read_into(self, indices: Any, out: Any) -> None:
            if indices[0] == 4:
                reading.set()
                forever.wait()
            super().read_into(indices, out)

    class Held(Late):
        """Sends the second batch when the program has let go of the loader."""

        @contextlib.contextmanager
        def using(self, stream: Any) -> Iterator[None]:
            within.append(None)
            with super().using(stream):
                yield
            within.pop()

        def copy(self, out: Any, tensor: Any) -> None:
            if tensor.flatten()[0] == 2:
                sending.set()
                left.wait()
            super().copy(out, tensor)

        def _release(self, *arguments: Any) -> None:
            super()._release(*arguments)
            dropped.set()

    data: Any = Data(100)
    loader: Any = tb.Loader(data, tb.Plan(data, 2), device=Held("side"))
    items: Any = loader.epochs(1)
    first = next(items)
    reading.wait()
    sending.wait()
    assert within
    del loader, items
    left.set()
    dropped.wait()  # the second batch: the thread drops the loader next
