"""Tensors that have only a shape and a dtype until their values are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from rayzero.engine.tensor_tree import iter_tensors, map_tensors
from rayzero.engine.torch_private import without_torch_functions


class ShapeOnly(Tensor):
    """A tensor without values of its own. A torch function that needs the values gets the result of
    `read` instead. A torch function that changes them runs inside `write`. Both may raise."""

    def read(self) -> Tensor:
        raise NotImplementedError

    def write(self) -> AbstractContextManager[None]:
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = function_name(func)
        options = dict(kwargs or {})
        with without_torch_functions():
            if name in SHAPE_ONLY:
                return func(*args, **options)
            in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
            for written in iter_tensors(args[0] if in_place else options.get("out")):
                if isinstance(written, ShapeOnly):
                    with written.write():
                        return func(*args, **options)
            args, options = map_tensors((args, options), _read)
            return func(*args, **options)


def _read(tensor: Tensor) -> Tensor:
    return tensor.read() if isinstance(tensor, ShapeOnly) else tensor


_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"}
_IN_PLACE |= {"__iand__", "__ior__", "__ixor__", "__ifloordiv__", "__imod__"}
SHAPE_ONLY = set(
    (
        "shape size numel nelement ndim dim __len__ dtype element_size is_floating_point "
        "is_complex device layout is_sparse is_quantized is_meta requires_grad __hash__"
    ).split()
)
"""Names of a tensor's methods and properties that do not need its values."""


def function_name(func: Callable[..., Any]) -> str:
    """Returns the name of the function that `__torch_function__` got. For the getter of a property,
    that is the property's name, not `__get__`."""
    is_property = func.__name__ == "__get__"
    return getattr(func, "__self__", func).__name__ if is_property else func.__name__
