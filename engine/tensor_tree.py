"""The tensors of a nested container: iterate over them, map a function over them, identify them.

`torch.utils._pytree` is private and would need a registration for every container class of
transformers; here mappings and dataclasses are handled by what they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

_PLAIN = frozenset((str, bytes, int, float, bool, type(None)))


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yields every tensor in nested mappings, lists, tuples and dataclasses, in order."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            pending += value[::-1]
        elif isinstance(value, dict):
            pending += list(value.values())[::-1]
        else:
            pending += [child for _, child in _children(value)][::-1]


def storage_id(tensor: Tensor) -> int:
    """Returns a number that identifies a tensor's storage as long as the storage lives. It is not
    the address of the memory, which the meta device lacks."""
    return int(tensor.untyped_storage()._cdata)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns `value` with `function` applied to every tensor in it.

    Descends into mappings, lists, tuples and dataclasses and keeps their types. A container in
    which nothing changes is returned itself, not a copy; the input is never modified.
    """
    if isinstance(value, Tensor):
        return function(value)
    children = _children(value)
    mapped = {key: map_tensors(child, function) for key, child in children}
    changed = {key: mapped[key] for key, child in children if mapped[key] is not child}
    if not changed:
        return value
    if isinstance(value, MutableMapping):
        result = copy.copy(value)  # a subclass may have attributes besides its items
        for key, item in changed.items():  # some classes of transformers refuse `update`
            result[key] = item
        return result
    if isinstance(value, Mapping):
        return mapped
    if isinstance(value, list | tuple):
        make: Callable[..., Any] = type(value)
        items = mapped.values()
        return make(*items) if hasattr(value, "_fields") else make(items)  # a named tuple
    return dataclasses.replace(value, **changed)


def _children(value: Any) -> Sequence[tuple[Any, Any]]:
    """Returns (key, child) for each child of a container; nothing for other values."""
    # isinstance with `Mapping`, an abstract class, is slow, and a batch has thousands of texts.
    if type(value) in _PLAIN:
        return ()
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, dict | Mapping):  # `dict` first, which is fast
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [(field.name, getattr(value, field.name)) for field in fields if field.init]
    return ()
