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

_TYPE_TAG = "__rayzero__"
_ALLOWED_TYPES = (
    "None, bool, int, float, str, bytes, list, tuple, set, dict, argparse.Namespace, Path, numpy "
    f"arrays and numbers, and tensors, up to {MAX_ARRAY_BYTES >> 20} MiB each"
)


def encode_client_state(value: Any, where: str = "client_state") -> Any:
    """Encode `value` as JSON.

    Raises:
        EngineError: a value's type is not supported; the message has its path.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and isfinite(value)):
        return value
    if kind is list:
        return _encode_items(value, where)
    if kind in (dict, OrderedDict) and all(type(key) is str and key != _TYPE_TAG for key in value):
        return {key: encode_client_state(item, f"{where}[{key!r}]") for key, item in value.items()}
    return _encode_tagged(value, where)


def _encode_tagged(value: Any, where: str) -> dict[str, Any]:
    """Encode a type that JSON lacks as an object with a type tag."""
    kind = type(value)
    if kind is float:
        return {_TYPE_TAG: "float", "value": repr(value)}
    if kind in (dict, OrderedDict):
        pairs = [[key, item] for key, item in value.items()]
        return {_TYPE_TAG: "dict", "value": _encode_items(pairs, where)}
    if kind in (tuple, torch.Size):
        return {_TYPE_TAG: "tuple", "value": _encode_items(value, where)}
    if kind in (set, frozenset):
        return {_TYPE_TAG: "set", "value": _encode_items(value, where)}
    if kind is bytes:
        return {_TYPE_TAG: "bytes", "value": b64encode(value).decode()}
    if kind is Namespace:
        return {_TYPE_TAG: "namespace", "value": encode_client_state(vars(value), where)}
    if isinstance(value, Path):
        return {_TYPE_TAG: "path", "value": str(value)}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        return {_TYPE_TAG: "array", "dtype": array.dtype.str} | _encode_array(array, where)
    if kind in (Tensor, torch.nn.Parameter) and value.dtype in DTYPE_BY_NAME.values():
        flat = value.detach().cpu().contiguous()
        raw = flat.reshape(-1).view(torch.uint8).numpy().reshape(-1)
        return (
            {_TYPE_TAG: "tensor", "dtype": dtype_name(value.dtype)}
            | _encode_array(raw, where)
            | {"shape": list(value.shape)}
        )
    raise EngineError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold",
        allowed=_ALLOWED_TYPES,
        fix="save its content, e.g. its state_dict() or vars(), or write it to a separate file",
    )


def _encode_items(values: Any, where: str) -> list[Any]:
    return [encode_client_state(item, f"{where}[{number}]") for number, item in enumerate(values)]


def _encode_array(array: Any, where: str) -> dict[str, Any]:
    if array.nbytes > MAX_ARRAY_BYTES:
        raise EngineError(
            f"{where} has {array.nbytes} bytes",
            allowed=f"tensors and arrays of at most {MAX_ARRAY_BYTES} bytes",
            fix="make it a buffer of the model, or write it to a separate file",
        )
    return {"shape": list(array.shape), "value": b64encode(array.tobytes()).decode()}


def decode_client_state(value: Any) -> Any:
    """Decode `encode_client_state`: tensors on the CPU, frozen sets as sets."""
    if isinstance(value, list):
        return [decode_client_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TYPE_TAG not in value:
        return {key: decode_client_state(item) for key, item in value.items()}
    return _decode_tagged(value)


def _decode_tagged(document: Mapping[str, Any]) -> Any:
    kind, value = document[_TYPE_TAG], document["value"]
    if kind == "array":
        flat = np.frombuffer(b64decode(value), dtype=np.dtype(document["dtype"]))
        array = flat.reshape(document["shape"]).copy()
        return array if array.ndim else array[()]
    if kind == "tensor":
        raw = bytearray(b64decode(value))
        if not raw:
            return torch.zeros(document["shape"], dtype=DTYPE_BY_NAME[document["dtype"]])
        return torch.frombuffer(raw, dtype=DTYPE_BY_NAME[document["dtype"]]).reshape(
            document["shape"]
        )
    makers: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "bytes": b64decode,
        "path": Path,
        "tuple": lambda one: tuple(decode_client_state(one)),
        "set": lambda one: set(decode_client_state(one)),
        "dict": lambda one: dict(decode_client_state(one)),
        "namespace": lambda one: Namespace(**decode_client_state(one)),
    }
    return makers[kind](value)
