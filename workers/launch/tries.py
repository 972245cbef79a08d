"""Overrides a launched script's settings, and times short runs of the script."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rayzero.engine.config import parse_config, read_config
from rayzero.engine.config.parse import ConfigSource, merge_config
from rayzero.engine.device import Device
from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.planning.activations import copy_without_memory
from rayzero.engine.planning.persistent import persistent_bytes
from rayzero.engine.tensor_tree import iter_tensors
from rayzero.engine.zero.placement import STAGES

log = logging.getLogger("rayzero.workers")


class TryEndedError(BaseException):
    """Ends a short run of a script; `result` is what was measured, as JSON. It is no Exception, so
    that the script does not handle it."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__("the try is over")
        self.result = result


class ScriptSettings:
    """Overrides the settings of a launched script, and ends a run that is only to be measured. Its
    methods are called by the script's session, in the training thread.

    Args:
        overrides: changes to the script's config, as `merge_config` takes them.
        timed_steps: the first and the last step to time; the script ends after the last one. If
            empty, the script ends where it builds its engine, with the planner's estimates. If
            None, it runs to its own end.
    """

    def __init__(
        self,
        overrides: Mapping[str, Any],
        timed_steps: Sequence[int] | None,
        device: Device,
        world_size: int,
    ) -> None:
        self._overrides = overrides
        self._timed_steps = timed_steps
        self._device = device
        self._world_size = world_size
        self._document: dict[str, Any] = {}  # as the script gave it
        self._by_stage: dict[int, dict[str, Any]] = {}  # the config at each stage that is valid
        self._step_s: list[float] = []
        self._input_shape: list[int] = []

    def adapt_config(self, config: ConfigSource | None) -> ConfigSource | None:
        """Returns the config with the overrides.

        Raises:
            ConfigError: the planner's estimates are wanted, and no stage is valid with the config.
        """
        if self._timed_steps is None and not self._overrides:
            return config
        self._document = {} if config is None else read_config(config)
        merged = merge_config(self._document, self._overrides)
        if self._timed_steps != []:
            return merged
        refusals = list[ConfigError]()
        for stage in STAGES:
            document = merge_config(merged, {"zero_optimization": {"stage": stage.number}})
            try:
                parse_config(document)
                self._by_stage[stage.number] = document
            except ConfigError as error:  # 1-bit Adam requires stage 0, for example
                refusals.append(error)
        if not self._by_stage:
            raise refusals[0]
        return next(iter(self._by_stage.values()))

    def on_model(self, model: nn.Module) -> None:
        """Raises TryEndedError with the planner's estimates, if only these are wanted."""
        if self._timed_steps:
            model.register_forward_pre_hook(self._note_shape, with_kwargs=True)
        elif self._timed_steps is not None:
            memory = self._device.memory_info()
            plan = {
                "document": self._document,
                "stage_bytes": {stage: self._held_bytes(model, stage) for stage in self._by_stage},
                "device_bytes": None if memory is None else sum(memory),
                "world_size": self._world_size,
            }
            raise TryEndedError(plan)

    def on_step_end(self, metrics: Mapping[str, float]) -> None:
        """Raises TryEndedError after the last timed step."""
        if not self._timed_steps:
            return
        first, last = self._timed_steps
        if metrics["step"] >= first:
            self._step_s.append(metrics["step_s"])
        if metrics["step"] >= last:
            measured = {
                "step_s": sum(self._step_s) / len(self._step_s),
                "global_batch": int(metrics["step_samples"]),
                "flops_per_s": metrics.get("flops_per_s"),
                "peak_bytes": self._device.peak_bytes(),
                "input_shape": self._input_shape,
            }
            raise TryEndedError(measured)

    def _note_shape(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        first = next(iter_tensors((args, kwargs)), None)
        if first is not None and not self._input_shape:
            self._input_shape = list(first.shape)

    def _held_bytes(self, model: nn.Module, stage: int) -> int:
        """Estimates the bytes that a rank holds on its device between two steps. Returns 0 if the
        model cannot be copied to the meta device."""
        from rayzero.engine.planning.search import MemoryEstimate  # imports torch's compiler

        config = parse_config(self._by_stage[stage])
        try:
            meta_model = copy_without_memory(model, torch.device("meta"))
            held = persistent_bytes(meta_model, config, self._world_size)
        except Exception as error:  # noqa: BLE001  # the user's model is copied
            log.warning("stage %d: its memory is not estimated: %s", stage, first_line(error))
            return 0
        return MemoryEstimate(held).device_total_bytes
