"""What an export takes out of a training state: the model as it was trained, and its optimizer."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.checkpoint.whole import WholeTensors
from rayzero.engine.errors import ConfigError, nearest
from rayzero.engine.state.parts import DTYPES
from rayzero.engine.state.source import StateSource

_CHOICES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Exportable:
    """A state's model and optimizer under plain names, whole.

    Attributes:
        ties: other names of parameters -> the name that they are stored under.
    """

    def __init__(self, source: StateSource, dtype: str = "") -> None:
        """
        Raises:
            ConfigError: there is no such dtype.
            MissingRangesError: the source is incomplete.
        """
        if dtype and dtype not in _CHOICES:
            raise ConfigError(
                f"cannot export as {dtype!r}{nearest(dtype, list(_CHOICES))}",
                allowed=", ".join(_CHOICES),
            )
        self._whole = WholeTensors(source)
        self._small = source.small(0)
        self._wanted = _CHOICES.get(dtype)
        self._weights = self._whole.of_kind("weights")
        self._buffers = self._whole.of_kind("buffers")
        self.ties: dict[str, str] = self._small.get("ties") or {}

    def sizes(self) -> dict[str, int]:
        """Bytes of each parameter and buffer as it is exported."""
        return {
            name: prod(self._whole.tensors[full].shape) * self._dtype(name).itemsize
            for name, full in (self._weights | self._buffers).items()
        }

    def read(self, name: str) -> Tensor:
        """A parameter or buffer.

        Raises:
            DataError: its bytes are damaged or gone.
        """
        full = self._weights.get(name) or self._buffers[name]
        return self._whole.read(full).to(self._dtype(name))

    def optimizer(self) -> dict[str, Any]:
        """`optimizer`, as `torch.distributed.checkpoint.state_dict` names it: state and options
        by parameter name. Nothing for a state that has weights only.

        Raises:
            ConfigError: the state does not say which parameters are in which group.
        """
        kinds = {name.partition("/")[0] for name in self._whole.tensors}
        moments = {
            kind.removeprefix("optimizer."): self._whole.of_kind(kind)
            for kind in sorted(kinds)
            if kind.startswith("optimizer.")
        }
        groups: list[dict[str, Any]] = self._small.get("groups") or []
        if not groups:
            return {}
        state: dict[str, dict[str, Any]] = {}
        options = []
        for group in groups:
            names = self._members(group, len(groups), moments)
            numbers = group.get("scalars", {})
            for name in names:
                state[name] = {key: _number(value) for key, value in numbers.items()}
                state[name] |= {
                    key: self._whole.read(found[name])
                    for key, found in moments.items()
                    if name in found
                }
            plain = {key: _option(value) for key, value in group["options"].items()}
            options.append(plain | {"params": names})
        return {"optimizer": {"state": state, "param_groups": options}}

    def _members(
        self, group: dict[str, Any], count: int, moments: dict[str, dict[str, str]]
    ) -> list[str]:
        """The parameters of a group; of the only group, all that have optimizer state."""
        if "params" in group:
            return list(group["params"])
        if count > 1:
            raise ConfigError(
                f"the state has {count} parameter groups, and does not say which parameters are "
                "in which",
                allowed="the optimizer's state for an export as dcp",
                fix="export as safetensors or torch, which need the weights only",
            )
        return [name for name in self._weights if any(name in found for found in moments.values())]

    def _dtype(self, name: str) -> torch.dtype:
        """A parameter's dtype in the export; buffers keep theirs."""
        stored = DTYPES[self._whole.tensors[self._weights.get(name) or self._buffers[name]].dtype]
        if name not in self._weights or not stored.is_floating_point:
            return stored
        in_model = (self._small.get("model_dtypes") or {}).get(name)
        return self._wanted or (DTYPES[in_model] if in_model else stored)


def _number(value: Any) -> Any:
    """A number of optimizer state as the optimizer keeps it."""
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=DTYPES[value["dtype"]])
    return value


def _option(value: Any) -> Any:
    """JSON has no tuples, optimizers (betas) do."""
    return tuple(value) if isinstance(value, list) else value
