"""A training function's result as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_RESULT_BYTES = 2**20
"""Limit of a result as JSON: the summary, the log and the client each copy the result."""


def encode_result(result: Any) -> dict[str, Any]:
    """Returns a result with the types that JSON has. Raises TypeError or ValueError if the result
    is not a JSON object, or larger than `MAX_RESULT_BYTES`."""
    if not isinstance(result, Mapping):
        raise TypeError(f"it is a {type(result).__name__}, not a dict")
    text = json.dumps(dict(result), default=_to_json_scalar)
    if len(text) > MAX_RESULT_BYTES:  # ASCII
        raise ValueError(
            f"as JSON it has {len(text)} bytes; allowed: {MAX_RESULT_BYTES}; write what is large "
            "to a file in `ctx.output_dir`, and return its name"
        )
    return dict(json.loads(text))


def _to_json_scalar(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a number, a string, a list or a dict")
