"""Casts the tensors in whatever is handed to a model."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def within(value: float, dtype: torch.dtype) -> float:
    """`value`, or infinity where the dtype has no such number: torch refuses to fill with it."""
    return value if abs(value) <= torch.finfo(dtype).max else math.copysign(math.inf, value)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors in `dtype`.

    Looks into mappings, lists, tuples and dataclasses, and keeps their kind. What holds nothing to
    cast is returned itself, and what was given is never changed.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return _mapping(value, dtype)
    if isinstance(value, list | tuple):
        return _sequence(value, dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, dtype)
    return value


def _mapping(value: Mapping[Any, Any], dtype: torch.dtype) -> Any:
    changed = _changed(list(value.items()), dtype)
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return {**value, **changed}
    cast = copy.copy(value)  # a subclass may know more than its items
    for key, one in changed.items():  # not `update`, which some of transformers' refuse
        cast[key] = one
    return cast


def _sequence(value: list[Any] | tuple[Any, ...], dtype: torch.dtype) -> Any:
    changed = _changed(list(enumerate(value)), dtype)
    if not changed:
        return value
    cast = [changed.get(index, one) for index, one in enumerate(value)]
    make: Callable[..., Any] = type(value)
    return make(*cast) if hasattr(value, "_fields") else make(cast)  # a named tuple has fields


def _dataclass(value: Any, dtype: torch.dtype) -> Any:
    fields = [one.name for one in dataclasses.fields(value) if one.init]
    changed = _changed([(name, getattr(value, name)) for name in fields], dtype)
    return dataclasses.replace(value, **changed) if changed else value


def _changed(items: list[tuple[Any, Any]], dtype: torch.dtype) -> dict[Any, Any]:
    """What casting makes of the items, as far as it makes anything of them."""
    cast = {key: cast_floats(one, dtype) for key, one in items}
    return {key: cast[key] for key, one in items if cast[key] is not one}
