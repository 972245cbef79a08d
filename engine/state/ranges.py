"""Ranges of the training state that one rank holds: views of its tensors, and names.

Names: `weights/<parameter>` (main weights; model weights of frozen parameters),
`optimizer.<key>/<parameter>`, `buffers/<name>`; `error_feedback` has those of residuals. All are
logical tensors, the same at every stage and world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from rayzero.engine.errors import EngineError
from rayzero.engine.layout.flat_layout import UnitLayout
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, TensorRange
from rayzero.engine.optim.sharded_optimizer import OptimizerShard, ShardedOptimizer
from rayzero.engine.precision.dtypes import dtype_name
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.unit import Unit

ALIGN_BYTES = 128  # of a part in a block, for copies and for views of any dtype


@dataclass(frozen=True)
class StateRange:
    """A contiguous range of one tensor.

    Attributes:
        memory: flat view of the engine's memory.
        ranges: the ranges of logical tensors in it; offsets count its elements.
        shapes: the full shape of each logical tensor in it.
        constant: whether training never changes it.
    """

    memory: Tensor
    ranges: tuple[TensorRange, ...]
    shapes: dict[str, tuple[int, ...]]
    constant: bool = False

    @property
    def is_optimizer_state(self) -> bool:
        return any(one.name.startswith("optimizer.") for one in self.ranges)


def owned_ranges(
    model: nn.Module, runtime: ZeroRuntime, optimizer: ShardedOptimizer
) -> list[StateRange]:
    """This rank's share of the state; over all ranks every element occurs exactly once.

    Includes optimizer state once it exists: torch creates it at the first update.
    """
    rank, world_size = runtime.collectives.rank, runtime.collectives.world_size
    parts = _frozen_ranges(model, runtime, rank, world_size)
    for unit in runtime.units:
        parts += _weight_ranges(unit, unit.shard)
    for shard in optimizer.shards:
        within = _intersect(shard.layout_range, shard.unit.shard)
        parts += [
            range_of_unit(shard.unit.layout, f"optimizer.{key}", value, shard.layout_range, within)
            for key, value in elementwise_state(optimizer, shard).items()
        ]
    if rank == 0:
        parts += [
            whole_tensor_range(f"buffers/{name}", one) for name, one in persistent_buffers(model)
        ]
    return [part for part in parts if part.ranges]


def held_ranges(
    model: nn.Module, runtime: ZeroRuntime, optimizer: ShardedOptimizer
) -> list[StateRange]:
    """All of the state that this rank holds, including what other ranks hold as well."""
    parts = _frozen_ranges(model, runtime, 0, 1)
    for unit in runtime.units:
        parts += _weight_ranges(unit, unit.owned)
    for shard in optimizer.shards:
        parts += [
            range_of_unit(
                shard.unit.layout, f"optimizer.{key}", value, shard.layout_range, shard.layout_range
            )
            for key, value in elementwise_state(optimizer, shard).items()
        ]
    parts += [whole_tensor_range(f"buffers/{name}", one) for name, one in persistent_buffers(model)]
    return [part for part in parts if part.ranges]


def optimizer_range(shard: OptimizerShard, key: str, value: Tensor) -> StateRange:
    """One tensor of a shard's optimizer state."""
    return range_of_unit(
        shard.unit.layout, f"optimizer.{key}", value, shard.layout_range, shard.layout_range
    )


def elementwise_state(optimizer: ShardedOptimizer, shard: OptimizerShard) -> dict[str, Tensor]:
    """A shard's optimizer state with one element for each weight.

    Raises:
        EngineError: the optimizer keeps a tensor of another shape.
    """
    state = {}
    for key, value in optimizer.torch_optimizer.state.get(shard.weight, {}).items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if value.shape != shard.weight.shape:
            raise EngineError(
                f"{type(optimizer.torch_optimizer).__name__} keeps {key!r} of shape "
                f"{tuple(value.shape)} for {shard.weight.numel()} weights",
                allowed="state with one element for each weight, and scalars",
                fix="initialize(optimizer=...)",
            )
        state[key] = value
    return state


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers in the model's state dict, each once."""
    kept = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


def pack_block(parts: Sequence[StateRange]) -> tuple[BlockIndex, list[int]]:
    """Index of a block that holds these ranges in sequence, constant ones first; their offsets."""
    order = sorted(range(len(parts)), key=lambda index: not parts[index].constant)
    offsets, ranges = [0] * len(parts), []
    tensors: dict[str, LogicalTensor] = {}
    at = constant_bytes = 0
    for index in order:
        part = parts[index]
        dtype, size = dtype_name(part.memory.dtype), part.memory.element_size()
        offsets[index] = at
        for one in part.ranges:
            ranges.append(TensorRange(one.name, one.start, one.stop, at + one.offset * size))
            tensors[one.name] = LogicalTensor(dtype, part.shapes[one.name])
        at += -(-part.memory.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        if part.constant:
            constant_bytes = at
    return BlockIndex(tensors, tuple(ranges), at, constant_bytes), offsets


def _weight_ranges(unit: Unit, within: slice) -> list[StateRange]:
    """A unit's main weights, or the model weights if it is frozen."""
    if unit.main_weights is not None:
        return [range_of_unit(unit.layout, "weights", unit.main_weights, unit.owned, within)]
    shard = unit.weights.owned_range(unit.shard)
    return [range_of_unit(unit.layout, "weights", shard, unit.shard, unit.shard, constant=True)]


def _frozen_ranges(
    model: nn.Module, runtime: ZeroRuntime, rank: int, world_size: int
) -> list[StateRange]:
    """Frozen parameters outside of units: each rank saves an equal part of each."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in runtime.ungrouped_params}
    parts = []
    for name, param in model.named_parameters():
        if param.untyped_storage().data_ptr() not in addresses or not param.numel():
            continue
        flat = param.detach().reshape(-1)
        start, stop = (flat.numel() * (rank + step) // world_size for step in (0, 1))
        full = f"weights/{name}"
        ranges = (TensorRange(full, start, stop, 0),) if start < stop else ()
        parts.append(
            StateRange(flat[start:stop], ranges, {full: tuple(param.shape)}, constant=True)
        )
    return parts


def whole_tensor_range(name: str, tensor: Tensor) -> StateRange:
    """A whole tensor as a range."""
    flat = tensor.detach().reshape(-1)
    ranges = (TensorRange(name, 0, flat.numel(), 0),) if flat.numel() else ()
    return StateRange(flat, ranges, {name: tuple(tensor.shape)})


def range_of_unit(
    layout: UnitLayout,
    kind: str,
    memory: Tensor,
    memory_range: slice,
    within: slice,
    *,
    constant: bool = False,
) -> StateRange:
    """The part of `memory`, which is `memory_range` of the unit's flat layout, inside `within`."""
    if within.start >= within.stop:
        return StateRange(memory[:0], (), {})
    view = memory[within.start - memory_range.start : within.stop - memory_range.start]
    ranges, shapes = [], {}
    for part in layout.overlaps(within):
        spec = layout.params[part.index]
        name = f"{kind}/{spec.name}"
        ranges.append(TensorRange(name, part.start, part.stop, part.memory.start))
        shapes[name] = spec.shape
    return StateRange(view, tuple(ranges), shapes, constant)


def _intersect(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))
