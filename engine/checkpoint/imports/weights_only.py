"""Loads files of `torch.save` with torch's weights-only loader: data, never code.

DeepSpeed saves a few objects of its own classes next to the tensors (a loss scaler, an enum,
fragment addresses). They are loaded as `InertObject` or a number: DeepSpeed is not needed, and none
of its code runs. Objects of any other class are refused by name.
"""

from __future__ import annotations

import pickle
import struct
from contextlib import closing
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from rayzero.engine.checkpoint.errors import store_errors
from rayzero.engine.checkpoint.store_local import LocalReadStream
from rayzero.engine.errors import CONTENT_ERRORS, ConfigError, DataError, first_line

_STAGE_ENUM = "deepspeed.runtime.zero.config.ZeroStageEnum"
# Errors of the zip reader and the weights-only unpickler for truncated or foreign files.
_READ_ERRORS = (OSError, EOFError, BadZipFile, pickle.UnpicklingError, struct.error)


class InertObject:
    """Placeholder of an object whose class is not loaded. `fields` is its state if that is a
    dictionary."""

    def __init__(self, *_: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}


def load_weights_only(path: Path) -> dict[str, Any]:
    """Load the dictionary in a file of `torch.save`; tensors are views of the mapped file.

    Raises:
        DataError: the file is damaged or of another format, or a tensor states more than it holds.
        StoreError: it cannot be opened, or is not a regular file.
        ConfigError: it has objects of classes other than DeepSpeed's.
    """
    with store_errors(str(path)), closing(LocalReadStream(path)) as file:
        nbytes = file.nbytes
    try:
        with ZipFile(path) as archive:  # which torch.save does not compress
            if sum(entry.file_size for entry in archive.infolist()) > nbytes:
                raise BadZipFile("it expands to more bytes than it has")
        names = get_unsafe_globals_in_checkpoint(str(path))
        unsupported = sorted(name for name in names if not name.startswith("deepspeed."))
        if unsupported:
            listed = ", ".join(unsupported[:5])
            raise ConfigError(
                f"{path} holds objects of {listed:.300}, which would run code to load",
                allowed="tensors, numbers, text, and lists and dictionaries of them",
                fix="save what is stored with the model (client_state) as plain values",
            )
        stubs: list[Any] = [(int if name == _STAGE_ENUM else InertObject, name) for name in names]
        with safe_globals(stubs):
            content = torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not a dictionary")
        _check_content(content, nbytes)
    except ConfigError:
        raise
    except (*_READ_ERRORS, *CONTENT_ERRORS) as error:
        raise DataError(
            f"{path} cannot be read: {first_line(error):.500}", allowed="a file of torch.save"
        ) from error
    return content


def _check_content(content: Any, nbytes: int) -> None:
    """Raises ValueError for a tensor that is not plain or larger than its storage or than the file,
    an integer of over 64 bits, or text that is not Unicode."""
    stack, seen = [content], set[int]()
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            _check_tensor(value, nbytes)
        elif isinstance(value, str):
            value.encode()
        elif isinstance(value, int) and abs(value) >> 63:
            raise ValueError("it holds an integer of over 64 bits")
        elif isinstance(value, InertObject):
            stack.append(value.fields)
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            stack += [*value, *value.values()] if isinstance(value, dict) else value


def _check_tensor(tensor: Tensor, nbytes: int) -> None:
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.is_quantized or tensor.is_nested or tensor.is_neg():
        raise ValueError(f"it holds a tensor of {tensor.layout} on {tensor.device}")
    held = min(nbytes, tensor.untyped_storage().nbytes())
    if tensor.nbytes > held:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} in a storage of {held} bytes")
