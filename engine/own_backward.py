"""A backward that the script runs itself: `loss.backward()` instead of `engine.backward(loss)`.

It begins where it first reaches the engine: an output of the model's forward, a block of stage 3,
or a gradient. It ends with autograd's graph task, which then runs the callback queued in it, on the
thread and streams that autograd gives callbacks: every gradient's kernels are enqueued by then, and
the script's `backward()` has not returned. Autograd alone owns the callback: if the backward fails,
it drops its callbacks, and the pass, which has a weak reference only, ends.

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

_put_in: list[float] = []
"""Of the `engine.backward(loss)` that runs: what it has multiplied the loss by, besides the weight
of its micro-batch. Other engines whose models the loss has gone through get gradients of that."""


@contextmanager
def scaled_by(factor: float) -> Iterator[None]:
    """Encloses the backward of a loss that an engine multiplied by `factor` and its weight."""
    _put_in.append(factor)
    try:
        yield
    finally:
        _put_in.pop()


def factor_of_other() -> float | None:
    """The factor of another engine whose loss brings gradients; None if there is none."""
    return _put_in[-1] if _put_in else None


class GradientPass(Protocol):
    """The step's part in a backward that brings gradients: calls before and after it."""

    def begin_own(self) -> None: ...

    def finish_own(self) -> None: ...

    def abandon_own(self) -> None: ...


class OwnBackward:
    """Follows the backwards that the script runs itself. One at a time, on autograd's threads while
    the script waits for it.

    A backward without gradients of parameters (`torch.autograd.grad` of an input) gathers blocks,
    and is none of the step's.
    """

    def __init__(self, runtime: ZeroRuntime, step: GradientPass) -> None:
        self._runtime = runtime
        self._step = step
        self._backward = runtime.reducer.backward
        self._backward.on_own_block = self._open
        self._backward.on_own_gradient = self._on_gradient
        self._has_gradients = False

    def watch(self, output: Any) -> None:
        """Notices a backward from what the model's forward has returned, before any checkpoint in
        the model begins one of its own."""
        if torch.is_grad_enabled():
            for node in {it.grad_fn for it in iter_tensors(output)}:
                if node is not None:
                    node.register_prehook(self._open)

    def abandon_failed(self) -> None:
        """Forgets a backward that failed. Called where none of the script can be running, or where
        another one begins."""
        ended = not is_in_backward() or not self._backward.runs
        if self._has_gradients and ended:
            self.abandon()
            self._step.abandon_own()

    def abandon(self) -> None:
        """No backward runs: what one has left is gone with the step."""
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
        """Autograd has finished the backward."""
        has_gradients = self._has_gradients
        self.abandon()
        if has_gradients:
            self._step.finish_own()


_trackers: WeakKeyDictionary[nn.Module, weakref.ref[StepTracker]] = WeakKeyDictionary()


def follow_zero_grad(model: nn.Module, tracker: StepTracker) -> None:
    """Makes the model's own `zero_grad()` call the engine's, too: for gradients that another
    engine's loss has brought, as in a GAN."""
    _trackers[model] = weakref.ref(tracker)
    # Bound to the model: copying or pickling the model binds the copy's, which has no engine.
    model.__dict__["zero_grad"] = MethodType(zero_grad, model)


def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    """nn.Module.zero_grad, and the engine's."""
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
