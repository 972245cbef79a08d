"""Where a step ends: the accumulation boundary, and how many samples a step has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rayzero.engine.config import BatchSizes
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.sampling import TrainingProgress
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.settings import Settings
from rayzero.engine.zero.runtime import ZeroRuntime


class GradientAccumulation:
    """The part of `Engine` that decides when gradients are summed and used."""

    progress: TrainingProgress
    training_dataloader: StepLoader | None
    _runtime: ZeroRuntime
    _settings: Settings
    _has_gradients: bool
    _sync_gradients: bool
    _boundary_override: bool | None
    _step_applied: bool

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-step at hand is the last of its step."""
        if self._boundary_override is not None:
            return self._boundary_override
        return self.progress.micro_step == self._settings.batches.micro_steps - 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says of the next forward and backward whether they are the last of their step.

        From then on the script decides, by calling it again; `step` does nothing where it was
        False, and need not be called there.
        """
        self._boundary_override = bool(is_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, `backward` only accumulates; call `step` after one more backward outside."""
        self._sync_gradients = False
        try:
            yield
        finally:
            self._sync_gradients = True

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights: not inside a step, nor if skipped."""
        return self._step_applied

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next step on, so many samples a step, in micro-batches of the same size.

        Raises:
            ConfigError: it is no multiple of micro-batch and ranks.
            EngineError: in the middle of a step, or the engine has a loader, whose order of
                samples depends on it.
        """
        micro, world_size = self._settings.batches.micro_batch, self._world_size
        if train_batch_size < 1 or train_batch_size % (micro * world_size):
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): not a multiple of the micro-batch "
                f"{micro} x {world_size} ranks",
                fix="another train_batch_size, or set_train_micro_batch_size first",
            )
        self._set_batch_sizes(micro, train_batch_size // (micro * world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """From the next step on, so many samples a micro-batch, in as many micro-steps as now.

        Raises:
            As `set_train_batch_size`.
        """
        if micro_batch_size < 1:
            raise ConfigError(f"set_train_micro_batch_size({micro_batch_size})", allowed=">= 1")
        self._set_batch_sizes(micro_batch_size, self._settings.batches.micro_steps)

    @property
    def _world_size(self) -> int:
        return self._runtime.collectives.world_size

    def _set_batch_sizes(self, micro_batch: int, micro_steps: int) -> None:
        if self._has_gradients or self.training_dataloader is not None:
            seen = "in the middle of a step" if self._has_gradients else "with a loader"
            raise EngineError(
                f"the batch size cannot be changed {seen}",
                allowed="between two steps, with batches of your own",
                fix="train_batch_size in the config",
            )
        total = micro_batch * micro_steps * self._world_size
        share = 1.0 / (micro_steps * self._world_size)
        sizes = BatchSizes(total, micro_batch, micro_steps)
        self._settings = replace(self._settings, batches=sizes, micro_batch_weight=share)
        self.progress.global_batch, self.progress.micro_batch = total, micro_batch
        self.progress.micro_batch_weight = share
