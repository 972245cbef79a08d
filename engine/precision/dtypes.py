"""Names of dtypes in state indexes and checkpoint files. They are those of safetensors."""

from __future__ import annotations

from typing import Any

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
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPE_BY_NAME = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the dtype's name in state indexes. Raises EngineError if the dtype is not supported
    in training state."""
    if dtype not in _DTYPE_NAMES:
        raise EngineError(
            f"the training state holds a tensor of {dtype}",
            allowed=", ".join(str(supported) for supported in _DTYPE_NAMES),
        )
    return _DTYPE_NAMES[dtype]


def scalar_from_json(saved: Any) -> Any:
    """Returns a scalar of optimizer state: a tensor for `{"dtype": ..., "value": ...}`, any other
    value unchanged. Values outside of the dtype's range do not raise."""
    if not isinstance(saved, dict):
        return saved
    wide = torch.float64 if isinstance(saved["value"], float) else torch.int64
    return torch.tensor(saved["value"], dtype=wide).to(DTYPE_BY_NAME[saved["dtype"]])
