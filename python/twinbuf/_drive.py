"""The threads that run the program's code: an iterable, a function, what sends to a device.

They are Python's own daemon threads, and every frame on their stacks is Python's: the interpreter may end
them at any time. What they wait for is in Rust.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
from collections.abc import Callable
from types import GeneratorType
from typing import Any

from ._twinbuf import _begin_end, _end_hook, _Items, _Worker

# Threads that the end of the program waits for, for one second in all. It counts slices and not the clock: a
# process that is stopped for some time (SIGSTOP) ends no thread.
_threads: set[threading.Thread] = set()
_SLICE, _SLICES = 0.05, 20


def start(items: _Items[Any], run: Callable[[Callable[[], None]], None], name: str) -> None:
    """Start the thread that makes the items. ``run`` calls its loop with the caller's context."""
    worker = items.worker()
    if worker is not None:
        thread = threading.Thread(target=_drive, args=(worker, run), name=name, daemon=True)
        _threads.difference_update([old for old in list(_threads) if not old.is_alive()])
        thread.start()
        _threads.add(thread)


@atexit.register
def _end() -> None:
    """End the threads, at the end of the program. The interpreter ends those that take too long.

    Half of the time is for the item that a thread is making. Then `SystemExit` is raised in the thread: code
    that polls, retries or computes in small steps ends at its next step. A thread that is in native C++ code
    when the interpreter ends it aborts the program, as any daemon thread does (before Python 3.14).
    """
    _begin_end()
    left = _SLICES
    while left and (alive := [thread for thread in list(_threads) if thread.is_alive()]):
        alive[0].join(_SLICE)
        if alive[0].is_alive():
            left -= 1
            if left == _SLICES // 2:
                for thread in alive:
                    number = ctypes.c_ulong(thread.ident or 0)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))
    _end_hook()


def _drive(worker: _Worker, run: Callable[[Callable[[], None]], None]) -> None:
    def loop() -> None:
        while worker.next():
            _make(worker)
        _close(worker)

    try:
        run(loop)
    except BaseException as error:  # `run` itself failed: the loop gets that in place of an item
        if worker.next():
            worker.fail(error)


def _make(worker: _Worker) -> None:
    """Make one item. What it refers to is free again before the thread waits."""
    try:
        iterator = worker.iterator()
        if iterator is None:  # collected
            return worker.end()
        try:
            item = next(iterator)
        except StopIteration:
            return worker.end()
        send, states = worker.send(), worker.states()
        if send is not None:
            item = send(item)
        worker.answer(item, None if states is None else states())
    except BaseException as error:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # without this frame
        worker.fail(error)


def _close(worker: _Worker) -> None:
    """Close a generator that was left early, in the thread that ran it."""
    iterator = worker.left()
    if isinstance(iterator, GeneratorType):
        try:
            iterator.close()
        except Exception:
            logging.getLogger("twinbuf").exception("prefetch: closing a generator failed")
