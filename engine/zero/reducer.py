"""When gradients are summed over the ranks.

Every rank must launch the same collectives in the same order, whatever order its own gradients
arrive in: units are reduced in plan order, each as soon as it and all before it are complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import nn

from rayzero.engine.comm.collectives import Pending, Sums
from rayzero.engine.errors import EngineError
from rayzero.engine.zero.grads import GradSlots, GradStore


class _Arrivals:
    """Which of one unit's gradients the micro-step at hand has brought."""

    def __init__(self, grads: GradStore, count: int, sums: Sums) -> None:
        self.grads = grads
        self.sums = sums
        self._taken = [False] * count
        self.missing = count

    def restart(self) -> None:
        self.missing = len(self._taken)
        self._taken = [False] * self.missing

    def note(self, index: int) -> bool:
        """Whether this is the parameter's first gradient of the micro-step."""
        fresh = not self._taken[index]
        self._taken[index] = True
        self.missing -= fresh
        return fresh

    def absent(self) -> list[int]:
        return [index for index, taken in enumerate(self._taken) if not taken]


class Reducer:
    """Takes gradients from autograd's hooks and sums them over the ranks.

    One micro-step is `begin`, any number of `take`, `finish`. `wait` returns when every sum that
    was started has arrived; it must be called before main grads are read.

    Args:
        units: the gradient stores, parameter counts and ways to other ranks, in launch order.
        slots: where gradients pass through when they rest sharded, and so are summed every
            micro-step; None when they rest whole, and are summed once a step.
        overlap: let backward go on while a sum is under way.
    """

    def __init__(
        self,
        units: Sequence[tuple[GradStore, int, Sums]],
        slots: GradSlots | None,
        *,
        overlap: bool,
    ) -> None:
        self._units = [_Arrivals(grads, count, sums) for grads, count, sums in units]
        self._slots = slots
        self._overlap = overlap
        self._in_flight: deque[tuple[Pending, GradStore]] = deque()
        self._next = 0
        self._first = True
        self._reducing = False

    def begin(self, *, first: bool, last: bool) -> None:
        """A micro-step's backward is about to run; `first` and `last` say where in its step."""
        self._first = first
        self._reducing = last or self._slots is not None
        self._next = 0
        for unit in self._units:
            unit.restart()

    def take(self, unit: int, index: int, param: nn.Parameter) -> None:
        """Parameter `index` of `unit` has a gradient of this micro-step in `.grad`.

        Raises:
            EngineError: the unit has been summed already.
        """
        grad, param.grad = param.grad, None
        if grad is None:
            return
        arrivals = self._units[unit]
        fresh = arrivals.note(index)
        if self._reducing and unit < self._next:
            raise EngineError(
                "a second gradient of one parameter arrived after its unit was reduced",
                allowed="one gradient for each parameter and backward",
                fix="use torch.utils.checkpoint with use_reentrant=False around shared modules",
            )
        self._make_room(arrivals.grads)
        arrivals.grads.take(index, grad, add=not (fresh and self._afresh))
        if not arrivals.missing:
            self._launch_complete()

    def finish(self) -> None:
        """Backward is over: gradients that did not arrive are zero, and what is left is started."""
        for arrivals in self._units:
            for index in arrivals.absent():
                if self._afresh:
                    self._make_room(arrivals.grads)
                    arrivals.grads.take_nothing(index)
                arrivals.note(index)
            self._launch_complete()

    def wait(self) -> None:
        """Returns when every sum started so far is in the main grads."""
        while self._in_flight:
            self._wait_oldest()

    @property
    def _afresh(self) -> bool:
        """Whether a micro-step's gradients replace what its buffers hold."""
        return self._first or self._slots is not None

    def _launch_complete(self) -> None:
        if not self._reducing:
            return
        while self._next < len(self._units) and not self._units[self._next].missing:
            unit = self._units[self._next]
            pending = unit.grads.reduce(unit.sums, first=self._first)
            self._in_flight.append((pending, unit.grads))
            self._next += 1
            if not self._overlap:
                self.wait()

    def _make_room(self, grads: GradStore) -> None:
        """Frees a slot by waiting for the oldest sum under way, if one is needed and that helps."""
        if self._slots is None or not grads.needs_slot:
            return
        while self._slots.exhausted and self._in_flight:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        pending, grads = self._in_flight.popleft()
        pending.wait()
        grads.reduced(pending)
