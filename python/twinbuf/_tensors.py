"""`Tensors` and `stream`: the weights of a model, group by group, the next one read ahead."""

from __future__ import annotations

import pathlib
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from . import _values as values
from ._loop import Loop, Sender, sender
from ._twinbuf import Group, _files, _Stream, _Tensors
from ._values import Path, Paths
from .errors import OptionError
from .tensors import TensorInfo

if TYPE_CHECKING:
    import torch

    from ._streams import Accelerator

# The number of groups that a device holds: one in use, and one on its way.
_DEVICE_DEPTH = 2


class Tensors(_Tensors):
    """The tensors of a model: ``safetensors``, its ``model.safetensors.index.json``, or GGUF.

    Only headers and the index are read. A mapping from names, sorted, to what the tensors are:
    ``model["lm_head.weight"].shape``. `stream` reads them.
    """

    __slots__ = ("__weakref__", "_opened")
    # The files that were found, which may be an index. They do not depend on the working directory.
    _opened: list[str]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        raise TypeError("Tensors: wanted `Tensors.open(paths)`, found a call")

    @staticmethod
    def open(paths: Paths) -> Tensors:
        """Open a file, a folder that has no other files, a pattern, or a list of these.

        Of a model with an index, open the index alone: it names the other files.
        """
        return _again(_files(values.paths_of("paths", paths)))

    @property
    def paths(self) -> list[pathlib.Path]:
        """The files that have the tensors."""
        return list(map(pathlib.Path, self._paths))

    def __getitem__(self, name: str, /) -> TensorInfo:
        """Return what a tensor is.

        That is its ``dtype``, ``shape`` and ``nbytes``. Of a type that `Group` returns as bytes, ``dtype`` is
        the name in the format.
        """
        try:
            return TensorInfo(*self._info(values.text_of("name", name, "the name of a tensor")))
        except (TypeError, OptionError) as error:
            raise KeyError(str(error)) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Open the files again, for ``pickle``."""
        return _again, (self._opened,)


def _again(paths: list[str]) -> Tensors:
    model = _Tensors.__new__(Tensors, paths)
    model._opened = values.absolute(paths)
    return model


# The other methods of a mapping: `Mapping` builds them from those that the class has.
Mapping.register(Tensors)
for _method in ("__contains__", "get", "items", "keys", "values"):
    setattr(Tensors, _method, getattr(Mapping, _method))


class Stream(_Stream):
    """Groups of tensors; made by `stream`. Each iteration is a pass."""

    __slots__ = ("_sender",)
    _sender: Sender | None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        raise TypeError("Stream: wanted `stream(model, groups)`, found a call")


class _Sending(Stream):
    """A stream whose groups are sent to a device.

    A class of its own, so that without a device `iter` is one call of C: a Python function could be cut
    off by Ctrl-C between the start of the pass and its return.
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[Group]:
        groups: Any = super().__iter__()
        sender, loop = self._sender, Loop[Group](None)
        assert sender is not None
        self._end_pass()  # first: a loop whose groups end asks the pass why
        sender.stop()
        sender.begin(loop, groups, groups._sent)
        return loop


def stream(
    model: Tensors,
    groups: Callable[[str], Any] | Sequence[Sequence[str]],
    *,
    name: str | None = None,
    device: str | torch.device | Accelerator | None = None,
    cycle: bool = False,
    depth: SupportsIndex = 2,
    keep: SupportsIndex | None = None,
    order: Sequence[Sequence[int]] | None = None,
    memory_limit: SupportsIndex | None = None,
    read_mode: str = "auto",
    trace: Path | None = None,
) -> Stream:
    """Read groups of tensors in the order of use, such as the layers of a model, the next one ahead.

    ``for layer in tb.stream(model, layer_of)`` is one pass. Each pass has all groups.

    Parameters
    ----------
    model
        `Tensors`.
    groups
        A function of a tensor's name that returns the key of its group, such as the number of a layer, or
        None for a tensor that is left out; groups are in the order of their keys. Or a list of lists of
        names, in the order of use.
    name
        Names the stream in errors, reports and traces.
    device
        Where groups go, as of `Loader`. A second thread copies the next group through page-locked memory on a
        separate stream while the loop uses this one. ``group.torch()`` is then on the device, and stays there
        as long as its tensors exist.
    cycle
        Whether a pass follows the one before it without a gap: the first group is read while the last one is
        used.
    depth
        The number of slots, each for the largest group that is not kept: 2 or more. The loop has a
        group while it asks for the next one.
    keep
        The most groups that stay in host memory when they have been read once, spread over them. Default:
        all if ``memory_limit`` has room for them, otherwise as many as it has room for beside one more slot
        (or fewer, if sizes differ); none without a limit.
    order
        The order of the groups: lists of their numbers, each once. Passes use them in turn: ``[range(n),
        range(n)[::-1]]`` is forward and backward. Default: the order of ``groups``.
    memory_limit
        The most bytes of host memory: slots, groups that are kept, 10 MiB for reads past the page cache, and
        with a ``device`` two page-locked buffers of the largest group. New memory for the slot of a group
        that the loop keeps counts too; if it does not fit, asking for a group raises ``MemoryError``.
        Default: no limit.
    read_mode
        As of `Loader`.
    trace
        A file for a Chrome trace of the first five passes.
    """
    values.instance_of("model", _Tensors, model, "`Tensors`")
    to_device = None if device is None else sender(device, _DEVICE_DEPTH)
    lists = _by_key(model, groups) if callable(groups) else _lists(groups)
    options = {
        "groups": lists,
        "name": None if name is None else values.text_of("name", name),
        "sends": to_device is not None,
        "cycle": values.flag_of("cycle", cycle),
        "depth": values.whole("depth", depth),
        "keep": values.whole_or_none("keep", keep),
        "order": None if order is None else _order(order, len(lists)),
        "memory_limit": values.whole_or_none("memory_limit", memory_limit),
        "read_mode": values.text_of("read_mode", read_mode),
        "trace": values.path_or_none("trace", trace),
    }
    made = _Stream.__new__(Stream if to_device is None else _Sending, model, options)
    made._sender = to_device
    if to_device is not None:
        to_device.recorder = made._recorder
    return made


def _order(order: Any, count: int) -> list[list[int]]:
    with suppress(TypeError):
        passes = [[values.whole("order", at) for at in each] for each in order]
        if not passes or any(sorted(each) != list(range(count)) for each in passes):
            raise OptionError(f"order: wanted lists of {count} groups, each once, found {passes}")
        return passes
    raise TypeError(f"order: wanted lists of numbers of groups, found {order!r}")


def _by_key(model: Tensors, key_of: Callable[[str], Any]) -> list[list[str]]:
    """Return the names of each group, in the order of the files. Groups are in the order of their keys."""
    groups, keys = dict[Any, list[str]](), list[Any]()
    for name in model._in_files():
        if (key := key_of(name)) is not None:
            try:
                if key not in groups and key == key:
                    insort(keys, key)
                    groups[key] = []
                groups[key].append(name)
            except (TypeError, KeyError):  # a `KeyError` for nan, which equals no key
                wanted = "keys that can be sorted"
                raise TypeError(f"groups: wanted {wanted}, found {key!r} for {name!r}") from None
    return [groups[key] for key in keys]


def _lists(groups: Any) -> list[list[str]]:
    with suppress(TypeError):
        lists = [list(names) for names in groups]
        if not any(isinstance(part, str) for part in (groups, *groups)):
            return [[values.text_of("groups", name) for name in names] for names in lists]
    raise TypeError(f"groups: wanted a function of a name, or a list of lists of names, found {groups!r}")
