"""Schedules the reduction of gradients over the ranks.

Every rank must launch the same collectives in the same order, even if its gradients arrive in
another order. So units are reduced in plan order, each as soon as it and all earlier units are
complete.

Rule of ordering: `plan-order` (docs/engine.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.comm.backend import Work
from rayzero.engine.errors import EngineError
from rayzero.engine.zero.gradients import GradBufferPool, GradStore


def no_backward() -> bool:
    return False


class BackwardPass:
    """The state of the running backward: one of `engine.backward()`, the script's own, or none.

    Attributes:
        collects: the reducer takes the backward's gradients.
        on_own_block: called at a block of stage 3 if no backward runs: the script has started one.
            Calls `begin`, or raises.
        on_own_gradient: called at a parameter's gradient if no backward `collects`. Calls
            `Reducer.begin_backward`, or raises.
    """

    on_own_block: Callable[[], None]
    on_own_gradient: Callable[[], None]

    def __init__(self) -> None:
        self.end()

    def begin(self, runs: Callable[[], object]) -> None:
        """Begins a backward. `runs` returns a false value once it has ended or failed."""
        self._runs = runs
        self.collects = False

    def end(self) -> None:
        self.begin(no_backward)

    @property
    def runs(self) -> bool:
        return bool(self._runs())


class _UnitProgress:
    """The progress of one unit in the current backward.

    Attributes:
        held: the gradients that have arrived, by parameter.
        missing: how many gradients have not arrived.
        collected: the store has got the unit's gradients.
    """

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
        """Gives the held gradients to the store. Missing ones count as zero."""
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

    A backward is a call of `begin_backward`, any number of `on_gradient`, then `finish_backward`.
    `wait` must be called before main gradients are read. A step may have any number of backwards
    that reduce: their gradients are added up.

    Args:
        units: gradient stores and their parameter counts, in launch order.
        buffers: the buffers from which sharded gradients are reduced in every micro-step. None if
            every rank holds full gradients, which are reduced once per step.
        overlap: continue backward while a reduction is in flight.
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
        """Uses these stores and buffers from now on. Forgets gradients in the previous stores,
        without waiting for their reductions."""
        self._units = [_UnitProgress(grads, count) for grads, count in units]
        self.buffer_pool = buffers
        # Sharded gradients have at most as many reductions in flight as there are buffers: a
        # buffer's next use waits for its reduction.
        self._in_flight: deque[Work] = deque(maxlen=buffers.max_count if buffers else None)
        self._next_unit = 0
        self._reducing = False
        self.backward.collects = False

    def begin_backward(self, *, first: bool, last: bool, factor: float = 1.0) -> None:
        """Called before a backward, whose gradients are multiplied by `factor`. `first` and `last`
        say whether it is the first or last backward of its step."""
        self.backward.collects = True
        self._first_micro_step = first
        self._reducing = last or self.buffer_pool is not None
        self._next_unit = 0
        for unit in self._units:
            unit.begin(factor)

    def on_gradient(self, number: int, index: int, param: Tensor) -> None:
        """Takes the gradient of parameter `index` of unit `number` from `param.grad`. Raises
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
        """Called after a backward. Reduces the remaining units, missing gradients as zero."""
        first = self._first_micro_step
        for unit in self._units:
            unit.missing = 0
            if self._reducing:
                continue
            if any(grad is not None for grad in unit.held) or (first and not unit.collected):
                unit.collect(add=not first)
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
        """Starts to reduce the units before the first incomplete one."""
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
    """Raises EngineError if a parameter's last hook is not the engine's. Such a hook would find no
    gradient in `param.grad`, because the reducer takes it."""
    function = getattr(last, "func", last)
    if not getattr(function, "__module__", "").startswith("rayzero.engine."):
        raise EngineError(
            "register_post_accumulate_grad_hook was called on a parameter after initialize, which "
            "takes gradients from param.grad first",
            allowed="param.register_hook(f): f gets the gradient, and may return another",
            fix="use that, or safe_get_full_grad and safe_set_full_grad between backward and step",
        )
