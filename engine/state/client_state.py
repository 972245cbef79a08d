"""A script's own values in a checkpoint (`client_state`), as JSON: nothing is ever unpickled."""

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
from rayzero.engine.state.parts import DTYPES, dtype_name

ARRAY_BYTES = 4 << 20
"""The largest tensor or array that is taken: a checkpoint's JSON part is read as a whole."""

_TAG = "__rayzero__"
_ALLOWED = (
    "None, bool, int, float, str, bytes, list, tuple, set, dict, argparse.Namespace, Path, numpy "
    f"arrays and numbers, and tensors, up to {ARRAY_BYTES >> 20} MiB each"
)


def encode(value: Any, where: str = "client_state") -> Any:
    """`value` as JSON can hold it.

    Raises:
        EngineError: naming the place of what cannot be kept.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and isfinite(value)):
        return value
    if kind is list:
        return _items(value, where)
    if kind in (dict, OrderedDict) and all(type(key) is str and key != _TAG for key in value):
        return {key: encode(one, f"{where}[{key!r}]") for key, one in value.items()}
    return _tagged(value, where)


def _tagged(value: Any, where: str) -> dict[str, Any]:
    """What JSON has no word for."""
    kind = type(value)
    if kind is float:
        return {_TAG: "float", "value": repr(value)}
    if kind in (dict, OrderedDict):
        pairs = [[key, one] for key, one in value.items()]
        return {_TAG: "dict", "value": _items(pairs, where)}
    if kind in (tuple, torch.Size):
        return {_TAG: "tuple", "value": _items(value, where)}
    if kind in (set, frozenset):
        return {_TAG: "set", "value": _items(value, where)}
    if kind is bytes:
        return {_TAG: "bytes", "value": b64encode(value).decode()}
    if kind is Namespace:
        return {_TAG: "namespace", "value": encode(vars(value), where)}
    if isinstance(value, Path):
        return {_TAG: "path", "value": str(value)}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        return {_TAG: "array", "dtype": array.dtype.str} | _raw(array, where)
    if kind in (Tensor, torch.nn.Parameter) and value.dtype in DTYPES.values():
        flat = value.detach().cpu().contiguous()
        raw = flat.reshape(-1).view(torch.uint8).numpy().reshape(-1)
        return (
            {_TAG: "tensor", "dtype": dtype_name(value.dtype)}
            | _raw(raw, where)
            | {"shape": list(value.shape)}
        )
    raise EngineError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold",
        allowed=_ALLOWED,
        fix="save what it is made of, e.g. its state_dict() or vars(), or keep it in a file",
    )


def _items(values: Any, where: str) -> list[Any]:
    return [encode(one, f"{where}[{number}]") for number, one in enumerate(values)]


def _raw(array: Any, where: str) -> dict[str, Any]:
    if array.nbytes > ARRAY_BYTES:
        raise EngineError(
            f"{where} has {array.nbytes} bytes",
            allowed=f"tensors and arrays of at most {ARRAY_BYTES} bytes",
            fix="make it a buffer of the model, or keep it in a file of its own",
        )
    return {"shape": list(array.shape), "value": b64encode(array.tobytes()).decode()}


def decode(value: Any) -> Any:
    """What `encode` was given; tensors on the CPU, frozen sets as sets."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(one) for key, one in value.items()}
    return _untagged(value)


def _untagged(document: Mapping[str, Any]) -> Any:
    kind, value = document[_TAG], document["value"]
    if kind == "array":
        flat = np.frombuffer(b64decode(value), dtype=np.dtype(document["dtype"]))
        array = flat.reshape(document["shape"]).copy()
        return array if array.ndim else array[()]
    if kind == "tensor":
        raw = bytearray(b64decode(value))
        if not raw:
            return torch.zeros(document["shape"], dtype=DTYPES[document["dtype"]])
        return torch.frombuffer(raw, dtype=DTYPES[document["dtype"]]).reshape(document["shape"])
    makers: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "bytes": b64decode,
        "path": Path,
        "tuple": lambda one: tuple(decode(one)),
        "set": lambda one: set(decode(one)),
        "dict": lambda one: dict(decode(one)),
        "namespace": lambda one: Namespace(**decode(one)),
    }
    return makers[kind](value)
