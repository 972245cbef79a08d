"""Memory estimates of a model under candidate settings, and the first setting that fits a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from rayzero.engine.builder import compile_model
from rayzero.engine.config import EngineConfig, parse_config
from rayzero.engine.data.batch_sizes import resolve_batch_sizes
from rayzero.engine.device import local_device
from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.units import name_params, plan_blocks
from rayzero.engine.planning import USABLE_FRACTION
from rayzero.engine.planning.activations import (
    MakeBatch,
    MicroStepTrace,
    copy_without_memory,
    fake_tensors,
    trace_micro_step,
)
from rayzero.engine.planning.persistent import persistent_bytes
from rayzero.engine.precision.policy import choose_precision

THREAD_BYTES_PER_S = 10e9
"""Bandwidth of host memory for each of several threads: AdamW's 28 bytes per element take 2.8 ns.
For a thread that runs alone, 1.4 ns were measured on a server's core."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank by class.

    Attributes:
        bytes: by class: those of `engine.planning.persistent`, and `activations`.
        flops: of a micro-step on one rank; 0 without a batch.
    """

    bytes: dict[str, int]
    flops: int = 0

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes on the accelerator or, without one, in the process's memory."""
        others = ("host_", "disk_")
        return {name: size for name, size in self.bytes.items() if not name.startswith(others)}

    def offloaded_bytes(self, place: str) -> dict[str, int]:
        """Returns the bytes in host memory (`host`) or in files (`disk`) by class."""
        return {
            name.removeprefix(f"{place}_"): size
            for name, size in self.bytes.items()
            if name.startswith(f"{place}_")
        }

    @property
    def device_total_bytes(self) -> int:
        """Peak bytes on the device. Activations and unit gradients live during backward, gradient
        copies during the update, so only the larger of the two counts."""
        sizes = self.device_bytes
        backward = sizes.get("activations", 0) + sizes.get("unit_grads", 0)
        return sum(sizes.values()) - min(backward, sizes.get("grad_copies", 0))

    @property
    def host_total_bytes(self) -> int:
        return sum(self.offloaded_bytes("host").values())

    @property
    def cpu_update_s(self) -> float:
        """Seconds that one thread takes for the optimizer's update in host memory; 0 if no state is
        offloaded."""
        host = self.offloaded_bytes("host")
        state = host.get("main_weights", 0) + host.get("optimizer_state", 0)  # read and written
        return (2 * state + host.get("main_grads", 0)) / THREAD_BYTES_PER_S


class MemoryPlanner:
    """Estimates the memory of one model under different settings.

    Args:
        make_model: builds the model; it is called on the meta device, so nothing is allocated.
        make_batch: makes a micro-batch of n samples; None leaves activations out.
    """

    def __init__(
        self, make_model: Callable[[], nn.Module], make_batch: MakeBatch | None = None
    ) -> None:
        self._make_model = make_model
        self._make_batch = make_batch
        self._traces: dict[tuple[torch.dtype, int, bool, bool | None], MicroStepTrace] = {}

    def estimate(
        self, config: EngineConfig, world_size: int, *, recomputed: bool = False
    ) -> MemoryEstimate:
        """Estimates one setting. `recomputed` stands for activation checkpointing of every block,
        as stage 3 gathers them. Raises ConfigError if the config does not fit the world, or the
        model cannot be traced."""
        if self._make_batch is None:
            return MemoryEstimate(persistent_bytes(self._meta_model, config, world_size))
        precision = choose_precision(config, torch.device("cpu"))
        micro_batch = resolve_batch_sizes(config, world_size).micro_batch
        by_block = config.zero_optimization.stage == 3 if config.compile.enabled else None
        key = precision.model_dtype(torch.float32), micro_batch, recomputed, by_block
        if key not in self._traces:
            with fake_tensors():
                model, batch = self._make_fake_model(), self._make_batch(micro_batch)
                blocks = _innermost_blocks(model) if recomputed else []
                if config.compile.enabled:
                    compile_model(model, config)
                self._traces[key] = trace_micro_step(model, precision, batch, blocks)
        trace = self._traces[key]
        sizes = persistent_bytes(self._meta_model, config, world_size, trace)
        return MemoryEstimate(sizes | {"activations": trace.activation_bytes}, trace.flops)

    def _make_fake_model(self) -> nn.Module:
        try:
            return self._make_model()
        except DataDependentOutputException:  # it makes a tensor on a named device, and reads it
            return copy_without_memory(self._meta_model, local_device())

    @cached_property
    def _meta_model(self) -> nn.Module:
        with torch.device("meta"):
            return self._make_model()


def _innermost_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks that stage 3 gathers and that contain no other block."""
    params = name_params(model, {})
    blocks = {plan.module for plan in plan_blocks(model, params, (), 1) if plan.module is not None}
    return [
        block
        for block in blocks
        if not any(inner in blocks for inner in block.modules() if inner is not block)
    ]


@dataclass(frozen=True)
class PlanSetting:
    """A candidate: a stage, what is offloaded, and whether blocks are recomputed."""

    stage: int
    recomputed: bool = False
    offload_optimizer: bool = False
    offload_param: bool = False

    @property
    def name(self) -> str:
        name = f"stage {self.stage}"
        if self.recomputed:
            name += ", activation checkpointing"
        if self.offload_optimizer and self.offload_param:
            name += ", optimizer and parameters on the CPU"
        elif self.offload_optimizer or self.offload_param:
            name += f", {'optimizer' if self.offload_optimizer else 'parameters'} on the CPU"
        return name

    def apply_to(self, document: dict[str, Any]) -> EngineConfig:
        """Returns the config of a document whose stage and offload are replaced by this setting."""
        zero = document.get("zero_optimization")
        zero = dict(zero) if isinstance(zero, dict) else {}
        zero["stage"] = self.stage
        for key in ("offload_optimizer", "offload_param"):
            zero.pop(key, None)
            if getattr(self, key):
                zero[key] = {"device": "cpu"}
        if self.stage < 3 or self.offload_param:  # keys for shards in the device's memory only
            zero.pop("zero_hpz_partition_size", None)
            zero.pop("zero_quantized_weights", None)
        return parse_config({**document, "zero_optimization": zero})


CANDIDATE_SETTINGS = (
    PlanSetting(0),
    PlanSetting(1),
    PlanSetting(2),
    PlanSetting(3),
    PlanSetting(2, recomputed=True),
    PlanSetting(3, recomputed=True),
    PlanSetting(2, recomputed=True, offload_optimizer=True),
    PlanSetting(3, recomputed=True, offload_optimizer=True),
    PlanSetting(3, recomputed=True, offload_optimizer=True, offload_param=True),
)
"""Ordered by step time, fastest first: the first setting that fits is recommended."""


@dataclass(frozen=True)
class SearchResult:
    """A setting, its estimate, and whether it fits; `fits` is None without a limit."""

    setting: PlanSetting
    estimate: MemoryEstimate
    fits: bool | None


def evaluate_settings(
    planner: MemoryPlanner, document: dict[str, Any], world_size: int, gpu_bytes: int | None = None
) -> list[SearchResult]:
    """Estimates every setting that is valid with the config, fastest first. Raises ConfigError if
    the config is wrong or does not fit the world, or the model cannot be traced.

    Args:
        document: an engine config; its stage and offload are replaced.
        gpu_bytes: memory of one GPU, of which `USABLE_FRACTION` is used.
    """
    results: list[SearchResult] = []
    for setting in CANDIDATE_SETTINGS:
        try:
            config = setting.apply_to(document)
        except ConfigError:
            if setting is CANDIDATE_SETTINGS[-1] and not results:
                raise
            continue  # 1-bit Adam, for example, requires stage 0
        estimate = planner.estimate(config, world_size, recomputed=setting.recomputed)
        fits = None
        if gpu_bytes is not None:
            fits = estimate.device_total_bytes <= USABLE_FRACTION * gpu_bytes
        results.append(SearchResult(setting, estimate, fits))
    return results


def first_fit(results: list[SearchResult]) -> SearchResult | None:
    """Returns the recommended setting; None if nothing fits, or without a limit."""
    return next((result for result in results if result.fits), None)
