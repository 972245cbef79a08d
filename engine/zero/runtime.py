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
from rayzero.engine.session import Wishes
from rayzero.engine.zero.culprit import overflow_error
from rayzero.engine.zero.gatherer import Gatherer
from rayzero.engine.zero.grads import GradSlots
from rayzero.engine.zero.placement import Collective, Stage
from rayzero.engine.zero.reducer import Reducer
from rayzero.engine.zero.slots import WeightSlots
from rayzero.engine.zero.unit import Unit
from rayzero.engine.zero.vote import Verdict, take_vote
from rayzero.engine.zero.ways import GradientWay


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
    loose: list[Tensor]
    way: GradientWay
    reducer: Reducer
    grad_slots: GradSlots | None
    gatherer: Gatherer | None
    weight_slots: WeightSlots | None
    hooks: list[RemovableHandle]

    @contextmanager
    def backward_pass(self, *, first: bool, last: bool) -> Iterator[None]:
        """Around autograd's backward of one micro-step; `first` and `last` of its step."""
        self.reducer.begin(first=first, last=last)
        if self.gatherer is not None:
            self.gatherer.begin_backward()
        try:
            yield
        finally:
            if self.gatherer is not None:
                self.gatherer.end_backward()
        self.reducer.finish()
        self.collectives.settle()

    def vote(self, loss: Tensor, factor: float, wishes: Wishes) -> Verdict:
        """Waits for the gradients' sums, then agrees on norm and loss. Collective.

        Args:
            factor: what the sums are still to be multiplied by.
            wishes: what else this rank wants to agree on.

        Raises:
            EngineError: a gradient is not finite, and no other loss scale can help.
        """
        self.reducer.wait()
        parts = [unit.grads.counted(unit.shard) for unit in self.units if unit.grads is not None]
        verdict = take_vote(parts, loss, factor, self.collectives, wishes)
        scaler = self.precision.scaler
        if scaler.exhausted and not verdict.finite:
            raise overflow_error(self.units, self.collectives, scaler.value)
        return verdict

    def scale_after(self, *, overflow: bool) -> None:
        """The loss scale after a step; what compression keeps back goes with it."""
        before = self.precision.scaler.value
        self.precision.scaler.after(overflow=overflow)
        self._follow_scale(before)

    def load_scale(self, state: Mapping[str, Any] | None) -> None:
        """The loss scale that `Scaler.state` gave; what compression keeps back goes with it."""
        before = self.precision.scaler.value
        self.precision.scaler.load(state)
        self._follow_scale(before)

    def _follow_scale(self, before: float) -> None:
        now = self.precision.scaler.value
        if now != before:
            self.way.rescale(now / before)

    @torch.no_grad()
    def publish(self) -> None:
        """After the local update: every rank's model weights follow all ranks' main weights."""
        gather = self.stage.weight_collective is Collective.ALL_GATHER
        pending = []
        for unit in self.units:
            if unit.main is not None:
                unit.home.publish(unit.main, unit.weights.part(unit.owned))
                pending.append(unit.weights.after_update(self.collectives, gather=gather))
        for one in pending:
            one.wait()
        if self.gatherer is not None:
            self.gatherer.invalidate()

    def close(self) -> None:
        """Takes the hooks off the model, and lets go of threads and files."""
        self.offload.close()
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()
