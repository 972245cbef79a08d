"""Dtypes and their names in files."""

from __future__ import annotations

import torch

from rayzero.engine.errors import EngineError

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


DTYPE_BY_NAME = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that tables give a dtype.

    Raises:
        EngineError: tables cannot hold it.
    """
    if dtype not in _DTYPE_NAMES:
        raise EngineError(
            f"the training state holds a tensor of {dtype}",
            allowed=", ".join(str(one) for one in _DTYPE_NAMES),
        )
    return _DTYPE_NAMES[dtype]
