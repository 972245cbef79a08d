"""A training function's result as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_RESULT_BYTES = 2**20
"""The summary, the log and the process that follows copy it."""


def encode_result(result: Any) -> dict[str, Any]:
    """Returns a result as JSON holds it. Raises TypeError or ValueError if it is no JSON object, or
    large."""
    if not isinstance(result, Mapping):
        raise TypeError(f"it is a {type(result).__name__}, not a dict")
    return dict(json.loads(_to_short_json(dict(result))))


def _to_short_json(result: dict[Any, Any]) -> str:
    parts, nbytes = [], 0
    for part in json.JSONEncoder(default=_to_json_scalar).iterencode(result):
        parts.append(part)
        nbytes += len(part)  # ASCII
        if nbytes > MAX_RESULT_BYTES:
            raise ValueError(
                f"as JSON it has over {nbytes} bytes; allowed: {MAX_RESULT_BYTES}; write what is "
                "large to a file in `ctx.output_dir`, and return its name"
            )
    return "".join(parts)


def _to_json_scalar(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a number, a string, a list or a dict")
