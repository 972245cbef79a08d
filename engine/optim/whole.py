"""What an optimizer may learn of whole parameters when this rank has parts of them.

An optimizer that is not element-wise says so by having `bind`. It is then given a `Wholes`; others
never see one and pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class WholeParam:
    """A parameter. `number` counts all that are trained, the same on every rank."""

    number: int
    shape: tuple[int, ...]
    group: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """A rank's part of one parameter.

    Attributes:
        param: of which parameter.
        start, stop: which of its elements, flattened.
        at: where they lie in the tensor that the optimizer updates.
    """

    param: WholeParam
    start: int
    stop: int
    at: slice


@dataclass(frozen=True)
class Chosen:
    """Some parameters, the same on every rank.

    Attributes:
        groups: parameter groups that they are in.
        beside: tensors that this step updates, of any group. A step may be of some units only:
            then the parameters are those of the units that these are parts of.
    """

    groups: tuple[int, ...]
    beside: tuple[Tensor, ...]


Solve = Callable[[WholeParam, Tensor], Tensor]


class Wholes(Protocol):
    """Access to whole parameters, whoever holds what of them. Calls are collective."""

    @property
    def count(self) -> int:
        """How many parameters are trained."""

    def segments(self, tensor: Tensor) -> Sequence[Segment]:
        """What lies in one of the tensors that the optimizer updates."""

    def add_up(self, values: Tensor) -> None:
        """Sums over the ranks, in place, where ranks hold parts."""

    def transform(
        self,
        chosen: Chosen,
        parts: Mapping[int, Tensor],
        solve: Solve,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replaces each parameter's values by those that `solve` makes of the whole.

        Args:
            chosen: which parameters.
            parts: by parameter number this rank's part, flat; it is overwritten.
            solve: called where the whole is, with a flat tensor; returns another, of any dtype.
            dtype: what values may be rounded to on their way to it; None for not at all.
        """

    def params_of(self, groups: Sequence[int]) -> list[WholeParam]:
        """The parameters of some parameter groups."""


@runtime_checkable
class NeedsWholes(Protocol):
    """An optimizer that looks at whole parameters."""

    def bind(self, wholes: Wholes) -> None:
        """Called once, before the first step."""


class OwnWholes:
    """Every tensor is a whole parameter: an optimizer on its own, without an engine."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._found: dict[Tensor, tuple[Segment]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                param = WholeParam(len(self._found), tuple(tensor.shape), number)
                self._found[tensor] = (Segment(param, 0, param.numel, slice(0, param.numel)),)

    @property
    def count(self) -> int:
        return len(self._found)

    def segments(self, tensor: Tensor) -> Sequence[Segment]:
        return self._found[tensor]

    def add_up(self, values: Tensor) -> None:
        return

    def params_of(self, groups: Sequence[int]) -> list[WholeParam]:
        found = [one.param for (one,) in self._found.values()]
        return [param for param in found if param.group in groups]

    def transform(
        self,
        chosen: Chosen,
        parts: Mapping[int, Tensor],
        solve: Solve,
        dtype: torch.dtype | None = None,
    ) -> None:
        for (one,) in self._found.values():
            if one.param.number in parts:
                part = parts[one.param.number]
                part.copy_(solve(one.param, part))
