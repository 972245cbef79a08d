"""The engine's training state as named ranges and a JSON part.

Mirroring, resharding, saving and loading all use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.data.sampling import TrainingProgress
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import BlockIndex, StateSource
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.state import metadata
from rayzero.engine.state.error_feedback import residual_metadata, residual_ranges
from rayzero.engine.state.load import LOAD_ALL, LoadOptions, load_tensors
from rayzero.engine.state.ranges import (
    StateRange,
    held_ranges,
    owned_ranges,
    pack_block,
    persistent_buffers,
)
from rayzero.engine.zero.runtime import ZeroRuntime


class TrainingState:
    """One rank's view of the state. For the training thread only, until that has ended.

    Attributes:
        complete_on_rank: whether this rank's memory holds the complete state, as at stage 0.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: ZeroRuntime,
        optimizer: ShardedOptimizer,
        scheduler: Scheduler | None,
        progress: TrainingProgress,
        device: torch.device,
    ) -> None:
        self.progress = progress
        # Each rank's error feedback residuals are in its own memory only.
        self.complete_on_rank = runtime.stage.state_replicated and (
            not runtime.grad_reduction.residuals or runtime.collectives.world_size == 1
        )
        self._device = device
        self._model = model
        self._runtime = runtime
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._is_updating = False
        self._packed_signature: tuple[object, ...] | None = None
        self._ranges: list[StateRange] = []
        self._block_index = BlockIndex()
        self._offsets: list[int] = []
        self._param_names: dict[str, Any] = {}  # of the whole model, saved by rank 0
        self._group_params: dict[int, list[str]] = {}

    @property
    def consistent(self) -> bool:
        """Whether all of the state belongs to one step; false during an update."""
        return not self._is_updating

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Mark the state inconsistent during an update.

        Deliberately no `finally`: after an exception it stays marked, so that a half-updated step
        is never mirrored or saved.
        """
        self._is_updating = True
        yield
        self._is_updating = False

    def block_index(self) -> BlockIndex:
        """Index of this rank's share. It changes when the optimizer creates its state, then never
        again."""
        signature = self._memory_signature()
        if signature != self._packed_signature:
            parts = owned_ranges(self._model, self._runtime, self._optimizer)
            self._ranges = parts + residual_ranges(self._runtime)
            self._block_index, self._offsets = pack_block(self._ranges)
            self._packed_signature = signature
        return self._block_index

    def write_block(self, block: memoryview, *, constants: bool) -> None:
        """Copy this rank's share into a block of `block_index().nbytes` bytes.

        Args:
            block: writable.
            constants: include constant ranges; otherwise the block has them from an earlier call.
        """
        self.block_index()
        copy_to_block(self._ranges, self._offsets, block, constants=constants)

    def describe_block(self, *, whole: bool) -> tuple[BlockIndex, list[StateRange], list[int]]:
        """Index, ranges and offsets of this rank's share, or of the complete state (`whole`).

        Raises:
            EngineError: `whole`, but this rank holds only its share.
        """
        if not whole:
            return self.block_index(), self._ranges, self._offsets
        if not self.complete_on_rank:
            raise EngineError("this rank holds only its share of the training state")
        parts = held_ranges(self._model, self._runtime, self._optimizer)
        parts += residual_ranges(self._runtime)
        table, offsets = pack_block(parts)
        return table, parts, offsets

    def metadata(self) -> bytes:
        """The JSON part of this rank, as UTF-8."""
        document: dict[str, Any] = {
            "rank": self._runtime.collectives.rank,
            "world_size": self._runtime.collectives.world_size,
            "stage": self._runtime.stage.number,
            "step": self.progress.step,
            "sample_cursor": self.progress.sample_cursor,
            "global_batch": self.progress.global_batch,
            "micro_batch": self.progress.micro_batch,
            "skipped_steps": self.progress.skipped_steps,
            "loss_scale": self._runtime.precision.scaler.state_dict(),
            "groups": metadata.optimizer_metadata(self._optimizer),
            "scheduler": metadata.scheduler_metadata(self._scheduler),
            "rng": metadata.capture_rng(self._device),
            **residual_metadata(self._runtime.grad_reduction),
        }
        if self._runtime.collectives.rank == 0:
            if not self._param_names:
                self._param_names = metadata.param_name_metadata(self._model, self._runtime)
                self._group_params = metadata.group_param_names(self._runtime)
            document |= self._param_names
            for number, group in enumerate(document["groups"]):
                group["params"] = self._group_params.get(number, [])
        return json.dumps(document, separators=(",", ":")).encode()

    def load(self, source: StateSource) -> None:
        """Load a state of any stage and world size. Collective.

        Raises:
            As `load_from`.
        """
        self.load_from(source, LOAD_ALL)
        self.sync_model_weights()

    @torch.no_grad()
    def load_from(self, source: StateSource, options: LoadOptions) -> None:
        """Read what this rank needs. Not collective; call `sync_model_weights` on every rank next.

        Raises:
            CheckpointMismatchError: the state is of another model.
            DataError: the state is damaged or incomplete.
        """
        rank = self._runtime.collectives.rank
        document = source.metadata(rank)
        load_tensors(self._model, self._runtime, self._optimizer, source, options)
        if options.optimizer:
            keep = self._scheduler is None and not options.optimizer_options
            metadata.restore_optimizer_metadata(self._optimizer, source, keep_options=keep)
        if options.scheduler:
            metadata.restore_scheduler(self._scheduler, document.get("scheduler"))
        if not options.progress:
            return
        self.progress.step = document["step"]
        self.progress.micro_step = 0
        self.progress.sample_cursor = document.get("sample_cursor", 0)
        self.progress.skipped_steps = document.get("skipped_steps", 0)
        self._runtime.load_loss_scale(document.get("loss_scale"))
        if rng := document.get("rng"):
            if document.get("rank") == rank:
                metadata.restore_rng(rng, self._device)
            else:
                metadata.fork_rng(rng, rank, self._device)

    def sync_model_weights(self) -> None:
        """Update model weights from the loaded main weights. Collective."""
        self._runtime.sync_model_weights()

    def _memory_signature(self) -> tuple[object, ...]:
        """Equal as long as the ranges are in the same memory."""
        state = self._optimizer.torch_optimizer.state
        runs = tuple(
            value.data_ptr()
            for run in self._optimizer.shards
            for value in state.get(run.weight, {}).values()
            if isinstance(value, Tensor) and value.ndim
        )
        return runs, tuple(buffer.data_ptr() for _, buffer in persistent_buffers(self._model))


def copy_to_block(
    parts: Sequence[StateRange], offsets: Sequence[int], block: memoryview, *, constants: bool
) -> None:
    """Copy ranges to their offsets in a block of bytes."""
    for part, offset in zip(parts, offsets, strict=True):
        if part.constant and not constants:
            continue
        memory = part.memory
        target = torch.frombuffer(block, dtype=memory.dtype, count=memory.numel(), offset=offset)
        target.copy_(memory)
