"""Parameters that no rank used in a step, such as experts to which nothing was routed.

By default their gradient is zero, and no parameter is tracked. A config may request an error
(DeepSpeed's `ignore_unused_parameters: false`) or no update (PyTorch's optimizers skip a gradient
of None). Each parameter's use is one number in the step's vote, so no rank decides alone and no
further collective is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rayzero.engine.errors import EngineError
from rayzero.engine.zero.unit import Unit

UnusedRanges = Mapping[str, Sequence[slice]]
"""The unused parameters' ranges in the flat layout of each unit, by the unit's name."""


class UnusedParams:
    """Records which parameters got a gradient in the current step.

    Args:
        units: the trainable units, equal on all ranks; none if their use is not tracked.
        is_error: a parameter that no rank used is an error.
    """

    def __init__(self, units: Sequence[Unit], *, is_error: bool) -> None:
        self._is_error = is_error
        self._params = [(unit.layout, index) for unit in units for index in range(len(unit.params))]
        self._hooked = [param for unit in units for param in unit.params]
        self._used = [0.0] * len(self._params)

    def hook(self) -> list[RemovableHandle]:
        return [
            param.register_post_accumulate_grad_hook(partial(self._mark, number))
            for number, param in enumerate(self._hooked)
        ]

    @property
    def votes(self) -> Sequence[float]:
        """1 for each parameter that this rank used, else 0. `find_unused` gets the ranks' sums."""
        return self._used

    def reset(self) -> None:
        """Begins a new step: the gradients of the last one were applied or discarded."""
        self._used = [0.0] * len(self._params)

    def find_unused(self, sums: Sequence[float]) -> UnusedRanges:
        """Returns the ranges of the parameters that no rank used. Raises EngineError, on all ranks,
        if there are any and that is an error."""
        found: dict[str, list[slice]] = {}
        names = []
        for (layout, index), used in zip(self._params, sums, strict=True):
            if not used:  # a parameter's range does not depend on the number of ranks
                found.setdefault(layout.name, []).append(layout.param_range(index))
                names.append(layout.params[index].name)
        if names and self._is_error:
            raise EngineError(
                f"{len(names)} parameters got no gradient on any rank in this step: "
                f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}",
                allowed="a loss that depends on every trainable parameter; requires_grad=False for "
                "the others",
                fix="zero_optimization.ignore_unused_parameters: true in the engine config",
            )
        return found

    def _mark(self, number: int, _: Tensor) -> None:
        self._used[number] = 1.0
