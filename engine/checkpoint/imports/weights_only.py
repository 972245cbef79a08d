"""Reads what `torch.save` wrote with torch's weights-only loader: data, never code.

DeepSpeed puts a few objects of its own beside the tensors (a loss scaler, an enum, addresses of
fragments). They become `InertObject` here, or a number, so DeepSpeed need not be installed and nothing of
it is run. An object of any other class is refused by name.
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


# What a torn or foreign file makes of the zip reader and of the weights-only unpickler.
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
    """Stands for an object of which nothing is run.

    Attributes:
        fields: what the object consisted of, where that is a dictionary.
    """

    def __init__(self, *_: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}


def load_weights_only(path: Path) -> dict[str, Any]:
    """The dictionary in a file of `torch.save`; its tensors are views of the mapped file.

    Raises:
        DataError: it is damaged, or not such a file.
        ConfigError: it holds objects of classes that are not DeepSpeed's.
    """
    try:
        names = get_unsafe_globals_in_checkpoint(str(path))
        strange = sorted(name for name in names if not name.startswith("deepspeed."))
        if strange:
            raise ConfigError(
                f"{path} holds objects of {', '.join(strange)}, and nothing is unpickled here",
                allowed="tensors, numbers, text, and lists and dictionaries of them",
                fix="what was saved beside the model (client_state): save it as plain values",
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
