"""What one rank holds of the training state: stretches of its tensors, and the names of what is
in them.

Names: `weights/<parameter>` (main weights; model weights of what is frozen),
`optimizer.<key>/<parameter>`, `buffers/<name>`; `residuals` has those of error feedback. All are
logical tensors: the same at every stage and world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rayzero.engine.errors import EngineError
from rayzero.engine.layout.partition import UnitLayout
from rayzero.engine.optim.local import LocalOptimizer, Run
from rayzero.engine.state.table import LogicalTensor, Range, Table
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.unit import Unit

ALIGN_BYTES = 128  # of a part in a block, for copies and for views of any dtype

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that tables give a dtype.

    Raises:
        EngineError: tables cannot hold it.
    """
    if dtype not in _NAMES:
        raise EngineError(
            f"the training state holds a tensor of {dtype}",
            allowed=", ".join(str(one) for one in _NAMES),
        )
    return _NAMES[dtype]


@dataclass(frozen=True)
class Part:
    """A contiguous stretch of one tensor.

    Attributes:
        memory: flat, a view of the engine's own.
        ranges: what of the state lies in it; offsets are counted in its elements.
        shapes: the whole shape of each logical tensor in it.
        constant: whether training never changes it.
    """

    memory: Tensor
    ranges: tuple[Range, ...]
    shapes: dict[str, tuple[int, ...]]
    constant: bool = False

    @property
    def is_optimizer(self) -> bool:
        return any(one.name.startswith("optimizer.") for one in self.ranges)


def own_parts(model: nn.Module, runtime: ZeroRuntime, optimizer: LocalOptimizer) -> list[Part]:
    """This rank's share of the state: over all ranks, every element of it once.

    Optimizer state is in it as far as it exists: torch makes it at the first update.
    """
    rank, world_size = runtime.collectives.rank, runtime.collectives.world_size
    parts = _constants(model, runtime, rank, world_size)
    for unit in runtime.units:
        parts += _weights(unit, unit.shard)
    for run in optimizer.runs:
        within = _overlap(run.extent, run.unit.shard)
        parts += [
            part_of_unit(run.unit.layout, f"optimizer.{key}", value, run.extent, within)
            for key, value in tensor_state(optimizer, run).items()
        ]
    if rank == 0:
        parts += [named_part(f"buffers/{name}", one) for name, one in kept_buffers(model)]
    return [part for part in parts if part.ranges]


def all_parts(model: nn.Module, runtime: ZeroRuntime, optimizer: LocalOptimizer) -> list[Part]:
    """Everything that this rank holds of the state, whoever else holds it too."""
    parts = _constants(model, runtime, 0, 1)
    for unit in runtime.units:
        parts += _weights(unit, unit.owned)
    for run in optimizer.runs:
        parts += [
            part_of_unit(run.unit.layout, f"optimizer.{key}", value, run.extent, run.extent)
            for key, value in tensor_state(optimizer, run).items()
        ]
    parts += [named_part(f"buffers/{name}", one) for name, one in kept_buffers(model)]
    return [part for part in parts if part.ranges]


def optimizer_part(run: Run, key: str, value: Tensor) -> Part:
    """A run's tensor of optimizer state, all of it."""
    return part_of_unit(run.unit.layout, f"optimizer.{key}", value, run.extent, run.extent)


def tensor_state(optimizer: LocalOptimizer, run: Run) -> dict[str, Tensor]:
    """A run's optimizer state that has an element for each of its own.

    Raises:
        EngineError: the optimizer keeps a tensor of another shape.
    """
    found = {}
    for key, value in optimizer.torch.state.get(run.weight, {}).items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if value.shape != run.weight.shape:
            raise EngineError(
                f"{type(optimizer.torch).__name__} keeps {key!r} of shape {tuple(value.shape)} for "
                f"{run.weight.numel()} weights",
                allowed="state with one element for each weight, and single numbers",
                fix="initialize(optimizer=...)",
            )
        found[key] = value
    return found


def kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to the model's state dict, each once."""
    kept = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


def lay_in_block(parts: Sequence[Part]) -> tuple[Table, list[int]]:
    """A table of these parts behind one another, constant ones first; the offset of each."""
    order = sorted(range(len(parts)), key=lambda index: not parts[index].constant)
    offsets, ranges = [0] * len(parts), []
    tensors: dict[str, LogicalTensor] = {}
    at = constant_bytes = 0
    for index in order:
        part = parts[index]
        dtype, size = dtype_name(part.memory.dtype), part.memory.element_size()
        offsets[index] = at
        for one in part.ranges:
            ranges.append(Range(one.name, one.start, one.stop, at + one.offset * size))
            tensors[one.name] = LogicalTensor(dtype, part.shapes[one.name])
        at += -(-part.memory.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        if part.constant:
            constant_bytes = at
    return Table(tensors, tuple(ranges), at, constant_bytes), offsets


def _weights(unit: Unit, within: slice) -> list[Part]:
    """A unit's weights: those that the optimizer updates, or the model's own where none does."""
    if unit.main is not None:
        return [part_of_unit(unit.layout, "weights", unit.main, unit.owned, within)]
    shard = unit.weights.part(unit.shard)
    return [part_of_unit(unit.layout, "weights", shard, unit.shard, unit.shard, constant=True)]


def _constants(model: nn.Module, runtime: ZeroRuntime, rank: int, world_size: int) -> list[Part]:
    """Frozen parameters that are in no unit: each rank answers for an equal stretch of each."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in runtime.loose}
    parts = []
    for name, param in model.named_parameters():
        if param.untyped_storage().data_ptr() not in addresses or not param.numel():
            continue
        flat = param.detach().reshape(-1)
        start, stop = (flat.numel() * (rank + step) // world_size for step in (0, 1))
        full = f"weights/{name}"
        ranges = (Range(full, start, stop, 0),) if start < stop else ()
        parts.append(Part(flat[start:stop], ranges, {full: tuple(param.shape)}, constant=True))
    return parts


def named_part(name: str, tensor: Tensor) -> Part:
    """One whole tensor; empty ones hold nothing."""
    flat = tensor.detach().reshape(-1)
    ranges = (Range(name, 0, flat.numel(), 0),) if flat.numel() else ()
    return Part(flat, ranges, {name: tuple(tensor.shape)})


def part_of_unit(
    layout: UnitLayout,
    kind: str,
    memory: Tensor,
    lies: slice,
    within: slice,
    *,
    constant: bool = False,
) -> Part:
    """The part of `memory`, which lies at `lies` in the unit's flat layout, inside `within`."""
    if within.start >= within.stop:
        return Part(memory[:0], (), {})
    stretch = memory[within.start - lies.start : within.stop - lies.start]
    ranges, shapes = [], {}
    for index, start, stop in layout.overlaps(within):
        spec = layout.params[index]
        name = f"{kind}/{spec.name}"
        at = layout.offsets[index] + start - within.start
        ranges.append(Range(name, start, stop, at))
        shapes[name] = spec.shape
    return Part(stretch, tuple(ranges), shapes, constant)


def _overlap(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))
