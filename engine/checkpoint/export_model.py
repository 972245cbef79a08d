"""Whole tensors, model and optimizer of a training state for exports; saves a model as one file."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rayzero.engine.errors import ConfigError, DataError, did_you_mean
from rayzero.engine.layout.reshard import RangeCopy, plan_copies
from rayzero.engine.layout.state_index import LogicalTensor, StateSource, TensorRange
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME


class WholeTensors:
    """Assembles logical tensors from the ranges of a source.

    Attributes:
        tensors: all logical tensors by name.
    """

    def __init__(
        self, source: StateSource, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        """
        Raises:
            MissingRangesError: the source is incomplete.
        """
        self._source = source
        self._progress = progress
        self._block_indexes = source.block_indexes
        self.tensors: dict[str, LogicalTensor] = {}
        for table in self._block_indexes:
            self.tensors |= table.tensors
        wanted = [TensorRange(name, 0, one.numel, 0) for name, one in self.tensors.items()]
        self._copies: defaultdict[str, list[RangeCopy]] = defaultdict(list)
        for copy in plan_copies(wanted, [table.ranges for table in self._block_indexes]):
            self._copies[copy.wanted.name].append(copy)

    def names_of_kind(self, kind: str) -> dict[str, str]:
        """Model names -> logical names of a kind: `weights`, `buffers`, `optimizer.<key>`."""
        start = f"{kind}/"
        return {name.removeprefix(start): name for name in self.tensors if name.startswith(start)}

    def read(self, name: str) -> Tensor:
        """The whole tensor in new memory, in the dtype of the state.

        Raises:
            DataError: its bytes are damaged or missing.
        """
        tensor = self.tensors[name]
        flat = torch.empty(tensor.numel, dtype=DTYPE_BY_NAME[tensor.dtype])
        raw = flat.view(torch.uint8).numpy().data
        for copy in self._copies[name]:
            table = self._block_indexes[copy.source]
            size = table.tensors[name].item_bytes
            at = copy.held.offset + (copy.start - copy.held.start) * size
            part = raw[copy.start * size : copy.stop * size]
            self._source.read(copy.source, at, part)
            self._progress(part.nbytes)
        return flat.view(tensor.shape)


_EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ExportedModel:
    """The model and optimizer of a state as whole tensors under the model's names.

    Attributes:
        ties: alias of a tied parameter -> name it is stored under.
    """

    def __init__(
        self,
        source: StateSource,
        dtype: str = "",
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """
        Raises:
            ConfigError: the dtype is not supported.
            MissingRangesError: the source is incomplete.
        """
        if dtype and dtype not in _EXPORT_DTYPES:
            raise ConfigError(
                f"cannot export as {dtype!r}{did_you_mean(dtype, list(_EXPORT_DTYPES))}",
                allowed=", ".join(_EXPORT_DTYPES),
            )
        self._tensors = WholeTensors(source, progress)
        self._metadata = source.metadata(0)
        self._dtype_override = _EXPORT_DTYPES.get(dtype)
        self._weights = self._tensors.names_of_kind("weights")
        self._buffers = self._tensors.names_of_kind("buffers")
        self.ties: dict[str, str] = self._metadata.get("ties") or {}

    def sizes(self) -> dict[str, int]:
        """Bytes of each parameter and buffer as it is exported."""
        return {
            name: prod(self._tensors.tensors[full].shape) * self._export_dtype(name).itemsize
            for name, full in (self._weights | self._buffers).items()
        }

    def read(self, name: str) -> Tensor:
        """A parameter or buffer.

        Raises:
            DataError: its bytes are damaged or gone.
        """
        full = self._weights.get(name) or self._buffers[name]
        return self._tensors.read(full).to(self._export_dtype(name))

    def optimizer(self) -> dict[str, Any]:
        """`{"optimizer": ...}` as in `torch.distributed.checkpoint.state_dict`: state and options
        by parameter name. Empty for a state with weights only.

        Raises:
            ConfigError: the state lacks the parameters of its groups.
        """
        kinds = {name.partition("/")[0] for name in self._tensors.tensors}
        moments = {
            kind.removeprefix("optimizer."): self._tensors.names_of_kind(kind)
            for kind in sorted(kinds)
            if kind.startswith("optimizer.")
        }
        groups: list[dict[str, Any]] = self._metadata.get("groups") or []
        if not groups:
            return {}
        state: dict[str, dict[str, Any]] = {}
        options = []
        for group in groups:
            names = self._group_params(group, len(groups), moments)
            numbers = group.get("scalars", {})
            for name in names:
                state[name] = {key: _decode_scalar(value) for key, value in numbers.items()}
                state[name] |= {
                    key: self._tensors.read(found[name])
                    for key, found in moments.items()
                    if name in found
                }
            plain = {key: _decode_option(value) for key, value in group["options"].items()}
            options.append(plain | {"params": names})
        return {"optimizer": {"state": state, "param_groups": options}}

    def _group_params(
        self, group: dict[str, Any], count: int, moments: dict[str, dict[str, str]]
    ) -> list[str]:
        """The parameters of a group; of the only group, all that have optimizer state."""
        if "params" in group:
            return list(group["params"])
        if count > 1:
            raise ConfigError(
                f"the state has {count} parameter groups but not the names of their parameters, "
                "which a dcp export needs",
                allowed="a state with the parameters of each group",
                fix="export as safetensors or torch, which need only the weights",
            )
        return [name for name in self._weights if any(name in found for found in moments.values())]

    def _export_dtype(self, name: str) -> torch.dtype:
        """A parameter's dtype in the export; buffers keep theirs."""
        stored = DTYPE_BY_NAME[
            self._tensors.tensors[self._weights.get(name) or self._buffers[name]].dtype
        ]
        if name not in self._weights or not stored.is_floating_point:
            return stored
        in_model = (self._metadata.get("model_dtypes") or {}).get(name)
        return self._dtype_override or (DTYPE_BY_NAME[in_model] if in_model else stored)


def _decode_scalar(value: Any) -> Any:
    """A scalar of optimizer state as the optimizer keeps it."""
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=DTYPE_BY_NAME[value["dtype"]])
    return value


def _decode_option(value: Any) -> Any:
    """Restore tuples (betas), which JSON lacks."""
    return tuple(value) if isinstance(value, list) else value


def save_safetensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """`safetensors.save_file` with the default permissions of new files instead of owner-only."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(dict(tensors), path, metadata)
    path.chmod(mode)


def write_model_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict durably: safetensors by suffix, otherwise for `torch.load`.

    Raises:
        DataError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            # Cloned: the format refuses tied entries, which share memory.
            save_safetensors({name: value.clone() for name, value in tensors.items()}, partial)
        else:
            torch.save(dict(tensors), partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error}", fix="save_dir") from error
