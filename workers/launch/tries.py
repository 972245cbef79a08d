"""Short runs of a launched script with other settings, for `rayzero launch --autotuning`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.compression.select import check_compression
from rayzero.engine.config import parse_config, read_config
from rayzero.engine.config.parse import ConfigSource, merge_config
from rayzero.engine.device import get_device
from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.planning.persistent import persistent_bytes
from rayzero.engine.tensor_tree import iter_tensors
from rayzero.engine.zero.placement import STAGES

log = logging.getLogger("rayzero.workers")


class TryEndedError(BaseException):
    """The try is over. Not an Exception: the script must not handle it.

    Attributes:
        result: what was measured, as JSON.
    """

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__("the try is over")
        self.result = result


class ScriptSettings:
    """What replaces parts of the config that a script brings, and how far the script runs. Used by
    the training thread; the session calls it.

    Args:
        overrides: sections are merged into the script's; None removes a key.
        timed_steps: the first and the last of the steps that are timed, of which the last ends the
            script; empty: it ends where it builds its engine, with what the planner estimates;
            None: it runs to its end.
    """

    def __init__(
        self,
        overrides: Mapping[str, Any],
        timed_steps: Sequence[int] | None,
        device: torch.device,
        world_size: int,
    ) -> None:
        self._overrides = overrides
        self._timed_steps = timed_steps
        self._device = device
        self._world_size = world_size
        self._document: dict[str, Any] = {}  # as the script gave it
        self._documents: dict[int, dict[str, Any]] = {}  # the allowed ones, by stage
        self._step_s: list[float] = []
        self._input_shape: list[int] = []

    def adapt_config(self, config: ConfigSource | None) -> ConfigSource | None:
        """The script's config with the overrides; the config itself if there are none. Raises
        ConfigError if a plan is wanted, and no stage is valid with it."""
        if self._timed_steps is None and not self._overrides:
            return config
        self._document = {} if config is None else read_config(config)
        merged = merge_config(self._document, self._overrides)
        if self._timed_steps != []:
            return merged
        refusals = list[ConfigError]()
        for stage in STAGES:
            try:
                document = merge_config(merged, {"zero_optimization": {"stage": stage.number}})
                check_compression(parse_config(document))
                self._documents[stage.number] = document
            except ConfigError as error:  # 1-bit Adam requires stage 0, for example
                refusals.append(error)
        if not self._documents:
            raise refusals[0]
        return next(iter(self._documents.values()))

    def on_model(self, model: nn.Module) -> None:
        """The script builds its engine. Raises TryEndedError if only the plan is wanted."""
        if self._timed_steps is None:
            return
        if not self._timed_steps:
            memory = get_device(self._device).memory_info()
            raise TryEndedError(
                {
                    "document": self._document,
                    "stage_bytes": self._stage_bytes(model),
                    "device_bytes": None if memory is None else sum(memory),
                    "world_size": self._world_size,
                }
            )

        def note_shape(module: nn.Module, args: Any, kwargs: Any) -> None:
            del module
            first = next(iter_tensors((args, kwargs)), None)
            if first is not None and not self._input_shape:
                self._input_shape = list(first.shape)
                hook.remove()

        hook = model.register_forward_pre_hook(note_shape, with_kwargs=True)

    def on_step_end(self, metrics: Mapping[str, float]) -> None:
        """Raises TryEndedError after the last timed step."""
        if not self._timed_steps:
            return
        first, last = self._timed_steps
        if metrics["step"] >= first:
            self._step_s.append(metrics["step_s"])
        if metrics["step"] >= last:
            raise TryEndedError(
                {
                    "step_s": sum(self._step_s) / len(self._step_s),
                    "global_batch": int(metrics["step_samples"]),
                    "flops_per_s": metrics.get("flops_per_s"),
                    "peak_bytes": get_device(self._device).peak_bytes(),
                    "input_shape": self._input_shape,
                }
            )

    def _stage_bytes(self, model: nn.Module) -> dict[str, int]:
        """What the device holds between two steps, by the stages that the config allows; zeros if
        the model cannot be planned."""
        from rayzero.engine.planning.search import MemoryEstimate  # imports torch's compiler

        sizes = dict[str, int]()
        for stage, document in self._documents.items():
            try:
                held = persistent_bytes(
                    _on_meta_device(model), parse_config(document), self._world_size
                )
                sizes[str(stage)] = MemoryEstimate(held).device_total_bytes
            except Exception as error:  # noqa: BLE001  # the user's model is copied here
                log.warning("stage %d: its memory is not estimated: %s", stage, first_line(error))
                sizes[str(stage)] = 0
        return sizes


def _on_meta_device(model: nn.Module) -> nn.Module:
    """A copy of the model without memory."""

    def without_memory(tensor: Tensor) -> Tensor:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_param = isinstance(tensor, nn.Parameter)
        return nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_param else empty

    memo = {id(it): without_memory(it) for it in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)
