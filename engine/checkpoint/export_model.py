"""Assembles whole tensors, the model and the optimizer from a training state, for exports; writes a
model as one file."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor

from rayzero.engine.errors import DataError
from rayzero.engine.layout.packed import is_wrapper
from rayzero.engine.layout.reshard import RangeCopy, plan_copies
from rayzero.engine.layout.state_index import LogicalTensor, StateSource, TensorRange
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME, scalar_from_json


class WholeTensors:
    """The logical tensors of a source (`tensors`, by name), assembled from its ranges. The
    constructor raises MissingRangesError if the source is incomplete."""

    def __init__(
        self, source: StateSource, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        self._source = source
        self._progress = progress
        self._block_indexes = source.block_indexes
        self.tensors: dict[str, LogicalTensor] = {}
        for table in self._block_indexes:
            self.tensors |= table.tensors
        whole = [TensorRange(name, 0, tensor.numel, 0) for name, tensor in self.tensors.items()]
        self._copies: defaultdict[str, list[RangeCopy]] = defaultdict(list)
        for copy in plan_copies(whole, [table.ranges for table in self._block_indexes]):
            self._copies[copy.wanted.name].append(copy)

    def names_of_kind(self, kind: str) -> dict[str, str]:
        """Maps model names to logical names of a kind: `weights`, `buffers`, `optimizer.<key>`."""
        start = f"{kind}/"
        return {name.removeprefix(start): name for name in self.tensors if name.startswith(start)}

    def read(self, name: str) -> Tensor:
        """Reads a whole tensor into new memory, in the dtype of the state. Raises DataError if its
        bytes are damaged or missing."""
        tensor = self.tensors[name]
        try:
            flat = torch.empty(tensor.numel, dtype=DTYPE_BY_NAME[tensor.dtype])
        except RuntimeError as error:
            raise DataError(f"no memory for {name} of shape {tensor.shape}") from error
        raw = flat.view(torch.uint8).numpy().data
        for copy in self._copies[name]:
            table = self._block_indexes[copy.source]
            size = table.tensors[name].item_bytes
            offset = copy.held.offset + (copy.start - copy.held.start) * size
            part = raw[copy.start * size : copy.stop * size]
            self._source.read(copy.source, offset, part)
            self._progress(part.nbytes)
        return flat.view(tensor.shape)


class ExportedModel:
    """The model and optimizer of a state as whole tensors under the model's names. `ties` maps each
    alias of a tied parameter to the name under which the parameter is stored. The constructor
    raises MissingRangesError if the source is incomplete."""

    def __init__(
        self, source: StateSource, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        self._tensors = WholeTensors(source, progress)
        self._metadata = source.metadata(0)
        names_of_kind = self._tensors.names_of_kind
        self._logical_names = names_of_kind("weights") | names_of_kind("buffers")
        ties: dict[str, str] = self._metadata.get("ties") or {}
        # A state that was saved without frozen parameters may still list their names.
        self.ties = {alias: name for alias, name in ties.items() if name in self._logical_names}

    def sizes(self) -> dict[str, int]:
        """Returns the exported bytes of each parameter and buffer."""
        return {
            name: self._tensors.tensors[logical].numel * self._export_dtype(name).itemsize
            for name, logical in self._logical_names.items()
        }

    def read(self, name: str) -> Tensor:
        """Reads a parameter or buffer. Raises DataError if its bytes are damaged or missing."""
        return self._tensors.read(self._logical_names[name]).to(self._export_dtype(name))

    def optimizer(self) -> dict[str, Any]:
        """Returns `{"optimizer": ...}` as in `torch.distributed.checkpoint.state_dict`: state and
        options by parameter name. Empty for a state with weights only."""
        kinds = sorted({name.partition("/")[0] for name in self._tensors.tensors})
        moments = {
            kind.removeprefix("optimizer."): self._tensors.names_of_kind(kind)
            for kind in kinds
            if kind.startswith("optimizer.")
        }
        groups: list[dict[str, Any]] = self._metadata.get("groups") or []
        state: dict[str, dict[str, Any]] = {}
        options = []
        for group in groups:
            scalars = group.get("scalars", {})
            for name in group.get("params", ()):
                state[name] = {key: scalar_from_json(value) for key, value in scalars.items()}
                state[name] |= {
                    key: self._tensors.read(names[name])
                    for key, names in moments.items()
                    if name in names
                }
            # JSON has no tuples, which optimizers expect (betas).
            plain = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in group["options"].items()
            }
            options.append(plain | {"params": list(group.get("params", ()))})
        return {"optimizer": {"state": state, "param_groups": options}} if groups else {}

    def _export_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a parameter in the model; the stored dtype of a buffer."""
        stored = DTYPE_BY_NAME[self._tensors.tensors[self._logical_names[name]].dtype]
        in_model = (self._metadata.get("model_dtypes") or {}).get(name)
        return DTYPE_BY_NAME[in_model] if in_model and stored.is_floating_point else stored


def save_safetensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Calls `safetensors.save_file`, with the default permissions of new files, not owner-only."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(dict(tensors), path, metadata)
    path.chmod(mode)


def write_model_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a state dict durably: in safetensors format if `path` has that suffix, otherwise for
    `torch.load`. Raises DataError if the file cannot be written. Several processes may write the
    same path: each writes its own temporary file, and the last one to rename it wins."""
    wrapper = next((name for name, tensor in tensors.items() if is_wrapper(tensor)), None)
    if wrapper is not None and path.suffix == ".safetensors":
        kind = type(tensors[wrapper]).__name__
        raise DataError(
            f"{path} cannot hold {wrapper}, a {kind}", fix="give it a suffix such as .bin"
        )
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            # Cloned, because the format refuses tied entries, which share memory.
            save_safetensors({name: value.clone() for name, value in tensors.items()}, partial)
        else:
            torch.save(dict(tensors), partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        is_disk_error = isinstance(error, OSError)
        fix = "check save_dir" if is_disk_error else "use another suffix, for torch.load's format"
        raise DataError(f"{path} cannot be written: {error}", fix=fix) from error
