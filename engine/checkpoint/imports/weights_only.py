"""Loads files of `torch.save` with torch's weights-only loader: data, never code.

DeepSpeed saves a few objects of its own classes beside the tensors (a loss scaler, an enum,
fragment addresses). They are loaded as `InertObject` or a number: DeepSpeed is not needed, and none
of its code runs. Objects of any other class are refused by name.
"""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from rayzero.engine.errors import ConfigError, DataError, first_line

_STAGE_ENUM = "deepspeed.runtime.zero.config.ZeroStageEnum"
# Errors of the zip reader and the weights-only unpickler for truncated or foreign files.
_DAMAGE_ERRORS = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    pickle.UnpicklingError,
    struct.error,
)


class InertObject:
    """Placeholder of an object whose class is not loaded.

    Attributes:
        fields: the object's state if it is a dictionary.
    """

    def __init__(self, *_: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}


def load_weights_only(path: Path) -> dict[str, Any]:
    """Load the dictionary in a file of `torch.save`; tensors are views of the mapped file.

    Raises:
        DataError: the file is damaged or of another format.
        ConfigError: it has objects of classes other than DeepSpeed's.
    """
    try:
        names = get_unsafe_globals_in_checkpoint(str(path))
        unsupported = sorted(name for name in names if not name.startswith("deepspeed."))
        if unsupported:
            raise ConfigError(
                f"{path} holds objects of {', '.join(unsupported)}, which would run code to load",
                allowed="tensors, numbers, text, and lists and dictionaries of them",
                fix="save what is stored beside the model (client_state) as plain values",
            )
        stubs: list[Any] = [(int if name == _STAGE_ENUM else InertObject, name) for name in names]
        with safe_globals(stubs):
            content = torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except _DAMAGE_ERRORS as error:
        reason = first_line(error)
        raise DataError(
            f"{path} cannot be read: {reason}", allowed="a file of torch.save"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}", allowed="a dictionary")
    return content
