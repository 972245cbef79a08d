"""What a run would need on each rank, and which setting fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from rayzero.engine.config import EngineConfig, solve_batches
from rayzero.engine.factory import GRAD_SLOTS, plan_units
from rayzero.engine.layout.units import name_params, plan_blocks
from rayzero.engine.optim.build import maker
from rayzero.engine.planning.resting import Shape, resting_bytes, state_itemsize
from rayzero.engine.planning.trace import MakeBatch, Trace, fake_tensors, trace
from rayzero.engine.precision.choose import choose_precision
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.placement import STAGES


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank.

    Attributes:
        device_bytes: by class, on the accelerator, or in the process's memory without one.
        host_bytes: by class, of what is offloaded.
        flops: of a micro-step on one rank; 0 without a batch.
    """

    config: EngineConfig
    recomputed: bool
    device_bytes: dict[str, int]
    host_bytes: dict[str, int] = field(default_factory=dict)
    flops: int = 0

    @property
    def device_total_bytes(self) -> int:
        return sum(self.device_bytes.values())

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())


class Planner:
    """Works out what one model needs under different settings.

    Args:
        make_model: builds the model; it is called on fake tensors, so nothing is allocated.
        make_batch: makes a micro-batch of so many samples; None leaves activations out.
    """

    def __init__(
        self, make_model: Callable[[], nn.Module], make_batch: MakeBatch | None = None
    ) -> None:
        self._make_model = make_model
        self._make_batch = make_batch
        self._traces: dict[tuple[torch.dtype, int, bool], Trace] = {}

    def estimate(
        self, config: EngineConfig, world_size: int, *, recomputed: bool = False
    ) -> Estimate:
        """One setting.

        Args:
            recomputed: activation checkpointing of every block (what stage 3 gathers as one).

        Raises:
            ConfigError: the config does not fit the world, or the model cannot be traced.
        """
        zero = config.zero_optimization
        stage = STAGES[zero.stage].on(world_size)
        precision = choose_precision(config, torch.device("cpu"))
        with fake_tensors():
            model = self._make_model()
            params = name_params(model, {one: 0 for one in model.parameters() if one.requires_grad})
            plans = plan_units(model, params, config, stage, world_size)
        itemsize = state_itemsize(maker(config.optimizer), torch.float32) if config.optimizer else 0
        shape = Shape(stage, precision, itemsize, GRAD_SLOTS, config.rayzero.slots, zero)
        resting = resting_bytes(plans, shape)
        device, host = dict(resting.device), dict(resting.host)
        planned = {param for plan in plans for param in plan.params}
        device["model_weights"] = device.get("model_weights", 0) + sum(
            one.param.numel() * precision.model_dtype(one.param.dtype).itemsize
            for one in params
            if one.param not in planned
        )
        if self._make_batch is None:
            return Estimate(config, recomputed, device, host)
        micro_batch = solve_batches(config, world_size).micro_batch
        key = precision.model_dtype(torch.float32), micro_batch, recomputed
        if key not in self._traces:
            self._traces[key] = self._trace(precision, micro_batch, recomputed)
        found = self._traces[key]
        device["activations"] = found.activation_bytes
        return Estimate(config, recomputed, device, host, found.flops)

    def _trace(self, precision: Precision, micro_batch: int, recomputed: bool) -> Trace:
        if self._make_batch is None:
            raise RuntimeError("there is no batch to trace with")
        with fake_tensors():
            model = self._make_model()
            blocks = _blocks(model) if recomputed else []
            return trace(model, precision, self._make_batch(micro_batch), blocks)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """What is gathered as one at stage 3, but for what lies around others."""
    params = name_params(model, {})
    found = {plan.block for plan in plan_blocks(model, params, (), 1) if plan.block is not None}
    return [
        one for one in found if not any(sub in found for sub in one.modules() if sub is not one)
    ]
