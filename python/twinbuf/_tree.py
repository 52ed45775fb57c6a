"""Nested batches: finds and replaces the tensors and arrays in dicts, lists, tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any


def map_leaves(change: Callable[[Any], Any], item: Any) -> Any:
    """Return ``item`` with every leaf replaced by ``change(leaf)``.

    ``change`` is called with each object on the way down but numbers, text, bytes and None, containers too.
    It returns its argument unchanged where it has nothing to replace. Containers without a replaced leaf are
    returned as they are, the others are copied: the caller's own objects never change.
    """
    if item is None or isinstance(item, (str, bytes, bytearray, memoryview, int, float, complex)):
        return item
    changed = change(item)
    if changed is not item:
        return changed
    keys: Sequence[Any]
    if isinstance(item, Mapping):
        keys, values = list(item.keys()), list(item.values())
    elif isinstance(item, (tuple, list)):
        keys, values = range(len(item)), list(item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        keys = [field.name for field in dataclasses.fields(item)]
        values = [getattr(item, name) for name in keys]
    else:
        return item
    parts = [map_leaves(change, value) for value in values]
    if all(new is old for new, old in zip(parts, values, strict=True)):
        return item
    if isinstance(item, tuple):
        if hasattr(item, "_make"):  # a named tuple
            return item._make(parts)
        return tuple(parts) if type(item) is tuple else type(item)(parts)
    pairs = zip(keys, parts, strict=True)
    if isinstance(item, Mapping) and not isinstance(item, MutableMapping):
        return type(item)(dict(pairs))  # type: ignore[call-arg]
    # Not `dataclasses.replace`: it runs `__init__`, which may do anything. Frozen dataclasses are copied too.
    other: Any = copy.copy(item)
    for key, part in pairs:
        if isinstance(item, (list, MutableMapping)):
            other[key] = part
        else:
            object.__setattr__(other, key, part)
    return other
