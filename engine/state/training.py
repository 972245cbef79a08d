"""The engine's whole training state as named ranges and a small JSON part.

Everything that mirrors, moves, saves or loads state goes through here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.data.progress import Progress
from rayzero.engine.errors import EngineError
from rayzero.engine.optim.local import LocalOptimizer
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.state import randomness, small
from rayzero.engine.state.load import ALL, Choice, load_tensors
from rayzero.engine.state.parts import Part, all_parts, kept_buffers, lay_in_block, own_parts
from rayzero.engine.state.residuals import residual_numbers, residual_parts
from rayzero.engine.state.source import StateSource
from rayzero.engine.state.table import Table
from rayzero.engine.zero.runtime import ZeroRuntime


class TrainingState:
    """One rank's view of the state. Used by the training thread, or when that has ended.

    Attributes:
        whole: whether this rank's memory holds all of the state, as at stage 0.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: ZeroRuntime,
        optimizer: LocalOptimizer,
        scheduler: Scheduler | None,
        progress: Progress,
        device: torch.device,
    ) -> None:
        self.progress = progress
        # What compression kept back of each rank's gradients is in that rank's memory only.
        self.whole = runtime.stage.is_whole and (
            not runtime.way.kept or runtime.collectives.world_size == 1
        )
        self._device = device
        self._model = model
        self._runtime = runtime
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._changing = False
        self._signature: tuple[object, ...] | None = None
        self._parts: list[Part] = []
        self._table = Table()
        self._offsets: list[int] = []
        self._names: dict[str, Any] = {}  # of the whole model, told by rank 0
        self._members: dict[int, list[str]] = {}

    @property
    def consistent(self) -> bool:
        """Whether all of it is of one step: not in the middle of an update."""
        return not self._changing

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around an update. When that breaks off, what is there belongs to no step any more."""
        self._changing = True
        yield
        self._changing = False

    def table(self) -> Table:
        """What this rank's share is made of. It changes when the optimizer makes its state, and
        never after that."""
        signature = self._sign()
        if signature != self._signature:
            parts = own_parts(self._model, self._runtime, self._optimizer)
            self._parts = parts + residual_parts(self._runtime)
            self._table, self._offsets = lay_in_block(self._parts)
            self._signature = signature
        return self._table

    def write(self, block: memoryview, *, constants: bool) -> None:
        """Copies this rank's share into a block of `table().nbytes` bytes.

        Args:
            block: writable.
            constants: also what never changes; the block has it from an earlier call otherwise.
        """
        self.table()
        copy_out(self._parts, self._offsets, block, constants=constants)

    def block(self, *, whole: bool) -> tuple[Table, list[Part], list[int]]:
        """A table, its parts, and their offsets: of this rank's share, or of all that it holds.

        Raises:
            EngineError: the whole is wanted, and this rank holds its share only.
        """
        if not whole:
            return self.table(), self._parts, self._offsets
        if not self.whole:
            raise EngineError("this rank's memory holds its own share of the state only")
        parts = all_parts(self._model, self._runtime, self._optimizer)
        parts += residual_parts(self._runtime)
        table, offsets = lay_in_block(parts)
        return table, parts, offsets

    def small(self) -> bytes:
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
            "loss_scale": self._runtime.precision.scaler.state(),
            "groups": small.groups_of(self._optimizer),
            "scheduler": small.scheduler_of(self._scheduler),
            "rng": randomness.taken(self._device),
            **residual_numbers(self._runtime.way),
        }
        if self._runtime.collectives.rank == 0:
            if not self._names:
                self._names = small.names_of(self._model, self._runtime)
                self._members = small.members_of(self._runtime)
            document |= self._names
            for number, group in enumerate(document["groups"]):
                group["params"] = self._members.get(number, [])
        return json.dumps(document, separators=(",", ":")).encode()

    def load(self, source: StateSource) -> None:
        """Takes over a state of any stage and world size. Collective.

        Raises:
            As `take`.
        """
        self.take(source, ALL)
        self.publish()

    @torch.no_grad()
    def take(self, source: StateSource, choice: Choice) -> None:
        """Reads what this rank needs. No collectives; `publish` must follow on every rank.

        Raises:
            CheckpointMismatchError: it is another model's.
            DataError: it is damaged, or incomplete.
        """
        rank = self._runtime.collectives.rank
        document = source.small(rank)
        load_tensors(self._model, self._runtime, self._optimizer, source, choice)
        if choice.optimizer:
            keep = self._scheduler is None and not choice.options
            small.put_groups(self._optimizer, source, keep_options=keep)
        if choice.scheduler:
            small.put_scheduler(self._scheduler, document.get("scheduler"))
        if not choice.progress:
            return
        self.progress.step = document["step"]
        self.progress.micro_step = 0
        self.progress.sample_cursor = document.get("sample_cursor", 0)
        self.progress.skipped_steps = document.get("skipped_steps", 0)
        self._runtime.load_scale(document.get("loss_scale"))
        if rng := document.get("rng"):
            if document.get("rank") == rank:
                randomness.put_back(rng, self._device)
            else:
                randomness.branch_off(rng, rank, self._device)

    def publish(self) -> None:
        """Makes model weights of the main weights that were taken. Collective."""
        self._runtime.publish()

    def _sign(self) -> tuple[object, ...]:
        """Equal as long as the parts are the same memory."""
        state = self._optimizer.torch.state
        runs = tuple(
            value.data_ptr()
            for run in self._optimizer.runs
            for value in state.get(run.weight, {}).values()
            if isinstance(value, Tensor) and value.ndim
        )
        return runs, tuple(buffer.data_ptr() for _, buffer in kept_buffers(self._model))


def copy_out(
    parts: Sequence[Part], offsets: Sequence[int], block: memoryview, *, constants: bool
) -> None:
    """Copies parts to their places in a block of bytes."""
    for part, offset in zip(parts, offsets, strict=True):
        if part.constant and not constants:
            continue
        memory = part.memory
        target = torch.frombuffer(block, dtype=memory.dtype, count=memory.numel(), offset=offset)
        target.copy_(memory)
