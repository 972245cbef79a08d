"""Weights in safetensors files: one file, or a folder as transformers writes it.

Such files know neither an optimizer nor which of their tensors are buffers: all are `weights/`
here, until `naming.use_model_names` has seen the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rayzero.engine.checkpoint.imports.tensors import Piece, TensorSource
from rayzero.engine.errors import DataError

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def open_safetensors(path: Path) -> TensorSource | None:
    """The weights in a file or folder; None if it holds no safetensors under the usual names.

    Raises:
        DataError: files or tensors are missing or damaged.
    """
    if path.is_file():
        tensors = _tensors(path) if path.suffix == ".safetensors" else None
    elif (path / _INDEX).is_file():
        tensors = _indexed(path)
    elif (path / _ONE).is_file():
        tensors = _tensors(path / _ONE)
    else:
        tensors = None
    if tensors is None:
        return None
    pieces = [Piece.whole(f"weights/{name}", tensor) for name, tensor in tensors.items()]
    small = {"step": 0, "sample_cursor": 0, "groups": []}
    return TensorSource(pieces, small, has_optimizer=False)


def _tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, as views of the mapped file."""
    return dict(_read(path))


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  it is no dictionary
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}", allowed="a safetensors file") from error


def _indexed(folder: Path) -> dict[str, Tensor]:
    """All tensors that the index names, from the files that it names."""
    index = folder / _INDEX
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        wanted: dict[str, list[str]] = {}
        for name, file in places.items():
            wanted.setdefault(str(file), []).append(name)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{index} cannot be read: {error!r}",
            allowed='JSON with "weight_map": {tensor: file in the same folder}',
        ) from error
    tensors: dict[str, Tensor] = {}
    for file, names in wanted.items():
        if Path(file).name != file or not (folder / file).is_file():
            raise DataError(f"{index} names {file!r}, which is no file in {folder}")
        held = _tensors(folder / file)
        missing = [name for name in names if name not in held]
        if missing:
            raise DataError(f"{folder / file} lacks {missing[0]!r}, which {index} places in it")
        tensors |= {name: held[name] for name in names}
    return tensors
