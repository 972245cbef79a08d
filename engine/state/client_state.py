"""JSON encoding of a script's own values in a checkpoint (`client_state`); no pickle involved."""

from __future__ import annotations

from argparse import Namespace
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayzero.engine.errors import EngineError
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME, dtype_name

MAX_ARRAY_BYTES = 4 << 20
"""Maximum size of a tensor or array, since a checkpoint's JSON part is read as a whole."""

MAX_DEPTH = 100
"""Limit on values inside values; Python's own is that of its stack."""

_TYPE_TAG = "__rayzero__"
_ALLOWED_TYPES = (
    "None, bool, int, float, str, bytes, list, tuple, set, dict, argparse.Namespace, Path, numpy "
    f"arrays and numbers, and tensors, up to {MAX_ARRAY_BYTES >> 20} MiB each"
)


def encode_client_state(value: Any, where: str = "client_state") -> Any:
    """Encode `value` as JSON; types that JSON lacks become objects with a type tag. Raises
    EngineError, with its path, if a value's type is not supported, or it contains itself."""
    return _encode(value, where, ())


def _encode(value: Any, where: str, outer: tuple[int, ...]) -> Any:
    """`outer`: the ids of the values that this one is in."""
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
    if kind is list:
        return [_encode(item, f"{where}[{index}]", outer) for index, item in enumerate(value)]
    if kind in (dict, OrderedDict):
        if all(type(key) is str and key != _TYPE_TAG for key in value):
            return {key: _encode(item, f"{where}[{key!r}]", outer) for key, item in value.items()}
        pairs = [[key, item] for key, item in value.items()]
        return {_TYPE_TAG: "dict", "value": _encode(pairs, where, outer)}
    if kind in (tuple, torch.Size, set, frozenset):
        tag = "tuple" if kind in (tuple, torch.Size) else "set"
        return {_TYPE_TAG: tag, "value": _encode(list(value), where, outer)}
    if kind is Namespace:
        return {_TYPE_TAG: "namespace", "value": _encode(vars(value), where, outer)}
    if kind is float:
        return {_TYPE_TAG: "float", "value": repr(value)}
    if kind is bytes:
        return {_TYPE_TAG: "bytes", "value": b64encode(value).decode()}
    if isinstance(value, Path):
        return {_TYPE_TAG: "path", "value": str(value)}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        return _encode_array("array", array.dtype.str, array.shape, array, where)
    if kind in (Tensor, torch.nn.Parameter) and value.dtype in DTYPE_BY_NAME.values():
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _encode_array("tensor", dtype_name(value.dtype), value.shape, raw, where)
    raise EngineError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold",
        allowed=_ALLOWED_TYPES,
        fix="save its content, e.g. its state_dict() or vars(), or write it to a separate file",
    )


def _encode_array(tag: str, dtype: str, shape: Any, array: Any, where: str) -> dict[str, Any]:
    if array.nbytes > MAX_ARRAY_BYTES:
        raise EngineError(
            f"{where} has {array.nbytes} bytes",
            allowed=f"tensors and arrays of at most {MAX_ARRAY_BYTES} bytes",
            fix="make it a buffer of the model, or write it to a separate file",
        )
    text = b64encode(array.tobytes()).decode()
    return {_TYPE_TAG: tag, "dtype": dtype, "shape": list(shape), "value": text}


def decode_client_state(value: Any) -> Any:
    """Decode `encode_client_state`: tensors on the CPU, frozen sets as sets."""
    if isinstance(value, list):
        return [decode_client_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TYPE_TAG not in value:
        return {key: decode_client_state(item) for key, item in value.items()}
    return _DECODERS[value[_TYPE_TAG]](value)


def _decode_array(document: Mapping[str, Any]) -> Any:
    flat = np.frombuffer(b64decode(document["value"]), dtype=np.dtype(document["dtype"]))
    array = flat.reshape(document["shape"]).copy()
    return array if array.ndim else array[()]


def _decode_tensor(document: Mapping[str, Any]) -> Tensor:
    raw, dtype = bytearray(b64decode(document["value"])), DTYPE_BY_NAME[document["dtype"]]
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.zeros(0, dtype=dtype)
    return flat.reshape(document["shape"])


_DECODERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": lambda document: float(document["value"]),
    "bytes": lambda document: b64decode(document["value"]),
    "path": lambda document: Path(document["value"]),
    "tuple": lambda document: tuple(decode_client_state(document["value"])),
    "set": lambda document: set(decode_client_state(document["value"])),
    "dict": lambda document: dict(decode_client_state(document["value"])),
    "namespace": lambda document: Namespace(**decode_client_state(document["value"])),
    "array": _decode_array,
    "tensor": _decode_tensor,
}
