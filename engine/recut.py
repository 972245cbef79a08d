"""Lets an engine outlive its process group: re-cuts the engine for other ranks, in place.

Used after a loss of ranks, and when ranks join or leave. The model, its parameters, hooks and
compiled code stay, and so do the optimizer, the schedule, the loader and all objects that a script
may hold. What depends on the number of ranks is replaced: the shards of weights, gradients and
optimizer state, and the buffers that they pass through.

Memory. Units are replaced one by one. The state that a new unit lacks is read from the source
before the old unit is dropped, so the peak is one unit above the larger of the two engines.

Order. The previous process group has ended, and the device has finished what was queued on it: no
kernel, copy or peer reads or writes the engine's memory. The new group exists. Ranks whose engine
is re-cut call the same collectives, in the same order, as new ranks, which build an engine.

Sources. The memory that the engine still holds is the first source of its new shards. Optimizer
state whose ranges are the same as before is moved without a copy; other held ranges are copied on
the device. Only the rest is read from host memory. The held values are correct, because they are
those that only the engine changes (`TrainingState.private_ranges`), of a state that was consistent
when the group had ended. An aborted collective may have written gathered weights, gradients and
residuals, but none of these are held. Lifetimes: the copies run on the current stream, for which
the held tensors were allocated. torch's allocator reuses their memory in stream order, so `close`
may drop them at once.

Rule of ordering: `recut-own` (docs/engine.md).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.builder import (
    bind_optimizer,
    make_build_context,
    resolve_settings,
    split_step,
    use_batches,
    with_saved_batch_sizes,
)
from rayzero.engine.comm.collectives import DETACHED
from rayzero.engine.comm.process_group import connect_backend
from rayzero.engine.compression.gradients import make_grad_reduction
from rayzero.engine.compression.weights import make_weight_gather
from rayzero.engine.data.batch_sizes import BatchSizes, with_shares
from rayzero.engine.layout.reshard import HeldRanges
from rayzero.engine.layout.state_index import LogicalTensor, StateSource, TensorRange
from rayzero.engine.layout.units import UnitPlan
from rayzero.engine.optim.sharded_optimizer import OptimizerShard, optimizer_shards
from rayzero.engine.runtime_builder import make_grad_buffers, make_unit
from rayzero.engine.session import OTHER_LOADER
from rayzero.engine.state.error_feedback import load_residuals
from rayzero.engine.state.load import make_optimizer_state
from rayzero.engine.state.ranges import (
    StateRange,
    buffer_ranges,
    pack_block,
    read_ranges,
    weights_range,
)
from rayzero.engine.training_step import TrainingStep
from rayzero.engine.zero.build_context import BuildContext
from rayzero.engine.zero.parameters import ShardedWeights
from rayzero.engine.zero.unit import Unit

log = logging.getLogger("rayzero.engine")


class GroupSurvival:
    """Lets an engine outlive its process group.

    Args:
        step, model: the engine's training step and model.
        after_recut: called after the engine was re-cut.
    """

    def __init__(
        self, step: TrainingStep, model: nn.Module, after_recut: Callable[[], None]
    ) -> None:
        self._step = step
        self._model = model
        self._after_recut = after_recut
        self._collectives = step.runtime.collectives

    def enable(self, on_broken: Callable[[str], None] | None) -> None:
        """Makes the engine outlive a broken process group, instead of raising: the host's session
        is asked to `reform`. See `Collectives.on_broken`; None disables this."""
        self._collectives.on_broken = on_broken

    @property
    def is_enabled(self) -> bool:
        return self._collectives.on_broken is not None

    def follow_host_loader(self) -> None:
        """Tells the engine that the host yields the script's batches from now on, and calls
        `await_group` before each."""
        self._step.reforming.by_host = True

    def await_group(self) -> None:
        """Asks the host for another process group, if this one is broken and no step is running."""
        within = self._step.tracker.has_gradients
        self._step.reforming.before_read(OTHER_LOADER, within=within)

    @property
    def can_divide_anew(self) -> bool:
        """Whether `divide` is possible between the step that is about to end and the next one: the
        next step's samples have not been read, and no shared state would have to change ranks."""
        step = self._step
        return step.micro_batches.can_divide_anew and not step.state.registry.is_shared

    def divide(self, shares: Sequence[float]) -> None:
        """Divides the samples of later steps among the ranks by `shares`, which add up to 1. Called
        between the same two steps on all ranks."""
        sizes = self._step.settings.batches
        self._divide_steps(with_shares(sizes, self._collectives.world_size, shares))

    def _divide_steps(self, batches: BatchSizes) -> None:
        use_batches(self._step, batches)
        self._step.micro_batches.recut(split_step(self._step.settings, self._collectives))

    @property
    def local_reason(self) -> str:
        """Why this rank computes without its peers; empty if it does not."""
        return self._collectives.broken or (DETACHED if self._collectives.detached else "")

    @property
    def reads_ahead(self) -> bool:
        """Whether the loop has read batches that it has not trained on."""
        return self._step.micro_batches.is_read_where_steps_begin

    def can_continue(self, *, replays_epochs: bool) -> bool:
        """Returns whether the script's loop can continue after a step was lost with its group. The
        loop must be able to read the step's samples again, which it cannot after `list(loader)`.

        `replays_epochs`: a new rank runs the code behind each finished epoch, without its peers.
        The loop can continue only if this code has not needed all ranks so far.
        """
        if not self._step.micro_batches.can_read_again:
            return False
        return not (replays_epochs and self._step.reforming.gathered_between_steps)

    @property
    def collectives_called(self) -> int:
        """The number of collectives that the engine has called."""
        return self._collectives.counters.sequence

    def break_group(self, reason: str) -> None:
        """Marks the process group as broken, so that it is not used any more. By any thread."""
        self._collectives.break_off(reason)

    def begin_step(self) -> None:
        """Starts to time the first step with the ranks of another process group."""
        self._step.meter.restart_step()

    def recut(
        self, source: StateSource, *, keep: bool, shares: Sequence[float] = (), undoes: bool = False
    ) -> KeptSource:
        """Continues on the ranks of the current process group, from the state of `source`, after
        the previous group has ended. Collective.

        Args:
            source: a complete state, including the parts of ranks that are lost.
            keep: whether this rank's memory holds its part of that state, unchanged. If so, the
                memory is the first source.
            shares: each rank's share of a step's samples; empty for even shares.
            undoes: whether a step of another engine is undone.

        Returns:
            The closed source, with the numbers of bytes that were moved, copied and read.

        Raises:
            DataError, EngineError: the state cannot be read. The caller may try again, with `keep`
                false.
            ConfigError: the batch sizes do not fit the ranks.
        """
        backend, _ = connect_backend()  # an error here leaves the engine unchanged
        step = self._step
        runtime = step.runtime
        runtime.collectives.in_step = True  # so that nothing waits for the previous group
        step.abandon()
        kept = KeptSource(step.state.private_ranges() if keep else [], source)
        runtime.unshard_scheduler.abandon()
        runtime.collectives.abandon()
        runtime.collectives.reconnect(backend)
        collectives, precision = runtime.collectives, runtime.precision
        config = with_saved_batch_sizes(step.settings.config, source.metadata(0))
        context = make_build_context(
            config, self._model, collectives, restoring=True, elastic=True, precision=precision
        )
        step.settings = resolve_settings(context, shares)
        step.state.recut(kept, _Recut(step, self._model, context, kept).run, undoes=undoes)
        step.meter.open_monitors()
        self._divide_steps(step.settings.batches)
        for buffer in _unsaved_buffers(self._model):
            collectives.broadcast(buffer)
        kept.close()
        self._after_recut()
        return kept


class KeptSource(StateSource):
    """A state source whose block 0 is memory of this process (`held`). The other blocks are those
    of `source`, which has the same values. Owns both until `close`. Used by one thread.

    Attributes:
        bytes_moved, bytes_copied: bytes taken from `held`, without and with a copy.
        bytes_read: bytes read from `source`.
    """

    def __init__(self, held: Sequence[StateRange], source: StateSource) -> None:
        packed = pack_block(held)
        self._offsets = packed.offsets
        self._memories: list[Tensor | None] = [part.memory for part in packed.ranges]
        self._by_ranges = {part.ranges: number for number, part in enumerate(packed.ranges)}
        self._source = source
        self.step = source.step
        self.block_indexes = [packed.index, *source.block_indexes]
        self.bytes_moved = self.bytes_copied = self.bytes_read = 0

    def metadata(self, rank: int) -> dict[str, Any]:
        return self._source.metadata(rank)

    def take(
        self, ranges: tuple[TensorRange, ...], like: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        number = self._by_ranges.get(ranges)
        memory = None if number is None else self._memories[number]
        wanted = like.shape, dtype, like.device
        if memory is None or (memory.shape, memory.dtype, memory.device) != wanted:
            return None
        self.bytes_moved += memory.nbytes
        return memory

    def tensor(self, block: int, offset: int, nbytes: int) -> Tensor | None:
        if block:
            self.bytes_read += nbytes
            return None
        number = bisect_right(self._offsets, offset) - 1
        memory = self._memories[number]
        if memory is None:
            raise RuntimeError(f"the memory of byte {offset} was dropped")
        self.bytes_copied += nbytes
        start = (offset - self._offsets[number]) // memory.itemsize
        return memory[start : start + nbytes // memory.itemsize]

    def drop(self, names: Container[str]) -> None:
        """Frees the held ranges of these tensors, which nothing will read any more."""
        for ranges, number in self._by_ranges.items():
            if ranges[0].name in names:
                self._memories[number] = None

    def read(self, block: int, offset: int, into: memoryview) -> None:
        self._source.read(block - 1, offset, into)

    def registered_block(self, block: int) -> memoryview | None:
        return self._source.registered_block(block - 1)

    def verify(self, block: int) -> None:
        self._source.verify(block - 1)

    def close(self) -> None:
        log.info(
            "step %d: %d bytes were moved within this process, %d copied, %d read",
            self.step,
            self.bytes_moved,
            self.bytes_copied,
            self.bytes_read,
        )
        self._memories.clear()
        self._by_ranges.clear()
        self._source.close()


class _Recut:
    """Replaces one engine's tensors by those for the current ranks."""

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
        """Replaces the tensors, unit by unit. Not collective."""
        runtime = self._runtime
        context = self._context
        reduction = make_grad_reduction(context, self._step.settings.post_reduce_scale)
        plans = [_plan_again(unit, context) for unit in runtime.units]
        buffers = make_grad_buffers(plans, context)
        stores = context.offload.state_stores(plans)
        before: defaultdict[str, list[OptimizerShard]] = defaultdict(list)
        for shard in self._optimizer.shards:
            before[shard.unit.name].append(shard)
        # From here on only `before` and the list of units refer to the old tensors.
        self._optimizer.rebind(())
        runtime.reducer.connect([], None)
        blocks = {block.module: block for block in runtime.unshard_scheduler.blocks}
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
        runtime.unshard_scheduler.reconnect(make_weight_gather(context))
        runtime.grad_reduction = reduction
        runtime.offload.close()
        runtime.offload = context.offload
        self._optimizer.rebind(shards)
        bind_optimizer(self._optimizer, runtime)
        buffers_in_state = [part for part in buffer_ranges(self._model) if self._has(part.shapes)]
        read_ranges(buffers_in_state, self._source, self._held)
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

    def _has(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return all(name in self._tensors for name in shapes)


def _plan_again(unit: Unit, context: BuildContext) -> UnitPlan:
    """Plans a unit for the current ranks: the same parameters at the same offsets."""
    layout = unit.layout.for_world_size(context.collectives.world_size)
    return UnitPlan(layout, unit.params, unit.main_weights is not None, unit.module)


def _unsaved_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Returns the buffers that are in no state, in the order of a new engine's broadcasts."""
    return [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    ]
