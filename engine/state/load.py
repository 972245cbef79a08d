"""Loads the ranges that a rank needs from a state source into its tensors."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rayzero.engine.checkpoint.errors import check_state_fits_model
from rayzero.engine.checkpoint.imports.tensors import TensorSource
from rayzero.engine.layout.reshard import RangeCopy, plan_copies
from rayzero.engine.layout.state_index import LogicalTensor, StateSource, TensorRange
from rayzero.engine.optim.sharded_optimizer import OptimizerShard, ShardedOptimizer
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME, dtype_name
from rayzero.engine.state.error_feedback import load_residuals
from rayzero.engine.state.ranges import StateRange, held_ranges, optimizer_range, persistent_buffers
from rayzero.engine.zero.runtime import ZeroRuntime


def rename_to_model(source: TensorSource, model: nn.Module) -> None:
    """Rename the tensors of a weights file to the names of the model's state.

    Such a file may hold a tied parameter under any or several of its names, and buffers among the
    weights. In the state a parameter has its first name, and buffers have their own kind. Unknown
    names are left unchanged; buffers that are not in the model's state dict are dropped.
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


log = logging.getLogger("rayzero.engine")


@dataclass(frozen=True)
class LoadOptions:
    """Parts of a state to load.

    Attributes:
        strict: the state's weights must be exactly the model's; otherwise load those in both.
        optimizer: load the optimizer's state; otherwise it is left unchanged.
        scheduler: load the scheduler's state.
        progress: load step, sample cursor and random-number generators.
        optimizer_options: load the optimizer's options, such as lr, even without a scheduler;
            otherwise this shard's config sets them.
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
) -> None:
    """Load this rank's weights, buffers and optimizer state. Not collective.

    Buffers that the source lacks keep their values, as do frozen parameters if it was saved without
    them. The optimizer starts from its initial state if the source has weights only.

    Raises:
        CheckpointMismatchError: the source is of another model.
        MissingRangesError: the source is incomplete.
        DataError: the source is damaged.
    """
    if isinstance(source, TensorSource):  # another system's file
        rename_to_model(source, model)
    held = {name: one for table in source.block_indexes for name, one in table.tensors.items()}
    wanted = _model_tensors(model, runtime)
    absent = _find_absent(model, wanted, held, source, options)
    check_state_fits_model(
        {name: one for name, one in wanted.items() if name not in absent},
        {
            name: one
            for name, one in held.items()
            if name.startswith(("weights/", "buffers/")) and (options.strict or name in wanted)
        },
    )
    if options.optimizer:
        optimizer.reset_state()
    parts = [
        _drop_ranges(part, absent)
        for part in held_ranges(model, runtime, optimizer)
        if options.optimizer or not part.is_optimizer_state
    ]
    for shard in optimizer.shards if options.optimizer else ():
        parts += _make_optimizer_state(optimizer, shard, held)
    _read_ranges(parts, source)
    load_residuals(runtime, held, source.metadata(0), lambda parts: _read_ranges(parts, source))


def _read_ranges(parts: Sequence[StateRange], source: StateSource) -> None:
    of = {one: part for part in parts for one in part.ranges}
    copies = plan_copies(of, [table.ranges for table in source.block_indexes])
    _execute_copies(copies, of, source)


def _find_absent(
    model: nn.Module,
    wanted: Mapping[str, LogicalTensor],
    held: Mapping[str, LogicalTensor],
    source: StateSource,
    options: LoadOptions,
) -> set[str]:
    """Tensors of the model that the source lacks and that need not be loaded."""
    frozen = set[str]()
    if source.metadata(0).get("frozen") is False:
        names = model.named_parameters(remove_duplicate=False)
        frozen = {f"weights/{name}" for name, param in names if not param.requires_grad}
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


def _drop_ranges(part: StateRange, absent: set[str]) -> StateRange:
    return replace(part, ranges=tuple(one for one in part.ranges if one.name not in absent))


def _model_tensors(model: nn.Module, runtime: ZeroRuntime) -> dict[str, LogicalTensor]:
    """Every weight and buffer of the model, on whichever rank."""
    tensors = {}
    for unit in runtime.units:
        memory = unit.weights.persistent_tensor if unit.main_weights is None else unit.main_weights
        for spec in unit.layout.params:
            tensors[f"weights/{spec.name}"] = LogicalTensor(dtype_name(memory.dtype), spec.shape)
    for name, param in model.named_parameters():
        full = f"weights/{name}"
        tensors.setdefault(full, LogicalTensor(dtype_name(param.dtype), tuple(param.shape)))
    for name, buffer in persistent_buffers(model):
        tensors[f"buffers/{name}"] = LogicalTensor(dtype_name(buffer.dtype), tuple(buffer.shape))
    return tensors


def _make_optimizer_state(
    optimizer: ShardedOptimizer, shard: OptimizerShard, held: Mapping[str, LogicalTensor]
) -> list[StateRange]:
    """Create the state tensors that the source has for a shard's group.

    By group, not by parameter: a shard may consist of padding only.
    """
    names = {spec.name for spec in shard.unit.layout.params if spec.group == shard.group}
    keys = {
        prefix.removeprefix("optimizer."): one.dtype
        for full, one in held.items()
        for prefix, _, name in [full.partition("/")]
        if prefix.startswith("optimizer.") and name in names
    }
    made = []
    for key, dtype in sorted(keys.items()):
        floats = DTYPE_BY_NAME[dtype].is_floating_point
        kind = shard.weight.dtype if floats else DTYPE_BY_NAME[dtype]
        value = shard.unit.state_store.zeros(shard.weight.numel(), kind)
        optimizer.torch_optimizer.state[shard.weight][key] = value
        made.append(optimizer_range(shard, key, value))
    return made


def _execute_copies(
    copies: Sequence[RangeCopy], of: Mapping[TensorRange, StateRange], source: StateSource
) -> None:
    """Read the bytes of each copy, in the order in which they are stored."""
    tables = source.block_indexes
    placed: defaultdict[int, list[tuple[int, RangeCopy]]] = defaultdict(list)
    for copy in copies:
        size = tables[copy.source].tensors[copy.held.name].item_bytes
        at = copy.held.offset + (copy.start - copy.held.start) * size
        placed[copy.source].append((at, copy))
    for block, reads in placed.items():
        for at, copy in sorted(reads, key=lambda read: read[0]):
            first = copy.wanted.offset + copy.start - copy.wanted.start
            target = of[copy.wanted].memory[first : first + copy.numel]
            dtype = DTYPE_BY_NAME[tables[block].tensors[copy.held.name].dtype]
            _read_into(source, block, at, target, dtype)


def _read_into(
    source: StateSource, block: int, at: int, target: Tensor, dtype: torch.dtype
) -> None:
    """Read directly into host memory of the same dtype, otherwise through a temporary copy."""
    direct = target.dtype is dtype and target.device.type == "cpu"
    landing = target if direct else torch.empty(target.numel(), dtype=dtype)
    source.read(block, at, landing.view(torch.uint8).numpy().data)
    if not direct:
        target.copy_(landing)
