"""A training state made of tensors, usually views of mapped files; weights in safetensors files.

Safetensors files have no optimizer state and do not tell buffers from parameters. All tensors are
named `weights/...` until `rename_to_model` renames the buffers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rayzero.engine.checkpoint.format import is_safe_name
from rayzero.engine.checkpoint.schema import INDEX, check_index, check_metadata, validate
from rayzero.engine.checkpoint.store_local import LocalStore
from rayzero.engine.errors import CONTENT_ERRORS, DataError, EngineError, first_line
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, StateSource, TensorRange
from rayzero.engine.precision.dtypes import dtype_name
from rayzero.engine.validation import repr_value


@dataclass(frozen=True)
class FlatTensor:
    """A flat tensor and the ranges of the state in it.

    Attributes:
        memory: 1-D and contiguous, in CPU memory.
        ranges: offsets count elements of `memory`.
        shapes: full shape of each logical tensor in `ranges`.
    """

    memory: Tensor
    ranges: Sequence[TensorRange]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def from_tensor(cls, name: str, tensor: Tensor) -> FlatTensor:
        ranges = (TensorRange(name, 0, tensor.numel(), 0),)
        return cls(flatten(tensor), ranges, {name: tuple(tensor.shape)})

    def block_index(self) -> BlockIndex:
        dtype = checked_dtype_name(self.memory.dtype, self.ranges[0].name)
        return BlockIndex(
            {part.name: LogicalTensor(dtype, self.shapes[part.name]) for part in self.ranges},
            tuple(replace(part, offset=part.offset * self.memory.itemsize) for part in self.ranges),
            self.memory.nbytes,
        )


def flatten(tensor: Tensor) -> Tensor:
    """Returns a 1-D, contiguous view of a tensor; a copy if the tensor is not contiguous."""
    return tensor.detach().reshape(-1).contiguous()


class TensorSource(StateSource):
    """A `StateSource` with one block for each flat tensor. `step` is 0 if the files do not state
    the number of finished steps."""

    def __init__(self, pieces: Sequence[FlatTensor], metadata: dict[str, Any]) -> None:
        pieces = [piece for piece in pieces if piece.ranges]
        self.block_indexes = [piece.block_index() for piece in pieces]
        try:
            check_metadata(metadata)
            for index in self.block_indexes:
                check_index(index)
        except (LookupError, ValueError) as error:
            raise DataError(f"the files hold no valid state: {first_line(error)}") from None
        self.step = metadata["step"]
        self._metadata = metadata
        self._memory = [piece.memory for piece in pieces]

    def metadata(self, rank: int) -> dict[str, Any]:
        """Returns the same JSON part for every rank."""
        return self._metadata

    def read(self, block: int, offset: int, into: memoryview) -> None:
        raw = self._memory[block].view(torch.uint8).numpy()
        into[:] = raw[offset : offset + len(into)].data

    def close(self) -> None:
        self._memory.clear()

    def rename(self, names: Mapping[str, str | None]) -> None:
        """Renames logical tensors. A new name of None drops the tensor."""
        self.block_indexes = [_rename_index(table, names) for table in self.block_indexes]


def _rename_index(table: BlockIndex, names: Mapping[str, str | None]) -> BlockIndex:
    new = {name: names.get(name, name) for name in table.tensors}
    return replace(
        table,
        tensors={name: table.tensors[old] for old, name in new.items() if name is not None},
        ranges=tuple(
            replace(part, name=name)
            for part in table.ranges
            if (name := new[part.name]) is not None
        ),
    )


def checked_dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Returns the dtype's name in state indexes. Raises DataError, which names the tensor, if the
    dtype is not supported."""
    try:
        return dtype_name(dtype)
    except EngineError as error:
        raise DataError(f"{tensor} is of {dtype}", error.allowed) from None


_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def open_safetensors(path: Path) -> TensorSource | None:
    """Opens the weights in a file or folder; None if it has no safetensors under the usual names.
    Raises DataError if files or tensors are missing or damaged; StoreError if a file cannot be
    read."""
    tensors = load_safetensors(path)
    if tensors is None:
        return None
    pieces = [
        FlatTensor.from_tensor(f"weights/{name}", tensor) for name, (tensor, _) in tensors.items()
    ]
    return TensorSource(pieces, {"step": 0, "sample_cursor": 0, "groups": []})


def load_safetensors(path: Path) -> dict[str, tuple[Tensor, Path]] | None:
    """Returns (tensor, path of its file) by name, of the tensors in a file or folder, as views of
    mapped files. Returns None, and raises, as `open_safetensors`."""
    if path.is_file() and path.suffix == ".safetensors":
        return _load_file(path)
    if (path / _INDEX_FILE).is_file():
        return _load_indexed(path)
    if (path / _SINGLE_FILE).is_file():
        return _load_file(path / _SINGLE_FILE)
    return None


def _load_file(path: Path) -> dict[str, tuple[Tensor, Path]]:
    try:
        return {name: (tensor, path) for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError, *CONTENT_ERRORS) as error:
        raise DataError(
            f"{path} cannot be read: {first_line(error):.500}", allowed="a safetensors file"
        ) from error


def _load_indexed(folder: Path) -> dict[str, tuple[Tensor, Path]]:
    """Loads all tensors that the index names, from the files that it names."""
    index = folder / _INDEX_FILE
    raw = LocalStore(folder).read(_INDEX_FILE)
    try:
        places = validate(INDEX, json.loads(raw)).weight_map
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{index} cannot be read: {first_line(error)}",
            allowed='JSON with "weight_map": {tensor: file in the same folder}',
        ) from error
    names_by_file: dict[str, list[str]] = {}
    for name, file in places.items():
        names_by_file.setdefault(file, []).append(name)
    tensors: dict[str, tuple[Tensor, Path]] = {}
    for file, names in names_by_file.items():
        if Path(file).name != file or not is_safe_name(file) or not (folder / file).is_file():
            raise DataError(f"{index} names {repr_value(file)}, which is no file in {folder}")
        content = _load_file(folder / file)
        if missing := [name for name in names if name not in content]:
            raise DataError(f"{folder / file} lacks {missing[0]!r}, which {index} places in it")
        tensors |= {name: content[name] for name in names}
    return tensors
