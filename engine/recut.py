"""Re-cuts a live engine for other ranks, in place: after a loss, or when ranks come or go.

The model, its parameters, hooks and compiled code stay, and so do the optimizer, the schedule, the
loader and all objects that a script may hold. What depends on the number of ranks is replaced: the
shards of weights, gradients and optimizer state, and the buffers that they pass through.

Memory. Units are replaced one by one: what a new one lacks is read from the source before the old
one is dropped, so the peak is one unit above the larger of the two engines.

Order. The previous process group is gone, and the device has finished what was queued on it: no
kernel, copy or peer reads or writes the engine's memory. The new group exists. All ranks of it make
the same collectives in the same order as an engine that is built from a state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rayzero.engine.builder import (
    make_build_context,
    resolve_settings,
    split_step,
    with_saved_batch_sizes,
)
from rayzero.engine.comm.process_group import connect_backend
from rayzero.engine.compression.gradients import OneBitAdamReduction
from rayzero.engine.compression.select import make_grad_reduction, make_weight_gather
from rayzero.engine.layout.reshard import HeldRanges
from rayzero.engine.layout.state_index import LogicalTensor, StateSource
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.optim.sharded_optimizer import OptimizerShard, optimizer_shards
from rayzero.engine.optim.whole_param_exchange import ShardedWholeParamOps
from rayzero.engine.optim.whole_params import NeedsWholeParams
from rayzero.engine.runtime_builder import make_grad_buffers, make_unit
from rayzero.engine.state.error_feedback import load_residuals
from rayzero.engine.state.kept import KeptSource
from rayzero.engine.state.load import make_optimizer_state
from rayzero.engine.state.ranges import buffer_ranges, read_ranges, weights_range
from rayzero.engine.training_step import TrainingStep
from rayzero.engine.zero.build_context import BuildContext
from rayzero.engine.zero.parameters import ShardedWeights
from rayzero.engine.zero.unit import Unit


def recut_engine(
    step: TrainingStep,
    model: nn.Module,
    source: StateSource,
    *,
    keep: bool,
    shares: Sequence[float] = (),
) -> KeptSource:
    """Continues on the ranks of the present process group, from the state of `source`. Collective.

    Args:
        step: the parts of the engine; `model` is its model.
        source: a complete state, also of ranks that are gone.
        keep: this rank's memory holds its part of that state, unchanged: it is the first source.
        shares: each rank's share of a step's samples; empty for even shares.

    Returns:
        The counts of bytes that were moved, copied and read; closed.

    Raises:
        DataError, EngineError: the state cannot be read. It can be tried again, with `keep` false.
        ConfigError: the batch sizes do not fit the ranks.
    """
    runtime = step.runtime
    runtime.collectives.in_step = True  # nothing of the previous group is waited for
    step.abandon()
    if runtime.lazy_weights is not None:
        runtime.lazy_weights.start({})
    kept = KeptSource(step.state.private_ranges() if keep else [], source)
    if runtime.unshard_scheduler is not None:
        runtime.unshard_scheduler.abandon()
    runtime.collectives.abandon()
    backend, device = connect_backend()
    runtime.collectives.reconnect(backend)
    collectives = runtime.collectives
    precision = runtime.precision
    config = with_saved_batch_sizes(step.settings.config, source.metadata(0))
    context = make_build_context(
        config, model, collectives, device, restoring=True, elastic=True, precision=precision
    )
    step.settings = resolve_settings(config, precision, collectives, device, shares)
    step.state.recut(kept, lambda: _Recut(step, model, context, kept).run())
    micro_steps = step.settings.batches.micro_steps
    step.meter.step_work.micro_steps = micro_steps
    step.meter.open_monitors()
    step.state.progress.micro_batch_weight = 1.0 / (micro_steps * collectives.world_size)
    step.micro_batches.recut(split_step(step.settings, collectives))
    for buffer in _unsaved_buffers(model):
        collectives.broadcast(buffer)
    kept.close()
    return kept


class _Recut:
    """The replacement of one engine's tensors."""

    def __init__(
        self, step: TrainingStep, model: nn.Module, context: BuildContext, source: KeptSource
    ) -> None:
        self._step = step
        self._runtime = step.runtime
        self._optimizer = step.optimizer
        self._model = model
        self._context = context
        self._source = source
        self._held = HeldRanges([index.ranges for index in source.block_indexes])
        self._tensors: dict[str, LogicalTensor] = {
            name: tensor for index in source.block_indexes for name, tensor in index.tensors.items()
        }
        self._tensors_of: defaultdict[str, dict[str, LogicalTensor]] = defaultdict(dict)
        for name, tensor in self._tensors.items():  # `kind/parameter`
            self._tensors_of[name.partition("/")[2]][name] = tensor

    def run(self) -> None:
        """Not collective."""
        runtime = self._runtime
        context = self._context
        config = self._step.settings.config
        reduction = make_grad_reduction(config, context, self._step.settings.post_reduce_scale)
        plans = [_plan_again(unit, context) for unit in runtime.units]
        buffers = make_grad_buffers(plans, context, config)
        stores = context.offload.state_stores(plans)
        before: defaultdict[str, list[OptimizerShard]] = defaultdict(list)
        for shard in self._optimizer.shards:
            before[shard.unit.name].append(shard)
        # From here on only `before` and the list of units refer to the old tensors.
        self._optimizer.rebind(())
        runtime.reducer.connect([], None)
        scheduler = runtime.unshard_scheduler
        blocks = {block.module: block for block in scheduler.blocks} if scheduler else {}
        for block in blocks.values():
            block.units.clear()
        shards: list[OptimizerShard] = []
        for number, (plan, store) in enumerate(zip(plans, stores, strict=True)):
            unit = make_unit(plan, context, buffers, reduction, store)
            added = optimizer_shards([unit])
            self._read_unit(unit, added)
            if plan.module is not None and isinstance(unit.weights, ShardedWeights):
                blocks[plan.module].units.append(unit.weights)
            runtime.units[number] = unit
            shards += added
            for shard in before.pop(unit.name, ()):
                self._optimizer.torch_optimizer.state.pop(shard.weight, None)
        grads = [(unit.grads, len(unit.params)) for unit in runtime.units if unit.grads is not None]
        runtime.reducer.connect(grads, buffers)
        if scheduler is not None:
            scheduler.reconnect(make_weight_gather(config, context))
        runtime.grad_reduction = reduction
        runtime.offload.close()
        runtime.offload = context.offload
        self._bind_optimizer(shards)
        held = [part for part in buffer_ranges(self._model) if self._has(part.shapes)]
        read_ranges(held, self._source, self._held)
        load_residuals(runtime, self._optimizer, self._tensors, self._source)

    def _read_unit(self, unit: Unit, shards: Sequence[OptimizerShard]) -> None:
        tensors: dict[str, LogicalTensor] = {}
        for spec in unit.layout.params:
            tensors |= self._tensors_of[spec.name]
        parts = [weights_range(unit)]
        for shard in shards:
            parts += make_optimizer_state(self._optimizer, shard, tensors, self._source)
        read_ranges([part for part in parts if part.ranges], self._source, self._held)
        self._source.drop(tensors)

    def _bind_optimizer(self, shards: Sequence[OptimizerShard]) -> None:
        optimizer, runtime = self._optimizer, self._runtime
        optimizer.rebind(shards)
        if isinstance(optimizer.torch_optimizer, NeedsWholeParams):
            optimizer.torch_optimizer.bind_whole_params(
                ShardedWholeParamOps(
                    runtime.units, shards, runtime.collectives, self._context.device
                )
            )
        if isinstance(runtime.grad_reduction, OneBitAdamReduction):
            runtime.grad_reduction.track_optimizer(optimizer)

    def _has(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return all(name in self._tensors for name in shapes)


def _plan_again(unit: Unit, context: BuildContext) -> UnitPlan:
    """The same parameters at the same offsets."""
    layout = unit.layout.for_world_size(context.collectives.world_size)
    return UnitPlan(layout, unit.params, unit.main_weights is not None, unit.module)


def _unsaved_buffers(model: nn.Module) -> list[torch.Tensor]:
    """The buffers that no state contains, in the order in which an engine is built."""
    return [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    ]
