"""From a source into an engine; foreign names -> ours.

Brings the ranges that a rank needs from a state source into its tensors.

A weights file's names as those that the model's state has.

Such a file may call a tied parameter by any of its names, or hold it under several, and keeps
buffers among weights. In the state a parameter goes by its first name, and buffers are apart.
"""

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
    """Renames what the model knows under another name; what it does not know stays as it is.

    Buffers that the model does not keep in its state dict are left out.
    """
    first = {id(param): name for name, param in model.named_parameters()}
    names: dict[str, str | None] = {
        f"weights/{name}": f"weights/{first[id(param)]}"
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    kept = {name for name, _ in persistent_buffers(model)}
    for name, _ in model.named_buffers():
        names[f"weights/{name}"] = f"buffers/{name}" if name in kept else None
    source.rename(names)


log = logging.getLogger("rayzero.engine")


@dataclass(frozen=True)
class LoadOptions:
    """How much of a state is taken over.

    Attributes:
        strict: every weight of the model must be in the state, and every one of the state in the
            model; else those in both are taken.
        optimizer: the optimizer's state and options. Without, they stay as they are.
        scheduler: the schedule's place.
        progress: step, sample cursor, random states.
        options: the optimizer's options, such as its learning rate, also where no schedule sets
            them; they are this run's config's otherwise.
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
    choice: LoadOptions = LOAD_ALL,
) -> None:
    """Fills this rank's weights, buffers and optimizer state. No collectives.

    A buffer that the source does not have keeps its value, as do frozen parameters that were left
    out on purpose; an optimizer begins anew when the source has weights only.

    Raises:
        CheckpointMismatchError: the source is of another model.
        MissingRangesError: the source is incomplete.
        DataError: the source is damaged.
    """
    if isinstance(source, TensorSource):  # another system's file
        rename_to_model(source, model)
    held = {name: one for table in source.block_indexes for name, one in table.tensors.items()}
    wanted = _model_tensors(model, runtime)
    absent = _find_absent(model, wanted, held, source, choice)
    check_state_fits_model(
        {name: one for name, one in wanted.items() if name not in absent},
        {
            name: one
            for name, one in held.items()
            if name.startswith(("weights/", "buffers/")) and (choice.strict or name in wanted)
        },
    )
    if choice.optimizer:
        optimizer.reset_state()
    parts = [
        _drop_ranges(part, absent)
        for part in held_ranges(model, runtime, optimizer)
        if choice.optimizer or not part.is_optimizer_state
    ]
    for run in optimizer.shards if choice.optimizer else ():
        parts += _make_optimizer_state(optimizer, run, held)
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
    choice: LoadOptions,
) -> set[str]:
    """What the model has, the source has not, and may do without."""
    frozen = set[str]()
    if source.metadata(0).get("frozen") is False:
        names = model.named_parameters(remove_duplicate=False)
        frozen = {f"weights/{name}" for name, param in names if not param.requires_grad}
    absent = {
        name
        for name in wanted
        if name not in held and (not choice.strict or name.startswith("buffers/") or name in frozen)
    }
    if absent:
        log.warning(
            "%d tensors of the model are not in the state that is loaded, and stay", len(absent)
        )
    return absent


def _drop_ranges(part: StateRange, absent: set[str]) -> StateRange:
    return replace(part, ranges=tuple(one for one in part.ranges if one.name not in absent))


def _model_tensors(model: nn.Module, runtime: ZeroRuntime) -> dict[str, LogicalTensor]:
    """Every weight and buffer of the whole model, whichever rank holds it."""
    found = {}
    for unit in runtime.units:
        memory = unit.weights.persistent_tensor if unit.main_weights is None else unit.main_weights
        for spec in unit.layout.params:
            found[f"weights/{spec.name}"] = LogicalTensor(dtype_name(memory.dtype), spec.shape)
    for name, param in model.named_parameters():
        full = f"weights/{name}"
        found.setdefault(full, LogicalTensor(dtype_name(param.dtype), tuple(param.shape)))
    for name, buffer in persistent_buffers(model):
        found[f"buffers/{name}"] = LogicalTensor(dtype_name(buffer.dtype), tuple(buffer.shape))
    return found


def _make_optimizer_state(
    optimizer: ShardedOptimizer, run: OptimizerShard, held: Mapping[str, LogicalTensor]
) -> list[StateRange]:
    """Makes the state tensors that the source has for a run's group; a run may be all padding."""
    names = {spec.name for spec in run.unit.layout.params if spec.group == run.group}
    keys = {
        prefix.removeprefix("optimizer."): one.dtype
        for full, one in held.items()
        for prefix, _, name in [full.partition("/")]
        if prefix.startswith("optimizer.") and name in names
    }
    made = []
    for key, dtype in sorted(keys.items()):
        floats = DTYPE_BY_NAME[dtype].is_floating_point
        kind = run.weight.dtype if floats else DTYPE_BY_NAME[dtype]
        value = run.unit.state_store.zeros(run.weight.numel(), kind)
        optimizer.torch_optimizer.state[run.weight][key] = value
        made.append(optimizer_range(run, key, value))
    return made


def _execute_copies(
    copies: Sequence[RangeCopy], of: Mapping[TensorRange, StateRange], source: StateSource
) -> None:
    """Reads each copy's bytes, in the order in which they lie."""
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
    """Straight into the target where it is host memory of that dtype, through a copy elsewhere."""
    direct = target.dtype is dtype and target.device.type == "cpu"
    landing = target if direct else torch.empty(target.numel(), dtype=dtype)
    source.read(block, at, landing.view(torch.uint8).numpy().data)
    if not direct:
        target.copy_(landing)
