"""Loads the ranges that a rank needs from a state source into its tensors."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.checkpoint.errors import CheckpointMismatchError, check_state_fits_model
from rayzero.engine.checkpoint.imports.tensors import TensorSource
from rayzero.engine.layout.packed import is_wrapper
from rayzero.engine.layout.state_index import LogicalTensor, StateSource
from rayzero.engine.optim.sharded_optimizer import OptimizerShard, ShardedOptimizer, reset_state
from rayzero.engine.optim.whole_params import NeedsWholeParams, WholeParamOps
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME, dtype_name
from rayzero.engine.state.error_feedback import load_residuals
from rayzero.engine.state.metadata import KERNEL_OPTIONS
from rayzero.engine.state.ranges import (
    StateRange,
    optimizer_range,
    persistent_buffers,
    read_ranges,
    state_ranges,
)
from rayzero.engine.zero.runtime import ZeroRuntime

log = logging.getLogger("rayzero.engine")

_PROBE_SHAPE = (2, 2)  # of the weight in `_kept_keys`: some optimizers need a matrix


def rename_to_model(source: TensorSource, model: nn.Module) -> None:
    """Renames the tensors of a weights file to the names of the model's state.

    The file may have a tied parameter under any of its names, or several, and does not tell buffers
    from weights. In the state a parameter has its first name, and buffers have their own kind.
    Unknown names are left unchanged; buffers that are not in the model's state dict are dropped.
    """
    first = {id(param): name for name, param in model.named_parameters()}
    names: dict[str, str | None] = {
        f"weights/{name}": f"weights/{first[id(param)]}"
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    persistent = {name for name, _ in persistent_buffers(model)}
    for name, _ in model.named_buffers():
        names[f"weights/{name}"] = f"buffers/{name}" if name in persistent else None
    source.rename(names)


@dataclass(frozen=True)
class LoadOptions:
    """Parts of a state to load.

    Attributes:
        strict: require that state and model have the same weights; otherwise load those in both.
        optimizer: load the optimizer's state; otherwise it is left unchanged.
        scheduler: load the scheduler's state.
        progress: load step, sample cursor and random-number generators.
        optimizer_options: load the optimizer's options, such as lr, even without a scheduler;
            otherwise this run's config sets them.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    progress: bool = True
    optimizer_options: bool = False


LOAD_ALL = LoadOptions()


@torch.no_grad()
def load_tensors(
    model: nn.Module,
    runtime: ZeroRuntime,
    optimizer: ShardedOptimizer,
    source: StateSource,
    options: LoadOptions = LOAD_ALL,
) -> bool:
    """Loads this rank's weights, buffers and optimizer state; returns whether optimizer state was
    loaded. Not collective.

    Buffers that the source lacks keep their values, and so do frozen parameters if the source was
    saved without them. The optimizer starts from its initial state if the source has only weights.
    The optimizer state of a weight that was frozen in the source is zero, at its group's step.

    Raises:
        CheckpointMismatchError: the source is of another model or optimizer.
        MissingRangesError: the source is incomplete.
        DataError: the source is damaged.
    """
    if isinstance(source, TensorSource):  # another system's file
        rename_to_model(source, model)
    held = {
        name: tensor for index in source.block_indexes for name, tensor in index.tensors.items()
    }
    wanted = _model_tensors(model, runtime)
    absent = _find_absent(model, runtime, wanted, held, source, options)
    model_kinds = ("weights/", "buffers/")
    check_state_fits_model(
        {name: tensor for name, tensor in wanted.items() if name not in absent},
        {
            name: tensor
            for name, tensor in held.items()
            if name.startswith(model_kinds) and (options.strict or name in wanted)
        },
    )
    if options.optimizer:
        if difference := find_other_state(optimizer, source):
            options = replace(options, optimizer=False)
            if runtime.collectives.rank == 0:
                text = "%s: it is not loaded, and the optimizer starts from its initial state"
                log.warning(text, difference)
        reset_state(optimizer.torch_optimizer)
    parts = [
        replace(part, ranges=tuple(held for held in part.ranges if held.name not in absent))
        for part in state_ranges(model, runtime, optimizer, owned=False)
        if options.optimizer or not part.is_optimizer_state
    ]
    thawed = _newly_trained(optimizer, source) if options.optimizer else set()
    for shard in optimizer.shards if options.optimizer else ():
        parts += make_optimizer_state(optimizer, shard, held, source, thawed)
    read_ranges(parts, source)
    load_residuals(runtime, optimizer, held, source)
    return options.optimizer


def _find_absent(
    model: nn.Module,
    runtime: ZeroRuntime,
    wanted: Mapping[str, LogicalTensor],
    held: Mapping[str, LogicalTensor],
    source: StateSource,
    options: LoadOptions,
) -> set[str]:
    """Returns the tensors of the model that the source lacks and that need not be loaded."""
    frozen = set[str]()
    if source.metadata(0).get("frozen") is False:
        names = model.named_parameters(remove_duplicate=False)
        frozen = {f"weights/{name}" for name, param in names if not param.requires_grad}
        frozen |= {f"weights/{name}" for name in runtime.ungrouped_params}
    absent = {
        name
        for name in wanted
        if name not in held
        and (not options.strict or name.startswith("buffers/") or name in frozen)
    }
    if absent:
        log.warning(
            "%d tensors of the model are not in the loaded state and keep their values", len(absent)
        )
    return absent


def _model_tensors(model: nn.Module, runtime: ZeroRuntime) -> dict[str, LogicalTensor]:
    """Returns every weight and buffer of the model, whichever rank holds it, except for frozen
    parameters that the model got after `initialize`. Those are in no state, and keep the values
    that the script set."""
    tensors = {
        f"weights/{name}": _logical(param.dtype, param.shape)
        for name, param in model.named_parameters()
        if param.requires_grad and not is_wrapper(param)
    }
    for name, value in runtime.ungrouped_params.items():
        tensors[f"weights/{name}"] = _logical(value.dtype, value.shape)
    for unit in runtime.units:
        memory = unit.weights.persistent_tensor if unit.main_weights is None else unit.main_weights
        for spec in unit.layout.params:
            tensors[f"weights/{spec.name}"] = _logical(memory.dtype, spec.shape)
    for name, buffer in persistent_buffers(model):
        tensors[f"buffers/{name}"] = _logical(buffer.dtype, buffer.shape)
    return tensors


def _logical(dtype: torch.dtype, shape: Sequence[int]) -> LogicalTensor:
    return LogicalTensor(dtype_name(dtype), tuple(shape))


def _newly_trained(optimizer: ShardedOptimizer, source: StateSource) -> set[str]:
    """Returns the parameters that this optimizer updates and the saved one did not; none if the
    source does not list the parameters that were updated."""
    groups = source.metadata(0).get("groups") or ()
    listed = {name for group in groups for name in group.get("params", ())}
    names = _trained_names(optimizer.shards) - listed if listed else set[str]()
    if names:
        log.warning(
            "%d weights, such as %s, were not trained in the loaded state: their optimizer state "
            "starts at zero, and at step 0 only if they are in a parameter group of their own",
            len(names),
            min(names),
        )
    return names


def _trained_names(shards: Sequence[OptimizerShard]) -> set[str]:
    return {
        spec.name
        for shard in shards
        for spec in shard.unit.layout.params
        if spec.group == shard.group
    }


def make_optimizer_state(
    optimizer: ShardedOptimizer,
    shard: OptimizerShard,
    held: Mapping[str, LogicalTensor],
    source: StateSource,
    thawed: Container[str] = (),
) -> list[StateRange]:
    """Creates the optimizer state tensors of a shard, and returns the ranges that must be read.

    The state has the keys that the source has for the parameters of the shard's group, not only for
    those of the shard, which may consist of padding, or of parameters that were frozen (`thawed`).
    """
    names = _trained_names([shard])
    if all(name in thawed for name in names):
        same_group = [other for other in optimizer.shards if other.group == shard.group]
        names = _trained_names(same_group)
    keys: dict[str, torch.dtype] = {}
    for full_name, tensor in held.items():
        kind, _, name = full_name.partition("/")
        if kind.startswith("optimizer.") and name in names:
            keys[kind.removeprefix("optimizer.")] = DTYPE_BY_NAME[tensor.dtype]
    ranges = []
    for key, saved_dtype in sorted(keys.items()):
        dtype = optimizer.state_dtype(shard) if saved_dtype.is_floating_point else saved_dtype
        wanted = optimizer_range(shard, key, shard.weight.detach()).ranges
        value = source.take(wanted, shard.weight, dtype)
        if value is None:
            value = shard.unit.state_store.zeros(shard.weight.numel(), dtype)
            read = optimizer_range(shard, key, value)
            saved = tuple(part for part in read.ranges if part.name.partition("/")[2] not in thawed)
            ranges.append(replace(read, ranges=saved))
        optimizer.torch_optimizer.state[shard.weight][key] = value
    return ranges


def find_other_state(optimizer: ShardedOptimizer, source: StateSource) -> str:
    """Describes why the saved optimizer state cannot be loaded, because it is of another optimizer;
    empty if it can. The same on every rank. Raises CheckpointMismatchError if it cannot, unless the
    config allows to leave it out (`other_optimizer_state`)."""
    groups = optimizer.torch_optimizer.param_groups
    saved = _saved_keys(source)
    if not saved or not groups or _has_same_options(groups, source.metadata(0).get("groups")):
        return ""
    kept = _kept_keys(optimizer.torch_optimizer)
    if kept is None or kept == saved:
        return ""
    name = type(optimizer.torch_optimizer).__name__
    saved_list, kept_list = (", ".join(sorted(keys)) for keys in (saved, kept))
    seen = (
        f"the saved optimizer state has {saved_list} for each weight, and {name} keeps "
        f"{kept_list or 'none'}"
    )
    if optimizer.resets_other_state:
        return seen
    raise CheckpointMismatchError(
        seen,
        allowed="the optimizer that the state was saved with, or another one with the same state",
        fix='optimizer in the engine config; to leave the saved state out: "rayzero": '
        '{"other_optimizer_state": "reset"}, or load_checkpoint(load_optimizer_states=False)',
    )


def _saved_keys(source: StateSource) -> set[str]:
    names = (name for index in source.block_indexes for name in index.tensors)
    kinds = {name.partition("/")[0] for name in names}
    return {kind.removeprefix("optimizer.") for kind in kinds if kind.startswith("optimizer.")}


def _has_same_options(groups: Iterable[Mapping[str, Any]], saved: Any) -> bool:
    """Returns whether each group has a saved group with the same options switched on. The optimizer
    then keeps the same state, of which some parts may only appear during training."""
    documents = [dict(group.get("options", {})) for group in saved or ()]
    return all(_switches(group) in map(_switches, documents) for group in groups)


def _switches(options: Mapping[str, Any]) -> dict[str, bool]:
    """Returns which options are on. Numbers count, too: without momentum, for example, there is no
    momentum buffer."""
    left_out = {*KERNEL_OPTIONS, "params", "lr", "initial_lr", "weight_decay"}
    return {
        key: bool(value)
        for key, value in options.items()
        if key not in left_out and isinstance(value, bool | int | float | list | tuple)
    }


def _kept_keys(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """Returns the keys of the state tensors that the optimizer keeps for each weight: those that a
    copy of it creates in a step on one small weight for each group. None if that step fails."""
    weights = [nn.Parameter(torch.ones(_PROBE_SHAPE)) for _ in optimizer.param_groups]
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a scheduler's wrapper, bound to the original
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    copy.__dict__.update({name: OrderedDict() for name in hooks})
    copy.state = defaultdict(dict)
    kernels = {key: False if key in ("foreach", "capturable") else None for key in KERNEL_OPTIONS}
    kernels["differentiable"] = False
    copy.param_groups = [
        {**group, **{key: kernels[key] for key in kernels if key in group}, "params": [weight]}
        for group, weight in zip(optimizer.param_groups, weights, strict=True)
    ]
    for weight in weights:
        weight.grad = torch.ones(_PROBE_SHAPE)
    try:
        if isinstance(copy, NeedsWholeParams):
            copy.bind_whole_params(WholeParamOps.of_optimizer(copy))
        type(optimizer).step(copy)
    except Exception:  # noqa: BLE001  # an optimizer of the user's own, with needs of its own
        return None
    return {
        key
        for weight in weights
        for key, value in copy.state[weight].items()
        if isinstance(value, Tensor) and value.shape == weight.shape
    }
