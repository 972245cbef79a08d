"""The tensors of a nested container: iterate over them, map a function over them.

`torch.utils._pytree` is private and would need a registration for every container class of
transformers; here mappings and dataclasses are handled by what they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, lists, tuples and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from iter_tensors(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from iter_tensors(child)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from iter_tensors(getattr(value, field.name))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `function` applied to every tensor in it.

    Descends into mappings, lists, tuples and dataclasses and keeps their types. A container in
    which nothing changes is returned itself; the input is never modified.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return _map_mapping(value, function)
    if isinstance(value, list | tuple):
        return _map_sequence(value, function)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changed = _changed_items([(name, getattr(value, name)) for name in names], function)
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _map_mapping(value: Mapping[Any, Any], function: Callable[[Tensor], Tensor]) -> Any:
    changed = _changed_items(list(value.items()), function)
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return {**value, **changed}
    mapped = copy.copy(value)  # a subclass may have attributes besides its items
    for key, item in changed.items():  # some classes of transformers refuse `update`
        mapped[key] = item
    return mapped


def _map_sequence(value: list[Any] | tuple[Any, ...], function: Callable[[Tensor], Tensor]) -> Any:
    changed = _changed_items(list(enumerate(value)), function)
    if not changed:
        return value
    items = [changed.get(index, item) for index, item in enumerate(value)]
    make: Callable[..., Any] = type(value)
    return make(*items) if hasattr(value, "_fields") else make(items)  # a named tuple has fields


def _changed_items(
    items: list[tuple[Any, Any]], function: Callable[[Tensor], Tensor]
) -> dict[Any, Any]:
    mapped = {key: map_tensors(item, function) for key, item in items}
    return {key: mapped[key] for key, item in items if mapped[key] is not item}
