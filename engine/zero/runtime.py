"""The moving parts of ZeRO on one rank, owned together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.offload.plan import Offload
from rayzero.engine.precision.policy import Precision
from rayzero.engine.session import StepRequests
from rayzero.engine.zero.gather_buffers import GatherBuffers
from rayzero.engine.zero.gradients import GradBufferPool
from rayzero.engine.zero.placement import Collective, Stage
from rayzero.engine.zero.reducer import GradReduction, Reducer
from rayzero.engine.zero.step_vote import StepVote, nonfinite_error, vote_on_step
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.unshard import UnshardScheduler


@dataclass(frozen=True)
class ZeroRuntime:
    """Everything between the model's hooks and the local optimizer.

    Attributes:
        units: in launch order.
        loose: parameters in no unit: frozen ones, where weights are replicated.
        way: how gradients travel.
        gatherer: None when model weights are replicated.
    """

    stage: Stage
    precision: Precision
    collectives: Collectives
    units: list[Unit]
    offload: Offload
    ungrouped_params: list[Tensor]
    grad_reduction: GradReduction
    reducer: Reducer
    grad_buffers: GradBufferPool | None
    unshard_scheduler: UnshardScheduler | None
    gather_buffers: GatherBuffers | None
    hooks: list[RemovableHandle]

    @contextmanager
    def backward_pass(self, *, first: bool, last: bool) -> Iterator[None]:
        """Around autograd's backward of one micro-step; `first` and `last` of its step."""
        self.reducer.begin_backward(first=first, last=last)
        if self.unshard_scheduler is not None:
            self.unshard_scheduler.begin_backward()
        try:
            yield
        finally:
            if self.unshard_scheduler is not None:
                self.unshard_scheduler.end_backward()
        self.reducer.finish_backward()
        self.collectives.progress_pending()

    def vote(self, loss: Tensor, factor: float, wishes: StepRequests) -> StepVote:
        """Waits for the gradients' sums, then agrees on norm and loss. Collective.

        Args:
            factor: what the sums are still to be multiplied by.
            wishes: what else this rank wants to agree on.

        Raises:
            EngineError: a gradient is not finite, and no other loss scale can help.
        """
        self.reducer.wait()
        parts = [unit.grads.norm_part(unit.shard) for unit in self.units if unit.grads is not None]
        verdict = vote_on_step(parts, loss, factor, self.collectives, wishes)
        scaler = self.precision.scaler
        if scaler.cannot_decrease and not verdict.finite:
            raise nonfinite_error(self.units, self.collectives, scaler.value)
        return verdict

    def update_loss_scale(self, *, overflow: bool) -> None:
        """The loss scale after a step; what compression keeps back goes with it."""
        before = self.precision.scaler.value
        self.precision.scaler.update(overflow=overflow)
        self._rescale_residuals(before)

    def load_loss_scale(self, state: Mapping[str, Any] | None) -> None:
        """The loss scale that `LossScaler.state` gave; what compression keeps back goes with it."""
        before = self.precision.scaler.value
        self.precision.scaler.load_state_dict(state)
        self._rescale_residuals(before)

    def _rescale_residuals(self, before: float) -> None:
        now = self.precision.scaler.value
        if now != before:
            self.grad_reduction.rescale(now / before)

    @torch.no_grad()
    def sync_model_weights(self) -> None:
        """After the local update: every rank's model weights follow all ranks' main weights."""
        gather = self.stage.weight_collective is Collective.ALL_GATHER
        pending = []
        for unit in self.units:
            if unit.main_weights is not None:
                unit.state_store.copy_to_model(
                    unit.main_weights, unit.weights.owned_range(unit.owned)
                )
                pending.append(unit.weights.gather_updates(self.collectives, gather=gather))
        for one in pending:
            one.wait()
        if self.unshard_scheduler is not None:
            self.unshard_scheduler.invalidate()

    def close(self) -> None:
        """Takes the hooks off the model, and lets go of threads and files."""
        self.offload.close()
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()
