"""A whole model as one file, durable before it has its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rayzero.engine.errors import DataError


def save_safetensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """As the library, but with the permissions of any new file: its own are the owner's alone."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(dict(tensors), path, metadata)
    path.chmod(mode)


def write_whole(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a state dict: as safetensors if the file's name says so, else for `torch.load`.

    Raises:
        DataError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            # Tied entries are one tensor, which that format refuses.
            save_safetensors({name: one.clone() for name, one in tensors.items()}, partial)
        else:
            torch.save(dict(tensors), partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error}", fix="save_dir") from error
