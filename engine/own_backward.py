"""A backward that the script runs itself: `loss.backward()` instead of `engine.backward(loss)`.

The backward begins where it first reaches the engine: at an output of the model's forward, a block
of stage 3, or a gradient. It ends with autograd's graph task, which then runs the callback queued
in it, on the thread and streams that autograd gives callbacks: by then every gradient's kernels are
enqueued, and the script's `backward()` has not returned. Autograd alone owns the callback, the pass
has a weak reference: if the backward fails, autograd drops its callbacks, and the pass ends.

Inside another backward (reentrant checkpoints) hooks find the pass running, and change nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rayzero.engine.errors import EngineError
from rayzero.engine.step_tracker import StepTracker
from rayzero.engine.tensor_tree import iter_tensors
from rayzero.engine.torch_private import call_after_backward, is_in_backward
from rayzero.engine.zero.runtime import ZeroRuntime

_loss_factors: list[float] = []
"""The factor by which the running `engine.backward(loss)` has multiplied the loss, besides the
weight of its micro-batch. Other engines, through whose models the loss has passed, get gradients of
that product."""


@contextmanager
def scaled_by(factor: float) -> Iterator[None]:
    """Encloses the backward of a loss that an engine multiplied by `factor` and its weight."""
    _loss_factors.append(factor)
    try:
        yield
    finally:
        _loss_factors.pop()


def factor_of_other() -> float | None:
    """Returns the factor of the engine whose `backward(loss)` is running; None if none is."""
    return _loss_factors[-1] if _loss_factors else None


class GradientPass(Protocol):
    """The training step's methods for a backward with gradients of parameters: called before and
    after it."""

    def begin_own(self) -> None: ...

    def finish_own(self) -> None: ...

    def abandon_own(self) -> None: ...


class OwnBackward:
    """Follows the backwards that the script runs itself: one at a time, on autograd's threads,
    while the script waits.

    A backward without gradients of parameters (`torch.autograd.grad` of an input) gathers blocks,
    but is not part of the step.
    """

    def __init__(self, runtime: ZeroRuntime, step: GradientPass) -> None:
        self._runtime = runtime
        self._step = step
        self._backward = runtime.reducer.backward
        self._backward.on_own_block = self._open
        self._backward.on_own_gradient = self._on_gradient
        self._has_gradients = False

    def watch(self, output: Any) -> None:
        """Notices a backward at the output of the model's forward, before an activation checkpoint
        in the model begins a backward of its own."""
        if torch.is_grad_enabled():
            for node in {tensor.grad_fn for tensor in iter_tensors(output)}:
                if node is not None:
                    node.register_prehook(self._open)

    def abandon_failed(self) -> None:
        """Forgets a backward that failed. Called where no backward of the script can be running, or
        where another backward begins."""
        ended = not is_in_backward() or not self._backward.runs
        if self._has_gradients and ended:
            self.abandon()
            self._step.abandon_own()

    def abandon(self) -> None:
        """Ends the pass, and forgets its gradients. Called when no backward runs."""
        self._runtime.end_backward()
        self._has_gradients = False

    def _open(self, _: Any = None) -> None:
        if self._backward.runs:
            return
        self.abandon_failed()

        def end() -> None:
            self._end()

        self._runtime.begin_backward(weakref.ref(end))
        call_after_backward(end)

    def _on_gradient(self) -> None:
        if torch.is_grad_enabled():
            raise EngineError(
                "backward(create_graph=True) reached parameters: their gradients have a graph",
                allowed="gradients of parameters without a graph",
                fix="use torch.autograd.grad(..., create_graph=True) of inputs, at stages 0 to 2",
            )
        self._open()
        self._step.begin_own()
        self._has_gradients = True

    def _end(self) -> None:
        """Called when autograd has finished the backward."""
        has_gradients = self._has_gradients
        self.abandon()
        if has_gradients:
            self._step.finish_own()


_trackers: WeakKeyDictionary[nn.Module, weakref.ref[StepTracker]] = WeakKeyDictionary()


def follow_zero_grad(model: nn.Module, tracker: StepTracker) -> None:
    """Makes the model's own `zero_grad()` call the engine's, too: for gradients from another
    engine's loss, as in a GAN."""
    _trackers[model] = weakref.ref(tracker)
    # A bound method: that of a copied or unpickled model is bound to the copy, which has no engine.
    model.__dict__["zero_grad"] = MethodType(zero_grad, model)


def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    """Calls the module's own `zero_grad`, then the engine's."""
    type(module).zero_grad(module, set_to_none)
    reference = _trackers.get(module)
    if reference is not None and (tracker := reference()) is not None:
        tracker.zero_grad()


def check_loss(loss: Any, call: str) -> None:
    """Raises EngineError unless `loss` is a scalar with a graph."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    seen = type(loss).__name__
    if isinstance(loss, Tensor):
        graph = "with" if loss.requires_grad else "without"
        seen = f"tensor of shape {tuple(loss.shape)} {graph} a graph"
    raise EngineError(
        f"{call}() got a {seen}",
        allowed="a scalar loss computed by engine(...) with gradients enabled",
    )
