"""JSON encoding of a script's own values: a checkpoint's `client_state`, and values in a
`StateRegistry`. Uses no pickle."""

from __future__ import annotations

from argparse import Namespace
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rayzero.engine.errors import EngineError
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME, dtype_name

MAX_ARRAY_BYTES = 4 << 20
"""Maximum size of a tensor or array, because a checkpoint's JSON part is read as a whole."""

MAX_DEPTH = 100
"""Maximum nesting of values. Without it, the limit would be Python's stack."""

_TYPE_TAG = "__rayzero__"
_ALLOWED_TYPES = (
    "None, bool, int, float, str, bytes, list, tuple, set, dict, argparse.Namespace, Path, numpy "
    "arrays and numbers, and dense tensors"
)

PlaceArray: TypeAlias = Callable[[np.ndarray[Any, Any], str], Any]
"""Stores the bytes of (array, its path in the value). Returns a JSON value to find them by."""


def place_in_json(array: np.ndarray[Any, Any], where: str) -> str:
    """Returns the bytes as base64. Raises EngineError for more than `MAX_ARRAY_BYTES`."""
    if array.nbytes > MAX_ARRAY_BYTES:
        raise EngineError(
            f"{where} has {array.nbytes} bytes",
            allowed=f"tensors and arrays of at most {MAX_ARRAY_BYTES} bytes",
            fix="make it a buffer of the model, or write it to a separate file",
        )
    return b64encode(array.tobytes()).decode()


def encode_client_state(
    value: Any,
    where: str = "client_state",
    place: PlaceArray = place_in_json,
    outer: tuple[int, ...] = (),
) -> Any:
    """Encodes `value` as JSON; types that JSON lacks become objects with a type tag. Raises
    EngineError, with the path `where`, if a value's type is not supported or a value contains
    itself. `outer` has the ids of the values that contain this one."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and isfinite(value)):
        return value
    if id(value) in outer or len(outer) > MAX_DEPTH:
        problem = "contains itself" if id(value) in outer else f"is {MAX_DEPTH} levels deep"
        raise EngineError(
            f"{where} {problem}, which a checkpoint cannot hold",
            allowed=f"values inside values, up to {MAX_DEPTH} levels",
            fix="save what it refers to by a name or a number",
        )
    outer = (*outer, id(value))

    def inner(item: Any, path: str) -> Any:
        return encode_client_state(item, where + path, place, outer)

    if kind is list:
        return [inner(item, f"[{index}]") for index, item in enumerate(value)]
    if kind in (dict, OrderedDict):
        if all(type(key) is str and key != _TYPE_TAG for key in value):
            return {key: inner(item, f"[{key!r}]") for key, item in value.items()}
        items = value.items()
        pairs = [[inner(key, ": a key"), inner(item, f"[{key!r:.40}]")] for key, item in items]
        return {_TYPE_TAG: "dict", "value": pairs}
    if kind in (tuple, torch.Size, set, frozenset):
        tag = "tuple" if kind in (tuple, torch.Size) else "set"
        return {_TYPE_TAG: tag, "value": inner(list(value), "")}
    if kind is Namespace:
        return {_TYPE_TAG: "namespace", "value": inner(vars(value), "")}
    if kind is float:
        return {_TYPE_TAG: "float", "value": repr(value)}
    if kind is bytes:
        return {_TYPE_TAG: "bytes", "value": b64encode(value).decode()}
    if isinstance(value, Path):
        return {_TYPE_TAG: "path", "value": str(value)}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        fields = {"dtype": array.dtype.str, "shape": [*array.shape], "value": place(array, where)}
        return {_TYPE_TAG: "array"} | fields
    if kind in (Tensor, torch.nn.Parameter) and _is_storable(value):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        name, shape = dtype_name(value.dtype), [*value.shape]
        return {_TYPE_TAG: "tensor", "dtype": name, "shape": shape, "value": place(raw, where)}
    raise EngineError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold",
        allowed=_ALLOWED_TYPES,
        fix="save its content, e.g. its state_dict() or vars(), or write it to a separate file",
    )


def _is_storable(value: Tensor) -> bool:
    is_dense = value.layout is torch.strided and not value.is_meta
    return is_dense and value.dtype in DTYPE_BY_NAME.values()


FetchArray: TypeAlias = Callable[[Any], bytes | memoryview]
"""Returns the bytes that a `PlaceArray` stored, given the value that it returned."""


def decode_client_state(value: Any, fetch: FetchArray = b64decode) -> Any:
    """Decodes what `encode_client_state` returned: tensors on the CPU, frozen sets as sets."""
    if isinstance(value, list):
        return [decode_client_state(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    if _TYPE_TAG not in value:
        return {key: decode_client_state(item, fetch) for key, item in value.items()}
    tag, inner = value[_TYPE_TAG], value["value"]
    match tag:
        case "array":
            return _decode_array(value, bytearray(fetch(inner)))
        case "tensor":
            return _decode_tensor(value, bytearray(fetch(inner)))
        case "float":
            return float(inner)
        case "bytes":
            return b64decode(inner)
        case "path":
            return Path(inner)
    decoded = decode_client_state(inner, fetch)
    return Namespace(**decoded) if tag == "namespace" else _CONTAINERS[tag](decoded)


def _decode_array(document: Mapping[str, Any], raw: bytearray) -> Any:
    array = np.frombuffer(raw, dtype=document["dtype"]).reshape(document["shape"])
    return array if array.ndim else array[()]


def _decode_tensor(document: Mapping[str, Any], raw: bytearray) -> Tensor:
    dtype = DTYPE_BY_NAME[document["dtype"]]
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.zeros(0, dtype=dtype)
    return flat.reshape(document["shape"])


_CONTAINERS: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "dict": dict}
