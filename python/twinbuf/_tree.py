"""Nested batches: finds and replaces the tensors and arrays in dicts, lists, tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any


def map_leaves(change: Callable[[Any], Any], item: Any) -> Any:
    """Return ``item`` with every leaf replaced by ``change(leaf)``.

    ``change`` is called with each object on the way down, containers too, and returns its argument unchanged
    where it has nothing to replace. Containers without a replaced leaf are returned as they are, the others
    are copied: the caller's own objects never change.
    """
    if item is None or isinstance(item, (str, bytes, bytearray, memoryview, int, float, complex)):
        return item
    changed = change(item)
    if changed is not item:
        return changed
    if isinstance(item, tuple):
        return _map_tuple(change, item)
    if isinstance(item, list):
        parts = [map_leaves(change, part) for part in item]
        if _same(parts, item):
            return item
        if type(item) is list:
            return parts
        other_list = copy.copy(item)
        other_list[:] = parts
        return other_list
    if isinstance(item, Mapping):
        return _map_mapping(change, item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = [field.name for field in dataclasses.fields(item)]
        values = [getattr(item, name) for name in fields]
        parts = [map_leaves(change, value) for value in values]
        if _same(parts, values):
            return item
        # Not `replace`: it runs `__init__`, which may do anything. And frozen ones are copied as well.
        other = copy.copy(item)
        for name, part in zip(fields, parts, strict=True):
            object.__setattr__(other, name, part)
        return other
    return item


def _map_tuple(change: Callable[[Any], Any], item: tuple[Any, ...]) -> Any:
    parts = [map_leaves(change, part) for part in item]
    if _same(parts, item):
        return item
    if hasattr(item, "_make"):  # a named tuple
        return item._make(parts)
    return tuple(parts) if type(item) is tuple else type(item)(parts)


def _map_mapping(change: Callable[[Any], Any], item: Mapping[Any, Any]) -> Any:
    values = list(item.values())
    parts = [map_leaves(change, value) for value in values]
    if _same(parts, values):
        return item
    pairs = zip(item.keys(), parts, strict=True)
    if type(item) is dict:
        return dict(pairs)
    if isinstance(item, MutableMapping):
        other = copy.copy(item)
        for key, part in pairs:
            other[key] = part
        return other
    return type(item)(dict(pairs))  # type: ignore[call-arg]


def _same(parts: list[Any], item: Any) -> bool:
    return all(new is old for new, old in zip(parts, item, strict=True))
