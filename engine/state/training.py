"""The engine's training state as named ranges and a JSON part.

Mirroring, resharding, saving and loading all use it.

Rules of ordering: `state-idle`, `whole-update` (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import nn

from rayzero.engine.data.sampling import TrainingProgress
from rayzero.engine.device import Device, get_device
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.offload.transfer import MemoryKind
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.optim.whole_params import NeedsWholeParams
from rayzero.engine.state import metadata
from rayzero.engine.state.error_feedback import residual_ranges
from rayzero.engine.state.load import LOAD_ALL, LoadOptions, load_tensors
from rayzero.engine.state.ranges import StateBlock, StateRange, pack_block, state_ranges
from rayzero.engine.state.registry import StateRegistry
from rayzero.engine.tensor_tree import storage_id
from rayzero.engine.zero.placement import Placement
from rayzero.engine.zero.runtime import ZeroRuntime


class RunningCopy(Protocol):
    """A copy of the state that runs concurrently with training."""

    def before_write(self, device: Device) -> None:
        """Makes what is enqueued on the device's current stream from now on run after the copy."""


class TrainingState:
    """One rank's view of the state. Used only by the training thread until that thread has ended.

    Attributes:
        altered: something other than an update, such as a load, may have changed the state since
            the last update.
        copied_by: the newest copy that may still be running. Between updates, forward and backward
            change only the ranges that are `volatile`.
        engine_name: the engine's name, if it was given one.
        registry: the state that the caller has registered.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: ZeroRuntime,
        optimizer: ShardedOptimizer,
        scheduler: Scheduler | None,
        progress: TrainingProgress,
    ) -> None:
        self.progress = progress
        self.device = get_device(runtime.collectives.device)
        self.altered = False
        self._constants_writes = 0
        self.copied_by: RunningCopy | None = None
        self.engine_name: str | None = None
        self.registry = StateRegistry()
        self._model = model
        self._runtime = runtime
        self._optimizer = optimizer
        self._needs_whole_params = isinstance(optimizer.torch_optimizer, NeedsWholeParams)
        self.scheduler = scheduler
        self._is_updating = False
        self._packed_signature: tuple[object, ...] | None = None
        self._own_block = pack_block([])

    def register(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], object],  # noqa: A002
        *,
        shared: bool = False,
    ) -> None:
        """Stores a value of the caller, such as EMA weights or a counter, with each copy of the
        state, and restores it when the state is loaded. Each rank has its own value.

        Args:
            get: called at the end of `step()` if that step is mirrored, and in `save`. Returns the
                value: None, numbers, text, bytes, numpy arrays, tensors, and containers of these.
                Must not call collectives.
            set: called with the saved value, once for each load of a state; immediately if a state
                is loaded already. Tensors are on the CPU. A rank that the saved run did not have
                gets rank 0's value. Not called at a fresh start, or if the state has no such name.
            shared: whether other ranks may need a rank's value. `set` then gets the list of all
                values, in the order of ranks, on every rank, also when the ranks change and no step
                is undone.

        Raises:
            EngineError: the name is registered already, or an argument has another type.
        """
        self.registry.register(name, get, set, shared=shared)

    def adopt(self, registry: StateRegistry) -> None:
        """Uses the host's registry, in which the caller may have registered state already."""
        registry.take_over(self.registry)
        self.registry = registry

    @property
    def complete_on_rank(self) -> bool:
        """Whether this rank's memory holds the complete state, as at stage 0."""
        runtime = self._runtime
        if runtime.stage.optimizer_state is not Placement.REPLICATED:
            return False
        # Each rank's shared values and error feedback residuals are in its own memory only.
        if self.registry.is_shared and runtime.collectives.world_size > 1:
            return False
        return not runtime.grad_reduction.residuals or runtime.collectives.world_size == 1

    @property
    def update_is_collective(self) -> bool:
        """Whether updates exchange data between ranks, so that an abort may change the state
        without an error. The state is then inconsistent until `confirm`."""
        runtime = self._runtime
        return (
            runtime.collectives.world_size > 1
            and runtime.stage.optimizer_state is not Placement.REPLICATED
            and self._needs_whole_params
        )

    @property
    def constants_version(self) -> int:
        """Grows with each write of state that training never changes, such as frozen weights.
        Counts writes by the engine, and those by the script that torch counts: in-place operations
        on the parameter itself, but not on its `.data`. Does not wait for the device."""
        params = self._runtime.ungrouped_params.values()
        versions = sum(param._version for param in params if not param.is_inference())
        return self._constants_writes + versions

    @property
    def consistent(self) -> bool:
        """Whether all of the state belongs to one step; false during an update."""
        return not self._is_updating

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Marks the state inconsistent during an update.

        Deliberately without `finally`: after an exception the state stays inconsistent, so that a
        half-updated step is never mirrored or saved.
        """
        self.before_write()
        self._is_updating = True
        yield
        self._is_updating = self.update_is_collective
        self.altered = False

    def revoke(self) -> None:
        """Marks the state inconsistent: the update that has ended does not count."""
        self._is_updating = True

    def confirm(self) -> None:
        """Marks the state consistent, once the host has seen the end of the update, and no abort
        before it. By any thread."""
        self._is_updating = False

    def before_write(self) -> None:
        """Prepares a change of the state, and must be called before it. What is enqueued from now
        on runs after a copy that is still running. Waits for what the engine has in flight."""
        self.altered = True
        if self.copied_by is not None:
            self.copied_by.before_write(self.device)
            self.copied_by = None
        self._runtime.wait_state()

    def before_write_of_constants(self) -> None:
        """Prepares, instead of `before_write`, a change of state that training never changes, so
        that the next mirrors copy this state, too."""
        self._constants_writes += 1
        self.before_write()

    def pack(self, *, whole: bool = False) -> StateBlock:
        """Returns this rank's share of the state as a block, or (`whole`) the complete state, with
        the caller's registered values as of now. Returns the same block for the share as long as
        the state stays in the same memory: until the optimizer has created its state, or the
        registered values need more memory. Raises EngineError for `whole` if this rank holds only
        its share; what a caller's `get` raises."""
        if self.copied_by is not None:
            # The copy reads the registered values of an earlier step.
            self.copied_by.before_write(self.device)
        self.registry.capture()
        if whole:
            if not self.complete_on_rank:
                raise EngineError("this rank holds only its share of the training state")
            return self._pack_ranges(owned=False)
        signature = self._memory_signature()
        if signature != self._packed_signature:
            self._own_block, self._packed_signature = self._pack_ranges(owned=True), signature
        return self._own_block

    def private_ranges(self) -> list[StateRange]:
        """Returns the ranges on this rank that only the engine changes, so that `altered` reports
        every change other than updates. Excludes memory that the script can write between two
        steps: buffers, model parameters, scales of quantized ones. Empty if state is in files."""
        if any(unit.state_store.memory_kind is MemoryKind.DISK for unit in self._runtime.units):
            return []
        shown = {storage_id(param) for param in self._model.parameters()}
        shown.update(map(storage_id, self._runtime.ungrouped_params.values()))
        parts = state_ranges(self._model, self._runtime, self._optimizer, owned=False)
        return [
            part for part in parts if not part.volatile and storage_id(part.memory) not in shown
        ]

    def _pack_ranges(self, *, owned: bool) -> StateBlock:
        parts = state_ranges(self._model, self._runtime, self._optimizer, owned=owned)
        residuals = residual_ranges(self._runtime, self._optimizer, owned=owned)
        parts += [replace(part, volatile=True) for part in residuals]
        return pack_block(parts + self.registry.ranges(self._runtime.collectives.rank))

    def metadata(self) -> bytes:
        """Returns the JSON part of this rank, as UTF-8."""
        return metadata.encode(self.capture_document())

    def capture_document(self) -> dict[str, Any]:
        """Returns the JSON part as of now, for `metadata.encode`."""
        document: dict[str, Any] = {
            "rank": self._runtime.collectives.rank,
            "world_size": self._runtime.collectives.world_size,
            "stage": self._runtime.stage.number,
            "step": self.progress.step,
            "sample_cursor": self.progress.sample_cursor,
            "global_batch": self.progress.global_batch,
            "micro_batch": self.progress.micro_batch,
            "skipped_steps": self.progress.skipped_steps,
            "bad_samples": self.progress.bad_samples,
            "loss_scale": self._runtime.precision.scaler.state_dict(),
            "groups": metadata.optimizer_metadata(self._optimizer),
            "scheduler": metadata.scheduler_metadata(self.scheduler),
            "rng": metadata.capture_rng(self.device.torch_device),
        }
        if self._runtime.grad_reduction.residuals:
            document["residual_factor"] = self._runtime.grad_reduction.residual_factor
        if self._runtime.collectives.rank == 0:
            if self.progress.monitor_runs:
                document["monitor_runs"] = self.progress.monitor_runs
            names, group_names = self._names
            document |= names
            for number, group in enumerate(document["groups"]):
                group["params"] = group_names.get(number, [])
        return document

    @cached_property
    def _names(self) -> tuple[dict[str, Any], dict[int, list[str]]]:
        return metadata.name_metadata(self._model, self._runtime)

    def load(self, source: StateSource) -> None:
        """Loads a state of any stage and world size. Raises as `load_from`. Collective."""
        self.load_from(source, LOAD_ALL)
        self.altered = False
        self.sync_model_weights()

    @torch.no_grad()
    def load_from(self, source: StateSource, options: LoadOptions) -> None:
        """Reads what this rank needs. Not collective; call `sync_model_weights` on every rank next.
        Raises CheckpointMismatchError if the state is of another model or optimizer; DataError if
        the state is damaged or incomplete."""
        self.before_write_of_constants()
        document = source.metadata(self._runtime.collectives.rank)
        if load_tensors(self._model, self._runtime, self._optimizer, source, options):
            keep = self.scheduler is None and not options.optimizer_options
            metadata.restore_optimizer_metadata(self._optimizer, source, keep_options=keep)
        self._load_metadata(document, source.step, options)
        if options.progress:
            self.registry.read(source, self._runtime.collectives.rank)

    @torch.no_grad()
    def recut(
        self, source: StateSource, recut_tensors: Callable[[], None], *, undoes: bool = False
    ) -> None:
        """Replaces the tensors of the state by those for other ranks, which `recut_tensors` creates
        and reads from `source`, and continues from the step of `source`. Collective. If this fails
        the state is inconsistent: a later attempt must not use the memory of this rank. The
        caller's registered values are those of the last finished step. So they are replaced only if
        they are shared, or this engine or another one (`undoes`) goes back to an earlier step."""
        with self.updating():
            self._own_block, self._packed_signature = pack_block([]), None
            recut_tensors()
            keep = self.scheduler is None
            metadata.restore_optimizer_metadata(self._optimizer, source, keep_options=keep)
            rank = self._runtime.collectives.rank
            undone = self.progress.step - source.step
            self.progress.lost_steps += undone
            if undone or undoes:
                self.registry.read(source, rank)
            else:
                self.registry.read_shared(source)
            self._load_metadata(source.metadata(rank), source.step, LOAD_ALL)
            self._constants_writes += 1
        self.confirm()
        self.sync_model_weights()

    def _load_metadata(self, document: dict[str, Any], step: int, options: LoadOptions) -> None:
        """Restores the JSON part of a saved state, except for the optimizer's."""
        rank = self._runtime.collectives.rank
        if options.scheduler:
            metadata.restore_scheduler(self.scheduler, document.get("scheduler"))
        if not options.progress:
            return
        self.progress.step = step
        self.progress.micro_step = self.progress.bad_in_step = 0
        self.progress.sample_cursor = document.get("sample_cursor", 0)
        self.progress.bad_samples = document.get("bad_samples", 0)
        self.progress.skipped_steps = document.get("skipped_steps", 0)
        if rank == 0:
            with metadata.damaged_unless_valid("monitor_runs"):
                runs = dict(document.get("monitor_runs", {}))
            self.progress.monitor_runs.update(runs)
        self._runtime.load_loss_scale(document.get("loss_scale"))
        if rng := document.get("rng"):
            with metadata.damaged_unless_valid("random-number state"):
                if document.get("rank") == rank:
                    metadata.restore_rng(rng, self.device.torch_device)
                else:
                    metadata.fork_rng(rng, rank, self.device.torch_device)
            device = self.device.torch_device
            self.progress.restore_rng = partial(
                metadata.restore_rng, metadata.capture_rng(device), device
            )

    def sync_model_weights(self) -> None:
        """Updates model weights from the loaded main weights, then calls the `set` functions of the
        caller's values, and raises what they raise. Collective."""
        self._runtime.sync_model_weights()
        self.registry.deliver()

    def _memory_signature(self) -> tuple[object, ...]:
        """Returns a value that stays equal as long as the ranges are in the same memory."""
        addresses = tuple(
            value.data_ptr()
            for shard in self._optimizer.shards
            for value in self._optimizer.state_tensors(shard).values()
        )
        buffers = tuple((name, part.data_ptr()) for name, part in self._model.named_buffers())
        return addresses, buffers, self.registry.memory_signature
