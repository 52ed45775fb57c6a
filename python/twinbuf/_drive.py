"""The threads that run the program's code: an iterable, a data set, a function, what sends to a device.

They are Python's own daemon threads, and below that code every frame is Python's: the interpreter may end
them there. What they wait for is in Rust.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import contextvars
import ctypes
import gc
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from itertools import islice
from time import monotonic, sleep
from types import GeneratorType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ._twinbuf import _begin_end, _end_hook, _Filler, _Items, _Worker
from ._values import warn
from .errors import LoaderError, NestedError

if TYPE_CHECKING:
    from ._streams import Upload

# Threads that the end of the program waits for, for one second in all. It counts slices and not the clock: a
# process that is stopped for some time (SIGSTOP) ends no thread.
_threads: set[threading.Thread] = set()
# Those that make nothing any more, and only drop what they have.
_closing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_SLICE, _SLICES = 0.05, 20

# Whether this is a thread that is ahead of the loop.
ahead = contextvars.ContextVar("twinbuf_ahead", default=False)

T = TypeVar("T")
Mode: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]


def starter(items: _Items[Any], name: str, upload: Upload | None = None) -> Callable[[], None]:
    """Return a function that starts the thread that makes the items, with this thread's context.

    That is its context variables, its gradient mode and its current CUDA device. After Ctrl-C in the
    function, it can be called again: only one thread gets the worker.
    """
    modes: list[Mode] = []
    torch: Any = sys.modules.get("torch")
    # While another thread imports torch, it lacks these, and this thread has changed no mode.
    if hasattr(torch, "cuda") and hasattr(torch, "set_grad_enabled"):
        if torch.cuda.is_initialized():
            modes.append(partial(torch.cuda.device, torch.cuda.current_device()))
        inference, enabled = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        modes.append(lambda: torch.inference_mode() if inference else torch.set_grad_enabled(enabled))
    if upload is not None:
        modes.append(upload.using)
    context = contextvars.copy_context()
    context.run(ahead.set, True)
    return partial(start, name, _drive, weakref.ref(items), context, modes)


class Turn:
    """A call's place in the line of the threads that share an iterator: one at a time goes on.

    The line is a dict and no lock: a forked process would wait for a thread that it has not. In `Loop` a turn
    ends by a `del`, before and after which no signal is handled.
    """

    # The program ends: the interpreter may have ended the thread whose turn it is.
    ended = False

    def __init__(self) -> None:
        self.of = threading.get_ident(), os.getpid()


def wait_in(line: dict[Turn, None], mine: Turn, called: str = "the next item was asked for") -> None:
    """Wait in line. The caller takes ``mine`` out of it, whatever this raises."""
    line[mine], first, since = None, mine, monotonic()
    while (turns := list(line))[0] is not mine:
        if turns[0] is not first:
            first, since = turns[0], monotonic()
        if first.of[1] != mine.of[1]:
            line.pop(first, None)
        elif Turn.ended:
            raise LoaderError("the program is ending: the call is cut off")
        elif any(turn.of == mine.of for turn in turns if turn is not mine):
            raise NestedError(
                f"{called} while this thread is in such a call already, as by a signal's handler: "
                "that would wait for itself"
            )
        else:
            # The longer the first one takes, and the more are before this thread, the less often it looks.
            sleep(min(max(5e-5, (monotonic() - since) / 16) * turns.index(mine), _SLICE))


class InTurn:
    """Lets one thread at a time call a function, where threads share an iterator."""

    def __init__(self, called: str = "the next item was asked for") -> None:
        self._line: dict[Turn, None] = {}
        self._called = called

    def __call__(self, function: Callable[[], T]) -> T:
        """Call the function when it is this thread's turn. Return what it returns."""
        mine = Turn()
        try:
            wait_in(self._line, mine, self._called)
            return function()
        finally:
            self._line.pop(mine, None)


def called(code: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call the program's code. StopIteration becomes another exception: it would end the loop (PEP 479)."""
    try:
        return function(*arguments)
    except StopIteration as stop:
        raise RuntimeError(f"{code} raised StopIteration") from stop


def fill_one(worker: _Filler) -> bool:
    """Fill a slot. Returns whether there was one to fill."""
    try:
        while found := worker.try_next():
            _answer(worker, only=True)
        return found is not None
    finally:
        worker.calls_no_more()  # where Ctrl-C came before the answer


def make_one(worker: _Worker | None, kept: list[Any]) -> bool:
    """Make an item. Returns whether one was wanted. ``kept`` has one that Ctrl-C kept from being sent."""
    if worker is None or not worker.try_next():
        return False
    _make(worker, kept)
    return True


def tell(line: str) -> Any:
    """Log a warning in a thread, where the program's handlers run. It releases the lock at its end."""
    try:
        return _beside(warn, line)
    except RuntimeError:  # the interpreter ends
        return _thread.allocate_lock()


def start(name: str, target: Callable[..., None], *arguments: object) -> None:
    """Start a thread that calls the function."""
    failed: list[BaseException] = []

    def begin() -> None:
        try:
            thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
            _threads.difference_update([old for old in list(_threads) if not old.is_alive()])
            thread.start()
            _threads.add(thread)
        except BaseException as error:
            failed.append(error)

    try:
        # An exception of a signal's handler within `Thread.start` would break its locks. The limit is for a
        # handler that interrupts `threading` while that holds the lock which `Thread.start` needs.
        if not _beside(begin).acquire(timeout=60):
            raise LoaderError("no thread can be started while a signal's handler interrupts `threading`")
        if failed:
            raise failed.pop()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
        raise LoaderError("the program is ending: no thread can be started") from error


def _beside(function: Callable[..., None], *arguments: object) -> Any:
    """Call a function in a new thread, where no signal's handler runs. Return a lock.

    The thread releases the lock when the function has returned.
    """
    if sys.is_finalizing():  # before Python 3.12 a thread would be started, and never run
        raise RuntimeError("can't create new thread at interpreter shutdown")
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            function(*arguments)
        finally:
            done.release()

    _thread.start_new_thread(run, ())
    return done


@atexit.register
def _end() -> None:
    """End the threads, at the end of the program. The interpreter ends those that take too long.

    Half of the time is for the item that a thread is making. Then `SystemExit` is raised in the thread: code
    that polls, retries or computes in small steps ends at its next step. A thread in native C++ code that the
    interpreter ends aborts the program, as any daemon thread does (before Python 3.14).
    """
    left = round(_begin_end() / _SLICE)
    Turn.ended = True
    half = min(left - 1, _SLICES // 2)
    while left and (alive := [thread for thread in list(_threads) if thread.is_alive()]):
        alive[0].join(_SLICE)
        if alive[0].is_alive():
            left -= 1
            if left == half:
                for thread in alive:
                    if thread not in _closing:
                        number = ctypes.c_ulong(thread.ident or 0)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))
    _end_hook(left * _SLICE)


def _drive(of: weakref.ref[_Items[Any]], context: contextvars.Context, modes: list[Mode]) -> None:
    items = of()
    worker = None if items is None else items.worker()
    del items
    if worker is None:
        return

    def loop() -> None:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            while worker.next():
                _make(worker)
            _close(worker)

    try:
        context.run(loop)
    except BaseException as error:  # a mode failed: the loop gets that in place of an item
        if worker.next():
            worker.fail(error, False)
    finally:
        worker.leave()


def _make(worker: _Worker, kept: list[Any] | None = None) -> Any:
    """Make items while they are wanted. What they refer to is free again before the thread waits.

    With ``kept`` make one: it is in that list until it was handed over, and after Ctrl-C it is sent again.
    """
    try:
        if (parts := worker.parts()) is None:  # collected
            return worker.end()
        iterator, send, states = parts
        more = True
        while more:
            if kept is None:
                item = next(iterator, worker)
            else:
                # Between the iterator and the list no signal is handled.
                kept.extend(islice(iterator, not kept))
                item = kept[0] if kept else worker
            if item is worker:  # no item: the end
                return worker.end()
            item = item if send is None else called("code that sends an item", send, item)
            state = None if states is None else called("state_dict", states)
            more = worker.answer(item, state, kept)
            del item, state
    except BaseException as error:
        here = kept is not None and (not isinstance(error, Exception) or isinstance(error, NestedError))
        worker.fail(_cut(error), here)
        if here:
            raise
        if kept:
            kept.clear()


def _close(worker: _Worker) -> None:
    """Close a generator that was left early, in the thread that ran it, and drop what the thread has."""
    _closing.add(threading.current_thread())
    is_left, parts, items = worker.left()
    if is_left and parts is not None and isinstance(parts[0], GeneratorType):
        try:
            parts[0].close()
        except Exception:
            logging.getLogger("twinbuf").exception("prefetch: closing a generator failed")
    del parts, items


def fill(worker: _Filler) -> None:
    """Fill slots in a thread, until the loader is closed."""
    while worker.next():
        try:
            _answer(worker)
        except BaseException as error:  # a loop waits for the answer
            worker.answer(b"", error, False)


def _answer(worker: _Filler, only: bool = False) -> None:
    """Make the call that the worker waits for. What it refers to is free again before the thread waits.

    A thread of the loop calls this for ``only`` one slot. What is no `Exception`, such as Ctrl-C, is raised
    in that thread, once the slot is done with: the answer may reach another one.
    """
    made, raised = b"", None
    try:
        made = made_by(*worker.wanted())
    except BaseException as error:
        raised = _cut(error)
    if not worker.is_returned() and raised is not None:
        _clear(raised)
    if not worker.is_returned():
        gc.collect()  # perhaps a cycle that nothing uses
    here = None if not only or isinstance(raised, Exception) else raised
    worker.answer(made, raised, here is not None)
    try:
        if here is not None:
            worker.try_next()
            raise here
    finally:
        del raised, here  # the frames of the exception refer to this one: a cycle


def made_by(code: Any, numbers: bytearray, *more: Any) -> bytes:
    """Call a data set with the numbers of records and their slot, or a function with each of some records."""
    import numpy as np

    try:
        if len(more) == 1:
            found = code.read_into(np.frombuffer(numbers, "int64"), *more)
            # A number is allowed: `return file.readinto(out)` returns how many bytes it read.
            if found is None or isinstance(found, int):
                return b""
            kind = type(found).__name__
            raise TypeError(
                "read_into: wanted `out` filled and nothing returned, "
                f"found a {kind} returned: `numpy.asarray(out)[:] = array`"
            )
        seeds, (dtype, shape), (wanted, size) = more
        records, made, good = np.frombuffer(numbers, dtype).reshape(len(seeds), *shape), [], None
        for record, seed in zip(records, seeds, strict=True):
            array = np.asarray(code(record, seed))
            of = array.dtype
            if array.shape != size or (of is not good and (of.name != wanted or not of.isnative)):
                raise TypeError(
                    f"map: wanted an array of {wanted} {list(size)}, found one of {of} {list(array.shape)}"
                )
            good = of
            made.append(array.tobytes())
        return b"".join(made)
    except StopIteration as stop:  # it would end the loop (PEP 479)
        raise RuntimeError(f"{'the data set' if len(more) == 1 else 'map'} raised StopIteration") from stop


def _clear(error: BaseException) -> None:
    """Clear the frames in the tracebacks of an exception, of its causes and of those in a group.

    They keep a slot.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        if (each := left.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(_own(each, "__traceback__"))
            left += [_own(each, "__cause__"), _own(each, "__context__")]
            if isinstance(each, BaseExceptionGroup):
                left += vars(BaseExceptionGroup)["exceptions"].__get__(each)


def _cut(error: BaseException) -> BaseException:
    """Return the exception without the caller's frame in its traceback."""
    BaseException.with_traceback(error, _own(error, "__traceback__").tb_next)
    return error


def _own(error: BaseException, name: str) -> Any:
    """Return an attribute that all exceptions have, and not what the program's class has in its place."""
    return vars(BaseException)[name].__get__(error)
