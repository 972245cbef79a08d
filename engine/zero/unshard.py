"""Unshards blocks of weights before they are used, and prefetches the next ones.

The scheduler records which block follows which, in forward and in backward, and gathers the next
one while the current one computes.

Why a buffer may be overwritten. In forward, a block has returned when another block is entered. In
backward, autograd runs the nodes of one device in reverse order of creation. So when the gradient
of an earlier block's output arrives, the later block is done. On CUDA its kernels are enqueued
before the collective that overwrites the buffer. The exception is a block that calls another block.
Such a block gets its own buffer once the call has been observed. Until then nothing is prefetched.

Rules of ordering: `gather-reuse`, `gather-assignment`, `weights-outside` (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rayzero.engine.compiling import refuse_compiled, untraced
from rayzero.engine.errors import EngineError
from rayzero.engine.tensor_tree import iter_tensors
from rayzero.engine.torch_private import is_compiled, is_in_functional_transform
from rayzero.engine.zero.gather_buffers import Block, BlockState, GatherBuffers
from rayzero.engine.zero.parameters import WeightGather
from rayzero.engine.zero.reducer import BackwardPass
from rayzero.engine.zero.shape_only import SHAPE_ONLY, function_name


def _not_differentiable(seen: str) -> EngineError:
    return EngineError(
        seen,
        allowed="at stage 3, first derivatives by backward() or torch.autograd.grad",
        fix="zero_optimization.stage 2 or less, for second derivatives and torch.func",
    )


class UnshardScheduler:
    """Gathers blocks' weights before their forward and backward.

    Without `reshard_after_forward` every block has its own buffer and is gathered once a step: it
    stays gathered from its first forward to the update, over all micro-steps.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        buffers: GatherBuffers,
        gather: WeightGather,
        backward: BackwardPass,
        *,
        reshard_after_forward: bool = True,
    ) -> None:
        self._backward = backward
        self.blocks = blocks
        self.buffers = buffers
        self.paused = False  # the script has gathered all weights itself, so hooks do nothing
        modules = {block.module for block in blocks}
        self._outer_blocks = {  # with buffers of their own: they stay gathered while others run
            block
            for block in blocks
            if not reshard_after_forward or len(modules.intersection(block.module.modules())) > 1
        }
        # The grad modes (enabled: True) in which no forward's reads of weights were checked yet.
        self._unchecked = {True, False} if any(block.large for block in blocks) else set[bool]()
        self._begin(gather)

    def reconnect(self, gather: WeightGather) -> None:
        """Gathers the blocks' new units with `gather` from now on. Forgets the recorded order of
        blocks: all ranks must launch the same gathers, and new ranks have recorded nothing."""
        self.abandon()
        self._begin(gather)

    def abandon(self) -> None:
        """Forgets gathered weights, without waiting for gathers in flight."""
        for block in self.blocks:
            if block.state is not BlockState.SHARDED:
                for unit in block.units:
                    unit.reshard()
            block.abandon()
        self.buffers.clear()

    def _begin(self, gather: WeightGather) -> None:
        self.weight_gather = gather
        self._own_buffer = set(self._outer_blocks)
        self._running: list[Block] = []  # blocks whose forward has not returned, outermost first
        self._forward_order: dict[Block, None] = {}  # first uses since the last assignment
        self._successors: tuple[dict[Block, Block], ...] = ({}, {})  # in forward, in backward
        self._previous: Block | None = None
        self._prefetch_ready = False  # whether buffers are assigned in the recorded order
        self.buffers.assign(self.blocks, self._own_buffer)

    def checking_reads(self, model: nn.Module) -> AbstractContextManager[object]:
        """Returns a context for the model's forward. In the first forward with gradients, and in
        the first without, reading a large module's weight outside that module's forward raises
        EngineError there. Nothing is checked if the compiler would trace the check."""
        if (
            self.paused
            or torch.is_grad_enabled() not in self._unchecked
            or any(map(is_compiled, model.modules()))
        ):
            return nullcontext()
        self._unchecked.remove(torch.is_grad_enabled())
        return _ReadCheck(self.blocks, self._running)

    @untraced
    def root_pre_forward(self, around: Mapping[nn.Module, str] | None = None) -> None:
        """Called before the model's forward, also when it is recomputed in backward. Raises
        ConfigError if one of the modules `around` blocks has been compiled meanwhile."""
        refuse_compiled(around or {})
        if self._backward.runs or self.paused:
            return
        self._previous = None
        for block in self.blocks:
            block.forward_calls = 0

    def pre_forward(self, block: Block) -> None:
        """Called before a block's forward, also when it is recomputed in backward.

        Raises:
            EngineError: in a transform of torch.func, or if a block that was called on its own is
                now called inside another one that shares its buffer.
        """
        if self.paused:
            return
        if is_in_functional_transform():
            raise _not_differentiable(f"torch.func: it called the block {block.name!r}")
        if self._running and block.buffer_index is not None:
            self._leave_ring(block)
        self._unshard(block)
        if not self._backward.runs:
            self._record_order(block)
            self._record_successor(block)
        self._running.append(block)
        if self._prefetch_ready:
            self._prefetch(block)

    def post_forward(self, block: Block) -> None:
        """Called after a block's forward has returned or raised, also if `pre_forward` raised."""
        if block in self._running:
            self._running.remove(block)

    def change_pass(self) -> None:
        """Called when a backward begins or ends: the next block is no block's successor."""
        self._previous = None

    def pre_backward(self, block: Block) -> None:
        """Called when the gradient of a block's output is known, before the block's backward.
        Raises EngineError with create_graph: a graph for second derivatives would later read
        weights that are not gathered."""
        if torch.is_grad_enabled():
            raise _not_differentiable(
                f"create_graph: its gradient reached the block {block.name!r}"
            )
        if not self._backward.runs:
            self._backward.on_own_block()
        self._unshard(block)
        self._record_successor(block)
        if self._prefetch_ready:
            self._prefetch(block)

    def state_of(self, unit: object) -> BlockState:
        """Returns the state of the block that a unit belongs to."""
        return next(block.state for block in self.blocks if unit in block.units)

    def wait_prefetched(self) -> None:
        """Returns when no gather reads the shards, not even that of a prefetched, unused block."""
        for block in self.blocks:
            if block.state is BlockState.GATHERING:
                self._wait_all_gather(block)

    def invalidate(self) -> None:
        """Discards gathered weights after the shards were updated. May reassign buffers: no graph
        that a later backward would use may exist, so addresses may change.
        """
        for block in self.blocks:
            self._reshard(block)
        self.buffers.clear()
        self.weight_gather.invalidate()
        if not self._prefetch_ready and self._forward_order:
            self.buffers.assign([*self._forward_order, *self.blocks], self._own_buffer)
            self._prefetch_ready = True

    def _unshard(self, block: Block) -> None:
        if block.state is BlockState.SHARDED:
            self._start_all_gather(block)
        if block.state is BlockState.GATHERING:
            self._wait_all_gather(block)

    def _start_all_gather(self, block: Block) -> None:
        other = self.buffers.current_block(block)
        if other is not None:
            self._reshard(other)
        buffers = self.buffers.acquire(block)
        block.pending = [
            unit.unshard(buffer, self.weight_gather.gather_op(unit))
            for unit, buffer in zip(block.units, buffers, strict=True)
        ]
        block.state = BlockState.GATHERING

    def _wait_all_gather(self, block: Block) -> None:
        for work in block.pending:
            work.wait()
        block.pending = []
        block.state = BlockState.GATHERED

    def _reshard(self, block: Block) -> None:
        if block.state is BlockState.GATHERING:  # prefetched and not used: still being written
            self._wait_all_gather(block)
        if block.state is BlockState.GATHERED:
            for unit in block.units:
                unit.reshard()
            block.state = BlockState.SHARDED

    def _prefetch(self, block: Block) -> None:
        """Gathers the blocks that followed this one last time, as many as there are other
        buffers."""
        successors = self._successors[self._backward.runs]
        held = [block]
        for _ in range(self.buffers.count - 1):
            upcoming = successors.get(held[-1])
            if upcoming is None:
                return
            if upcoming.state is BlockState.SHARDED:
                other = self.buffers.current_block(upcoming)
                if other is not None and (other in held or other in self._running):
                    return
                self._start_all_gather(upcoming)
            held.append(upcoming)

    def _record_successor(self, block: Block) -> None:
        if self._previous is not None:
            self._successors[self._backward.runs][self._previous] = block
        self._previous = block

    def _record_order(self, block: Block) -> None:
        """Records the order of first use. Also notes blocks that are called twice in a pass, or
        that call others: they need buffers of their own."""
        block.forward_calls += 1
        if not self._prefetch_ready:
            self._forward_order.setdefault(block)
        if not self._running and block.forward_calls == 1:
            return
        around = [other for other in self._running if other not in self._own_buffer]
        if block.forward_calls > 1 and block not in self._own_buffer:
            around.append(block)
        if around:
            self._own_buffer.update(around)
            self._prefetch_ready = False
            self._forward_order = self._forward_order or dict.fromkeys(self.blocks)

    def _leave_ring(self, block: Block) -> None:
        """Gives a block that is called inside another block of the ring its own buffer.

        Only at the block's first use in a pass: later, autograd may hold views of its address.
        """
        outside = [running for running in self._running if running is not block]
        if all(running.buffer_index is None for running in outside):
            return
        if not block.forward_calls:
            self._reshard(block)
            self.buffers.give_own_buffer(block)
            self._own_buffer.add(block)
            return
        outer = self.buffers.current_block(block)
        if outer is not None and outer in self._running:
            raise EngineError(
                f"the block {block.name!r} is called on its own and then inside {outer.name!r}, "
                "which shares its buffer",
                fix="rayzero.unshard_modules in the engine config: name classes that do not nest",
            )


class _ReadCheck(TorchFunctionMode):
    """Raises EngineError if a torch function gets a large module's weight, by whatever reference,
    outside the module's own forward. The weight is gathered only there."""

    def __init__(self, blocks: Sequence[Block], running: Sequence[Block]) -> None:
        super().__init__()
        self._owners = {
            id(param): block
            for block in blocks
            if block.large
            for unit in block.units
            for param in unit.params
        }
        self._running = running

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function_name(func) not in SHAPE_ONLY and func.__name__ != "__set__":
            for tensor in iter_tensors((args, kwargs)):
                block = self._owners.get(id(tensor))
                if block is not None and block not in self._running:
                    raise EngineError(
                        f"a weight of {block.name!r} was read outside its forward, where it is not "
                        "gathered",
                        fix="rayzero.unshard_min_numel: 0 in the engine config",
                    )
        return func(*args, **(kwargs or {}))
