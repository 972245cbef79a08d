"""Schedules the reduction of gradients over the ranks.

Every rank must launch the same collectives in the same order, even if its gradients arrive in
another: units are reduced in plan order, each as soon as it and all earlier ones are complete.

Rule of ordering: `plan-order` (docs/engine.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.comm.backend import ReduceOp, Work
from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.flat_layout import UnitLayout
from rayzero.engine.zero.gradients import GradBufferPool, GradStore


def no_backward() -> bool:
    return False


class BackwardPass:
    """The running backward, if there is one: `engine.backward()`, or the script's own.

    Attributes:
        collects: it has reached gradients of parameters, which the reducer takes.
        on_own_block, on_own_gradient: called where a backward that was not begun reaches a block of
            stage 3, or a gradient: it is begun in them, or they raise.
    """

    on_own_block: Callable[[], None]
    on_own_gradient: Callable[[], None]

    def __init__(self) -> None:
        self.end()

    def begin(self, runs: Callable[[], object]) -> None:
        """`runs` is falsy from the backward's end on, also where it failed."""
        self._runs = runs
        self.collects = False

    def end(self) -> None:
        self.begin(no_backward)

    @property
    def runs(self) -> bool:
        return bool(self._runs())


class _UnitProgress:
    """One unit in the current backward: the gradients that have arrived, by parameter, and how
    many have not. `collected`: the store has got them."""

    def __init__(self, grads: GradStore, param_count: int) -> None:
        self.grads = grads
        self.param_count = param_count
        self.begin(1.0)

    def begin(self, factor: float) -> None:
        self._factor = factor
        self.held: list[Tensor | None] = [None] * self.param_count
        self.missing = self.param_count
        self.collected = False

    def collect(self, *, add: bool) -> None:
        """Hands over what has arrived; what has not counts as zero."""
        held, self.held = self.held, []
        given = [grad for grad in held if grad is not None] if self._factor != 1.0 else []
        if given:
            torch._foreach_mul_(given, self._factor)
        self.grads.collect(held, add=add or self.collected)
        self.missing, self.collected = 0, True

    def merge(self, index: int, grad: Tensor) -> None:
        """Adds a further gradient of a parameter, in the precision of main gradients."""
        self.held = self.held or [None] * self.param_count
        held = self.held[index]
        self.held[index] = grad if held is None else held.to(self.grads.dtype).add_(grad)


class Reducer:
    """Receives gradients from autograd's hooks and reduces them over the ranks.

    One backward is `begin_backward`, any number of `on_gradient`, `finish_backward`. `wait` must
    be called before main gradients are read. A step may have any number of backwards that reduce:
    sums are added to.

    Args:
        units: gradient stores and their parameter counts, in launch order.
        buffers: from which gradients are reduced if they are sharded, every micro-step; None if
            every rank holds full gradients, which are reduced once per step.
        overlap: continue backward while a reduction is in flight.

    Attributes:
        backward: its `on_own_gradient` is called at a gradient outside of these calls, before it is
            taken: it calls `begin_backward`, or raises.
    """

    def __init__(
        self,
        units: Sequence[tuple[GradStore, int]],
        buffers: GradBufferPool | None,
        *,
        overlap: bool,
    ) -> None:
        self._overlap = overlap
        self._first_micro_step = True
        self.backward = BackwardPass()
        self.connect(units, buffers)

    def connect(
        self, units: Sequence[tuple[GradStore, int]], buffers: GradBufferPool | None
    ) -> None:
        """Uses these stores and buffers from now on. Gradients in the earlier ones are forgotten,
        and their reductions are not waited for."""
        self._units = [_UnitProgress(grads, count) for grads, count in units]
        self.buffer_pool = buffers
        # Of sharded gradients no more than there are buffers: older ones were waited for.
        self._in_flight: deque[Work] = deque(maxlen=buffers.max_count if buffers else None)
        self._next_unit = 0
        self._reducing = False
        self.backward.collects = False

    def begin_backward(self, *, first: bool, last: bool, factor: float = 1.0) -> None:
        """Called before a backward; `first` and `last` of its step. Its gradients are multiplied by
        `factor`."""
        self.backward.collects = True
        self._first_micro_step = first
        self._reducing = last or self.buffer_pool is not None
        self._next_unit = 0
        for unit in self._units:
            unit.begin(factor)

    def on_gradient(self, number: int, index: int, param: Tensor) -> None:
        """Parameter `index` of a unit has a gradient of this micro-step in `.grad`. Raises
        EngineError if the unit has been reduced already."""
        grad = param.grad
        if grad is None:
            return
        if not (self.backward.runs and self.backward.collects):
            self.backward.on_own_gradient()
        hooks = param._post_accumulate_grad_hooks
        if hooks is not None and len(hooks) > 1:
            _refuse_later_hook(next(reversed(hooks.values())))
        param.grad = None
        unit = self._units[number]
        if unit.collected or unit.held[index] is not None:
            self._check_not_reduced(number)
            unit.merge(index, grad)
            return
        unit.held[index] = grad
        unit.missing -= 1
        if not unit.missing:
            if self._reducing:
                self._launch_ready()
            else:
                unit.collect(add=not self._first_micro_step)

    def finish_backward(self) -> None:
        """Called after a backward: treats missing gradients as zero, and reduces the remaining
        units."""
        for unit in self._units:
            unit.missing = 0
            if not self._reducing and any(grad is not None for grad in unit.held):
                unit.collect(add=not self._first_micro_step)
            elif not self._reducing and self._first_micro_step and not unit.collected:
                unit.collect(add=False)
        if self._reducing:
            self._launch_ready()
        self.backward.collects = False

    def discard(self) -> None:
        """Returns when the gradients of unfinished steps may be overwritten."""
        self.backward.collects = False
        self.wait()
        for unit in self._units:
            unit.grads.release()

    def wait(self) -> None:
        """Returns when every started reduction has reached the main gradients."""
        while self._in_flight:
            self._in_flight.popleft().wait()

    def _launch_ready(self) -> None:
        """Starts to reduce the units that are complete, up to the first that is not."""
        first = self._first_micro_step
        while self._next_unit < len(self._units):
            unit = self._units[self._next_unit]
            if unit.missing:
                return
            unit.collect(add=not first)
            for part in range(unit.grads.part_count):
                self._in_flight.append(unit.grads.reduce(part, first=first))
                if not self._overlap:
                    self.wait()
            self._next_unit += 1

    def _check_not_reduced(self, number: int) -> None:
        if self._reducing and number < self._next_unit:
            raise EngineError(
                "a second gradient of one parameter arrived after its unit was reduced",
                allowed="one gradient for each parameter and backward",
                fix="use torch.utils.checkpoint with use_reentrant=False around shared modules",
            )


def _refuse_later_hook(last: Any) -> None:
    """Raises EngineError if a parameter's last hook is not the engine's: it would find no `grad`,
    which is the engine's from here on."""
    function = getattr(last, "func", last)
    if not getattr(function, "__module__", "").startswith("rayzero.engine."):
        raise EngineError(
            "register_post_accumulate_grad_hook was called on a parameter after initialize, which "
            "takes gradients from param.grad first",
            allowed="param.register_hook(f): f gets the gradient, and may return another",
            fix="use that, or safe_get_full_grad and safe_set_full_grad between backward and step",
        )


@dataclass(frozen=True)
class UnitGradSpec:
    """One trainable unit's main gradients.

    Attributes:
        dtype: of the main gradients.
        shard: this rank's range of the flat layout.
        replicated: every rank gets all reduced gradients, not its shard only.
    """

    layout: UnitLayout
    dtype: torch.dtype
    shard: slice
    replicated: bool

    @property
    def name(self) -> str:
        return self.layout.name


@dataclass(frozen=True)
class ErrorFeedback:
    """One unit's residuals of compression on this rank: part of the training state.

    Attributes:
        local: of this rank's gradients, in the unit's flat layout.
        reduced: of the reduced shard, where that is compressed too; else None.
    """

    unit: UnitGradSpec
    local: Tensor
    reduced: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.local] if self.reduced is None else [self.local, self.reduced]

    def reset(self) -> None:
        """Discards residuals, which may not be finite."""
        for residual in self.tensors:
            residual.zero_()

    def scale(self, factor: float) -> None:
        """Adapts the residuals to gradients of another scale."""
        for residual in self.tensors:
            residual.mul_(factor)


class GradReduction:
    """How a run's gradients are communicated: uncompressed in this class, quantized or as low-rank
    factors in those of `compression`.

    Args:
        factor: the initial `residual_factor`.

    Attributes:
        residuals: of the units with error feedback.
        residual_factor: residuals times this are in units of the mean gradient. It depends on the
            loss scale, and on the world size where gradients are averaged after the reduction.
    """

    def __init__(self, collectives: Collectives, factor: float) -> None:
        self.residuals: list[ErrorFeedback] = []
        self.residual_factor = factor
        self._collectives = collectives

    def reduce_op(self, unit: UnitGradSpec) -> ReduceOp:
        """The operation that reduces a unit's gradients. Called once per unit."""
        return self._collectives

    def replicated_state(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of training state that is equal on all ranks."""
        yield from ()

    def clip_limit(self, limit: float) -> float:
        """The norm that this step's gradients are clipped to, where the config says `limit`; 0: not
        at all."""
        return limit

    def discard_residuals(self) -> None:
        """A step was skipped: its gradient, which may not be finite, must not be applied later."""
        for feedback in self.residuals:
            feedback.reset()

    def rescale(self, ratio: float) -> None:
        """The loss scale, and so all later gradients, have been multiplied by `ratio`: a power of
        two, so that nothing is rounded."""
        for feedback in self.residuals:
            feedback.scale(ratio)
        self.residual_factor /= ratio

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the payload buffers."""
        return 0
