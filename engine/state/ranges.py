"""Ranges of the training state that one rank holds: views of its tensors, and their names.

Names: `weights/<parameter>` (main weights; model weights of frozen parameters),
`optimizer.<key>/<parameter>`, `buffers/<name>`; `error_feedback` has the names of residuals. All
name logical tensors, which are the same at every stage and world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rayzero.engine.device import Device, Event, Stream, get_device
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.engine_parts import is_weight
from rayzero.engine.layout.flat_layout import UnitLayout
from rayzero.engine.layout.reshard import HeldRanges
from rayzero.engine.layout.state_index import BlockIndex, LogicalTensor, StateSource, TensorRange
from rayzero.engine.optim.sharded_optimizer import OptimizerShard, ShardedOptimizer
from rayzero.engine.precision.dtypes import DTYPE_BY_NAME, dtype_name
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.unit import Unit

ALIGN_BYTES = 128  # alignment of a range in a block, for copies and for views of any dtype
STAGING_BYTES = 64 * 2**20  # size of each of the two buffers for reads to a device
CAST_BYTES = 16 * 2**20  # size of the buffer for reads into another dtype


@dataclass(frozen=True)
class StateRange:
    """A contiguous range of one tensor.

    Attributes:
        memory: flat view of the engine's memory.
        ranges: the ranges of logical tensors in it; offsets count its elements.
        shapes: the full shape of each logical tensor in `ranges`.
        constant: whether training never changes the memory.
        volatile: whether forward or backward change the memory, not only updates.
    """

    memory: Tensor
    ranges: tuple[TensorRange, ...]
    shapes: dict[str, tuple[int, ...]]
    constant: bool = False
    volatile: bool = False

    @property
    def is_weights(self) -> bool:
        """Whether this is a range of weights, frozen ones included, or of buffers."""
        return self.constant or any(is_weight(held.name) for held in self.ranges)

    @property
    def is_optimizer_state(self) -> bool:
        return any(held.name.startswith("optimizer.") for held in self.ranges)


@dataclass(frozen=True)
class StateBlock:
    """Ranges in sequence in one block of bytes: constant ones first, then the other weights and
    buffers, then the rest. `offsets` are the places of `ranges` in the block, in bytes."""

    index: BlockIndex
    ranges: Sequence[StateRange]
    offsets: Sequence[int]

    def copy_to(self, memory: memoryview) -> None:
        """Copies the ranges to `index.nbytes` bytes."""
        for part, target, _ in self.targets(memory, constants=True):
            target.copy_(part.memory)

    def targets(
        self, memory: memoryview, *, constants: bool
    ) -> Iterator[tuple[StateRange, Tensor, int]]:
        """Yields each range, constant ones only if `constants`, the view of `memory` that is its
        destination, and the offset behind that."""
        for part, offset in zip(self.ranges, self.offsets, strict=True):
            if constants or not part.constant:
                dtype, count = part.memory.dtype, part.memory.numel()
                target = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
                yield part, target, offset + target.nbytes


def state_ranges(
    model: nn.Module, runtime: ZeroRuntime, optimizer: ShardedOptimizer, *, owned: bool
) -> list[StateRange]:
    """Returns the state that this rank holds, or (`owned`) this rank's share. In the shares of all
    ranks together, every element occurs exactly once.

    Includes optimizer state once it exists: torch creates it at the first update.
    """
    collectives = runtime.collectives
    rank, world_size = (collectives.rank, collectives.world_size) if owned else (0, 1)
    parts = _frozen_ranges(runtime, rank, world_size)
    parts += [weights_range(unit, within=unit.shard if owned else None) for unit in runtime.units]
    for shard in optimizer.shards:
        within = shard.unit.shard if owned else None
        for key, value in elementwise_state(optimizer, shard).items():
            parts.append(optimizer_range(shard, key, value, within))
    if rank == 0:
        parts += buffer_ranges(model)
    return [part for part in parts if part.ranges]


def weights_range(unit: Unit, within: slice | None = None) -> StateRange:
    """Returns this rank's main weights of a unit; the model weights if the unit is frozen."""
    if unit.main_weights is not None:
        return range_of_unit(unit.layout, "weights", unit.main_weights, unit.owned, within)
    model_weights = unit.weights.owned_range(unit.shard)
    return range_of_unit(unit.layout, "weights", model_weights, unit.shard, constant=True)


def optimizer_range(
    shard: OptimizerShard, key: str, value: Tensor, within: slice | None = None
) -> StateRange:
    kind = f"optimizer.{key}"
    return range_of_unit(shard.unit.layout, kind, value, shard.layout_range, within)


def read_ranges(
    parts: Sequence[StateRange], source: StateSource, held: HeldRanges | None = None
) -> None:
    """Reads ranges from the blocks that hold them, in the order in which they are stored. `held`
    has the ranges of the source's blocks, if the caller has indexed them already."""
    targets = {wanted: part for part in parts for wanted in part.ranges}
    indexes = source.block_indexes
    held = held or HeldRanges([index.ranges for index in indexes])
    reads: list[_Read] = []
    for copy in held.plan(targets):
        tensor = indexes[copy.source].tensors[copy.held.name]
        offset = copy.held.offset + (copy.start - copy.held.start) * tensor.item_bytes
        first = copy.wanted.offset + copy.start - copy.wanted.start
        target = targets[copy.wanted].memory[first : first + copy.numel]
        value = source.tensor(copy.source, offset, copy.numel * tensor.item_bytes)
        if value is not None:
            target.copy_(value)
        else:
            reads.append(_Read(copy.source, offset, target, DTYPE_BY_NAME[tensor.dtype]))
    reads.sort(key=lambda read: (read.block, read.offset))
    for torch_device in {read.target.device for read in reads}:
        device = get_device(torch_device)
        of_device = [read for read in reads if read.target.device == torch_device]
        if device.asynchronous:
            _read_to_device(device, source, of_device)
        else:
            _read_to_host(source, of_device)


class _Read(NamedTuple):
    """A read of elements with dtype `dtype` at byte `offset` of a block, into the flat `target`."""

    block: int
    offset: int
    target: Tensor
    dtype: torch.dtype


def _read_to_host(source: StateSource, reads: Sequence[_Read]) -> None:
    """Reads directly into memory of the same dtype, or else, in parts, through a temporary copy."""
    for block, offset, target, dtype in reads:
        if target.dtype is dtype:
            source.read(block, offset, target.view(torch.uint8).numpy().data)
            continue
        step = CAST_BYTES // dtype.itemsize
        landing = torch.empty(min(step, target.numel()), dtype=dtype)
        for start in range(0, target.numel(), step):
            part = target[start : start + step]
            read = landing[: part.numel()]
            source.read(block, offset + start * dtype.itemsize, read.view(torch.uint8).numpy().data)
            part.copy_(read)


def _read_to_device(device: Device, source: StateSource, reads: Sequence[_Read]) -> None:
    """Fills targets in the memory of an asynchronous device. Raises as `StateSource.read`.

    The copies run on a separate stream, after what was enqueued before. Bytes in host memory that
    is registered with the device are copied from there, while the host verifies their checksums.
    All other bytes are verified as they are read, into two pinned buffers in turn. A buffer is
    filled again only when its copy is done. The loaded values must not be used before this function
    returns: it waits for the copies, and raises if a checksum is wrong. Only then may the source be
    closed. What is enqueued on the current stream afterwards sees the state.
    """
    stream = device.new_stream()
    stream.wait_stream(device.current_stream())
    staging: list[tuple[Tensor, Event]] = []
    blocks = {read.block: source.registered_block(read.block) for read in reads}
    try:
        # Registered blocks first: their copies run while the host reads the others, and verifies.
        for read in sorted(reads, key=lambda read: blocks[read.block] is None):
            if (data := blocks[read.block]) is None:
                _read_staged(device, stream, source, read, staging)
                continue
            numel = read.target.numel()
            host = torch.frombuffer(data, dtype=read.dtype, count=numel, offset=read.offset)
            with device.use_stream(stream):
                read.target.copy_(host, non_blocking=True)
        for block, data in blocks.items():
            if data is not None:
                source.verify(block)
    finally:
        stream.synchronize()


def _read_staged(
    device: Device,
    stream: Stream,
    source: StateSource,
    read: _Read,
    staging: list[tuple[Tensor, Event]],
) -> None:
    """Reads through `staging`: two pinned buffers and their copies' events, the next one first."""
    item_bytes = read.dtype.itemsize
    step = STAGING_BYTES // item_bytes
    for start in range(0, read.target.numel(), step):
        part = read.target[start : start + step]
        if len(staging) < 2:
            buffer = device.host_empty(STAGING_BYTES, torch.uint8)
        else:
            buffer, copied = staging.pop(0)
            copied.synchronize()
        host = buffer[: part.numel() * item_bytes]
        source.read(read.block, read.offset + start * item_bytes, host.numpy().data)
        with device.use_stream(stream):
            part.copy_(host.view(read.dtype), non_blocking=True)
            staging.append((buffer, device.record_event()))


def elementwise_state(optimizer: ShardedOptimizer, shard: OptimizerShard) -> dict[str, Tensor]:
    """Returns a shard's optimizer state that has one element for each weight, by key. Raises
    EngineError if the optimizer keeps a tensor of another shape."""
    state = optimizer.state_tensors(shard)
    for key, value in state.items():
        if value.shape != shard.weight.shape:
            raise EngineError(
                f"{type(optimizer.torch_optimizer).__name__} keeps {key!r} of shape "
                f"{tuple(value.shape)} for {shard.weight.numel()} weights",
                allowed="state with one element for each weight, and scalars",
                fix="initialize(optimizer=...)",
            )
    return state


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, buffer) of the buffers in the model's state dict, each once."""
    kept = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in kept:
            yield name, buffer


def buffer_ranges(model: nn.Module) -> list[StateRange]:
    """Returns the ranges of the persistent buffers."""
    return [
        replace(whole_tensor_range(f"buffers/{name}", value), volatile=True)
        for name, value in persistent_buffers(model)
    ]


def pack_block(parts: Sequence[StateRange]) -> StateBlock:
    """Lays out the ranges in a block: constant ones, then weights and buffers, then the rest, each
    in the order of `parts`. So the block begins with all that a reader of only weights needs."""
    parts = sorted(parts, key=lambda part: (not part.constant, not part.is_weights))
    ranges: list[TensorRange] = []
    offsets: list[int] = []
    tensors: dict[str, LogicalTensor] = {}
    nbytes = constant_bytes = weight_bytes = 0
    for part in parts:
        dtype, size = dtype_name(part.memory.dtype), part.memory.element_size()
        offsets.append(nbytes)
        for held in part.ranges:
            ranges.append(replace(held, offset=nbytes + held.offset * size))
            tensors[held.name] = LogicalTensor(dtype, part.shapes[held.name])
        nbytes += -(-part.memory.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        if part.constant:
            constant_bytes = nbytes
        if part.is_weights:
            weight_bytes = nbytes
    index = BlockIndex(tensors, tuple(ranges), nbytes, constant_bytes, weight_bytes)
    return StateBlock(index, parts, offsets)


def _frozen_ranges(runtime: ZeroRuntime, rank: int, world_size: int) -> list[StateRange]:
    """Returns this rank's ranges of frozen parameters outside of units: an equal part of each."""
    parts = []
    for name, value in runtime.ungrouped_params.items():
        flat = value.detach().reshape(-1)
        start = flat.numel() * rank // world_size
        stop = flat.numel() * (rank + 1) // world_size
        full = f"weights/{name}"
        ranges = (TensorRange(full, start, stop, 0),) if start < stop else ()
        parts.append(
            StateRange(flat[start:stop], ranges, {full: tuple(value.shape)}, constant=True)
        )
    return parts


def whole_tensor_range(name: str, tensor: Tensor) -> StateRange:
    flat = tensor.detach().reshape(-1)
    ranges = (TensorRange(name, 0, flat.numel(), 0),) if flat.numel() else ()
    return StateRange(flat, ranges, {name: tuple(tensor.shape)})


def range_of_unit(
    layout: UnitLayout,
    kind: str,
    memory: Tensor,
    extent: slice,
    within: slice | None = None,
    *,
    constant: bool = False,
) -> StateRange:
    """Returns the range of `memory`, which is `extent` of a unit's flat layout, inside `within`."""
    within = within or extent
    start, stop = max(extent.start, within.start), min(extent.stop, within.stop)
    ranges, shapes = [], {}
    for part in layout.overlaps(slice(start, stop)):
        spec = layout.params[part.index]
        name = f"{kind}/{spec.name}"
        ranges.append(TensorRange(name, part.start, part.stop, part.memory.start))
        shapes[name] = spec.shape
    view = memory[start - extent.start : max(start, stop) - extent.start]
    return StateRange(view, tuple(ranges), shapes, constant)
