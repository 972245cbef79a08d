"""Bytes that a rank holds between two steps: builds its engine on the meta device and counts them.

The engine has the parts of a running engine and is counted by the same code (`engine.accounting`);
only values and other ranks are missing. The tests compare the bytes of each class with those of
real engines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.accounting import bytes_by_class
from rayzero.engine.builder import make_build_context, make_sharded_optimizer
from rayzero.engine.comm.backend import Backend, Work
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.config import EngineConfig, OptimizerConfig
from rayzero.engine.data.batch_sizes import resolve_batch_sizes
from rayzero.engine.offload.transfer import MemoryKind
from rayzero.engine.optim.build import optimizer_factory, regroup_for_optimizer
from rayzero.engine.optim.param_groups import ParamGroups, find_param_groups, freeze_all_params
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.planning.activations import MicroStepTrace
from rayzero.engine.runtime_builder import NUM_GRAD_BUFFERS, make_runtime
from rayzero.engine.zero.parameters import set_param_data
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.unit import Unit

_STEPS = 3  # buffers are allocated in the first two


class AbsentRanks(Backend):
    """A rank of a group whose other ranks do not exist: collectives complete, and move nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def _complete(self, *args: Any, **kwargs: Any) -> Work:
        return Work()

    all_reduce = reduce_scatter = all_gather = all_gather_in_group = _complete
    all_to_all = all_to_all_v = gather = broadcast = _complete


def persistent_bytes(
    model: nn.Module, config: EngineConfig, world_size: int, trace: MicroStepTrace | None = None
) -> dict[str, int]:
    """Returns the bytes by class, as `bytes_by_class` names them, of the rank that holds most.
    `model` is on the meta device, and is not changed. Raises ConfigError if the config does not fit
    the model or the world.

    The device is assumed to have memory of its own. Two classes do not persist. `unit_grads` are
    the gradients that are held until the last gradient of their unit has arrived: the bytes that
    they add to the peak of `trace`, or without a trace those of the largest unit. `grad_copies`
    (`host_grad_copies`) are the gradients in the dtype of the main weights during an update.
    """
    trains = any(param.requires_grad for param in model.parameters())
    given = find_param_groups(model, None, None) if trains else freeze_all_params(model)
    groups = regroup_for_optimizer(config.optimizer, model, given)
    # A parameter group is contiguous in a unit. If one group has more state than another, the first
    # or the last rank holds most.
    ranks = {0, world_size - 1} if len(groups.options) > 1 else {0}
    names = {param: name for name, param in model.named_parameters()}
    values = [(param, param.detach()) for param in model.parameters()]
    try:
        with torch.device("meta"):
            counts = [
                _count_rank(model, groups, config, world_size, rank, _held_grads(trace, names))
                for rank in sorted(ranks)
            ]
        return max(counts, key=Counter.total)
    finally:
        for param, value in values:
            set_param_data(param, value)


def _held_grads(
    trace: MicroStepTrace | None, names: dict[nn.Parameter, str]
) -> Callable[[list[Unit]], int]:
    """Returns a function that counts the bytes of units' gradients that backward holds."""

    def count(units: list[Unit]) -> int:
        trained = [unit for unit in units if unit.grads]
        grads = [{names[param]: param.nbytes for param in unit.params} for unit in trained]
        if trace is None:
            return max((sum(unit.values()) for unit in grads), default=0)
        return trace.held_grad_bytes(grads)

    return count


def _count_rank(
    model: nn.Module,
    groups: ParamGroups,
    config: EngineConfig,
    world_size: int,
    rank: int,
    held_grads: Callable[[list[Unit]], int],
) -> Counter[str]:
    collectives = Collectives(AbsentRanks(rank, world_size), torch.device("meta"))
    context = make_build_context(config, model, collectives, restoring=True, elastic=False)
    runtime = make_runtime(model, groups, context, 1.0)
    try:
        optimizer = _make_optimizer(runtime, groups, config)
        micro_steps = resolve_batch_sizes(config, world_size).micro_steps
        for _ in range(_STEPS):
            copies = _take_step(runtime, optimizer, min(micro_steps, NUM_GRAD_BUFFERS))
        copies["unit_grads"] = held_grads(runtime.units)
        return Counter(bytes_by_class(runtime, optimizer)) + copies
    finally:
        runtime.close()


def _take_step(runtime: ZeroRuntime, optimizer: ShardedOptimizer, micro_steps: int) -> Counter[str]:
    """Allocates what a step allocates, in the same order, without forward, backward and vote.

    Returns the bytes of gradients that are copied into the dtype of the main weights.
    """
    scheduler = runtime.unshard_scheduler
    for micro_step in range(micro_steps):
        scheduler.root_pre_forward()
        for block in scheduler.blocks[::-1]:
            scheduler.pre_forward(block)
            scheduler.post_forward(block)
        with runtime.backward_pass(first=micro_step == 0, last=micro_step == micro_steps - 1):
            pass  # no gradient arrives: all are zeros
    runtime.reducer.wait()
    for unit in runtime.units:  # as the vote does, which waits for copies to host memory
        unit.shard_grads()
    copies = Counter[str]()
    for shards in optimizer.chunks():
        copied = 0
        for shard in shards:
            dtype = optimizer.state_dtype(shard)
            copies_needed = sum(tensor.dtype is not dtype for tensor in (shard.grad, shard.weight))
            copied += copies_needed * shard.weight.numel() * dtype.itemsize
        if copied:
            kind = shards[0].unit.state_store.memory_kind
            name = "grad_copies" if kind is MemoryKind.DEVICE else "host_grad_copies"
            copies[name] = max(copies[name], copied)
    runtime.sync_model_weights()
    return copies


def _make_optimizer(
    runtime: ZeroRuntime, groups: ParamGroups, config: EngineConfig
) -> ShardedOptimizer:
    """Returns the rank's optimizer with the state that a step creates."""
    if config.optimizer is None:  # the script makes the optimizer: its state is not known
        return make_sharded_optimizer(runtime, groups, None, config)
    with torch.device("cpu"):
        trial, states = _step_small_params(config.optimizer, groups)
    optimizer = make_sharded_optimizer(runtime, groups, trial, config)
    for shard in optimizer.shards:
        state = optimizer.torch_optimizer.state[shard.weight]
        for key, value in states[shard.group].items():
            if isinstance(value, Tensor) and value.ndim:
                dtype = optimizer.state_dtype(shard) if value.is_floating_point() else value.dtype
                state[key] = shard.unit.state_store.zeros(shard.weight.numel(), dtype)
            else:
                state[key] = math.inf  # a step count beyond every warm-up
    return optimizer


def _step_small_params(
    config: OptimizerConfig, groups: ParamGroups
) -> tuple[torch.optim.Optimizer, list[dict[str, Any]]]:
    """Returns a new optimizer over small parameters, and the state of each group's parameter after
    a step of another such optimizer."""
    make = optimizer_factory(config)
    params = [nn.Parameter(torch.zeros(8, 8)) for _ in groups.options]
    options = [
        {**option, "params": [param]} for option, param in zip(groups.options, params, strict=True)
    ]
    new, stepped = make([dict(group) for group in options]), make(options)
    for param in params:
        param.grad = torch.zeros_like(param)
    stepped.step()
    return new, [dict(stepped.state[param]) for param in params]
