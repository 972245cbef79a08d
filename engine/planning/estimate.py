"""What a run would need on each rank, and which setting fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from rayzero.engine.config import EngineConfig, solve_batches
from rayzero.engine.config.zero import ZeroConfig
from rayzero.engine.factory import GRAD_SLOTS, plan_units
from rayzero.engine.layout.units import name_params, plan_blocks
from rayzero.engine.optim.build import groups_for
from rayzero.engine.optim.groups import find_groups, no_groups
from rayzero.engine.planning.resting import Shape, resting_bytes, state_itemsizes
from rayzero.engine.planning.trace import MakeBatch, Trace, fake_tensors, trace
from rayzero.engine.planning.travelling import travelling_bytes
from rayzero.engine.precision.choose import choose_precision
from rayzero.engine.precision.policy import Precision
from rayzero.engine.zero.placement import STAGES


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank.

    Attributes:
        device_bytes: by class, on the accelerator, or in the process's memory without one.
        host_bytes: by class, of what is offloaded.
        disk_bytes: by class, of what rests in files.
        flops: of a micro-step on one rank; 0 without a batch.
    """

    config: EngineConfig
    recomputed: bool
    device_bytes: dict[str, int]
    host_bytes: dict[str, int] = field(default_factory=dict)
    disk_bytes: dict[str, int] = field(default_factory=dict)
    flops: int = 0

    @property
    def device_total_bytes(self) -> int:
        """The most at once: activations and the optimizer's copies of gradients never meet."""
        found = self.device_bytes
        passing = [found.get(name, 0) for name in ("activations", "grad_copies")]
        return sum(found.values()) - min(passing)

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
        stage = STAGES[zero.stage].on(world_size, moves=_moves(zero))
        precision = choose_precision(config, torch.device("cpu"))
        with fake_tensors():
            model = self._make_model()
            trains = any(one.requires_grad for one in model.parameters())
            found = find_groups(model, None, None) if trains else no_groups(model)
            groups = groups_for(config.optimizer, model, found)
            params = name_params(model, groups.of)
            plans = plan_units(model, params, config, stage, world_size)
        itemsizes = state_itemsizes(config.optimizer, groups.options)
        shape = Shape(stage, precision, itemsizes, GRAD_SLOTS, config.rayzero.slots, zero)
        resting = resting_bytes(plans, shape)
        device, host, disk = dict(resting.device), dict(resting.host), dict(resting.disk)
        device |= travelling_bytes(plans, config, stage, precision, world_size, GRAD_SLOTS)
        planned = {param for plan in plans for param in plan.params}
        device["model_weights"] = device.get("model_weights", 0) + sum(
            one.param.numel() * precision.model_dtype(one.param.dtype).itemsize
            for one in params
            if one.param not in planned
        )
        if self._make_batch is None:
            return Estimate(config, recomputed, device, host, disk)
        micro_batch = solve_batches(config, world_size).micro_batch
        key = precision.model_dtype(torch.float32), micro_batch, recomputed
        if key not in self._traces:
            self._traces[key] = self._trace(precision, micro_batch, recomputed)
        traced = self._traces[key]
        device["activations"] = traced.activation_bytes
        return Estimate(config, recomputed, device, host, disk, traced.flops)

    def _trace(self, precision: Precision, micro_batch: int, recomputed: bool) -> Trace:
        if self._make_batch is None:
            raise RuntimeError("there is no batch to trace with")
        with fake_tensors():
            model = self._make_model()
            blocks = _blocks(model) if recomputed else []
            return trace(model, precision, self._make_batch(micro_batch), blocks)


def _moves(zero: ZeroConfig) -> bool:
    """Whether shards rest in other memory than the device's."""
    return zero.offload_optimizer.device != "none" or zero.offload_param.device != "none"


def _blocks(model: nn.Module) -> list[nn.Module]:
    """What is gathered as one at stage 3, but for what lies around others."""
    params = name_params(model, {})
    found = {plan.block for plan in plan_blocks(model, params, (), 1) if plan.block is not None}
    return [
        one for one in found if not any(sub in found for sub in one.modules() if sub is not one)
    ]
