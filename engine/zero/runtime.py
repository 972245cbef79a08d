"""The parts of ZeRO on one rank: units, reduction, unsharding, offload.

Rule of ordering: `pending-exchanges` (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.comm.backend import Work
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.errors import EngineError
from rayzero.engine.offload.plan import Offload
from rayzero.engine.precision.loss_scale import LossScaler
from rayzero.engine.precision.policy import Precision
from rayzero.engine.session import StepRequests
from rayzero.engine.zero.grad_reduction import GradReduction
from rayzero.engine.zero.parameters import ReplicatedWeights
from rayzero.engine.zero.placement import Collective, Stage
from rayzero.engine.zero.reducer import Reducer, no_backward
from rayzero.engine.zero.step_vote import StepVote, nonfinite_error, vote_on_step
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.unshard import UnshardScheduler
from rayzero.engine.zero.unused_params import UnusedParams, UnusedRanges


@dataclass(eq=False)
class ZeroRuntime:
    """All parts of ZeRO between the model's hooks and the local optimizer. Lives as long as the
    engine. `recut` replaces the parts that depend on the number of ranks when that changes.

    Attributes:
        units: the units in launch order.
        ungrouped_params: tensors that are in no unit, by name: frozen parameters if weights are
            replicated, and tensors that belong to quantized parameters.
        unshard_scheduler: without blocks if model weights are replicated.
        unused_params: without parameters if an unused one has a gradient of zero.
    """

    stage: Stage
    precision: Precision
    collectives: Collectives
    units: list[Unit]
    offload: Offload
    ungrouped_params: dict[str, Tensor]
    grad_reduction: GradReduction
    reducer: Reducer
    unshard_scheduler: UnshardScheduler
    unused_params: UnusedParams
    hooks: list[RemovableHandle]

    def check_params(self, model: nn.Module) -> None:
        """Raises EngineError if trainable parameters were added to the model after `initialize`.
        They would differ between ranks, and be in no step and no checkpoint."""
        known = set(map(id, self.ungrouped_params.values()))
        known.update(id(param) for unit in self.units for param in unit.params)
        added = [
            name
            for name, param in model.named_parameters()
            if param.requires_grad and param.numel() and id(param) not in known
        ]
        if added:
            names = ", ".join(added[:3]) + ", ..." * (len(added) > 3)
            raise EngineError(
                f"the model has trainable parameters that it had not at `initialize`: {names}",
                allowed="the parameters at `initialize`; later ones with requires_grad=False",
                fix="attach modules and replace parameters before `initialize`",
            )

    @contextmanager
    def backward_pass(self, *, first: bool, last: bool) -> Iterator[None]:
        """Encloses autograd's backward of a micro-step, which may be its step's first or last."""
        self.begin_backward(lambda: True)
        self.reducer.begin_backward(first=first, last=last)
        try:
            yield
        finally:
            self.end_backward()
        self.finish_backward()

    def begin_backward(self, runs: Callable[[], object]) -> None:
        """See `BackwardPass.begin`."""
        self.reducer.backward.begin(runs)
        self.unshard_scheduler.change_pass()

    def end_backward(self) -> None:
        self.begin_backward(no_backward)

    def finish_backward(self) -> None:
        """Called after autograd's part of a backward. Reduces the remaining gradients."""
        self.reducer.finish_backward()
        self.collectives.progress_pending()

    def reduce_accumulated(self) -> None:
        """Reduces accumulated gradients, as if another backward, with zeros, was the last one."""
        if self.reducer.buffer_pool is None:
            self.reducer.begin_backward(first=False, last=True)
            self.finish_backward()

    def vote(self, loss: Tensor, factor: float, requests: StepRequests) -> StepVote:
        """Waits for the reduced gradients, then agrees on norm, loss and requests with the other
        ranks. Collective. `factor` is the one by which the gradients are still to be multiplied.
        Raises EngineError if a gradient is not finite and the loss scale cannot be lowered."""
        self.reducer.wait()
        parts = (part for unit in self.units if (part := unit.shard_grads()) is not None)
        used = self.unused_params.votes
        vote = vote_on_step(parts, loss, factor, self.collectives, requests, used)
        scaler = self.precision.scaler
        if scaler.cannot_decrease and not vote.finite:
            raise nonfinite_error(self.units, self.collectives, scaler.value)
        return vote

    def take_unused(self, vote: StepVote) -> UnusedRanges:
        """Returns the ranges of unused parameters, which this step's update must not change, and
        resets the record of use. Raises EngineError if unused parameters are an error."""
        self.unused_params.reset()
        return self.unused_params.find_unused(vote.used) if vote.finite else {}

    def discard_gradients(self) -> None:
        """Forgets an unfinished step's gradients. Returns when their memory may be overwritten."""
        self.reducer.discard()
        self.unused_params.reset()

    def update_loss_scale(self, *, overflow: bool) -> None:
        with self._rescaling_residuals() as scaler:
            scaler.update(overflow=overflow)

    def load_loss_scale(self, state: Mapping[str, Any] | None) -> None:
        with self._rescaling_residuals() as scaler:
            scaler.load_state_dict(state)

    @contextmanager
    def _rescaling_residuals(self) -> Iterator[LossScaler]:
        """Encloses a change of the loss scale, and adapts the residuals, which are scaled too."""
        scaler = self.precision.scaler
        before = scaler.value
        yield scaler
        if scaler.value != before:
            self.grad_reduction.rescale(scaler.value / before)

    @torch.no_grad()
    def sync_model_weights(self) -> None:
        """Copies the updated main weights of all ranks to the model weights of all ranks."""
        gather = self.stage.weight_collective is Collective.ALL_GATHER
        pending: list[Work] = []
        for unit in reversed(self.units):  # roughly the order in which forward uses them
            if unit.main_weights is not None:
                owned = unit.weights.owned_range(unit.owned)
                unit.state_store.copy_to_model(unit.main_weights, owned)
                if gather and isinstance(unit.weights, ReplicatedWeights):
                    pending.append(unit.weights.gather_updates(self.collectives))
        for work in pending:
            work.wait()
        self.unshard_scheduler.invalidate()

    def wait_state(self) -> None:
        """Returns when the state may be written: no gather of weights and no copy from host memory
        is in flight. State on the device may be written by work that is enqueued from now on."""
        self.unshard_scheduler.wait_prefetched()
        if self.offload.separate_memory:
            self.offload.transfer.wait_h2d()

    def close(self) -> None:
        """Removes the model's hooks, stops threads and closes files."""
        self.offload.close()
        self.remove_hooks()

    def remove_hooks(self) -> None:
        """Removes the model's hooks, so that another engine may take the model."""
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()
