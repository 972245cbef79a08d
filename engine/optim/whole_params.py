"""What an optimizer may learn of whole parameters when this rank has parts of them.

An optimizer that is not element-wise says so by having `bind`. It is then given a `WholeParamOps`; others
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
class ParamSegment:
    """A rank's part of one parameter.

    Attributes:
        param: of which parameter.
        start, stop: which of its elements, flattened.
        at: where they lie in the tensor that the optimizer updates.
    """

    param: WholeParam
    start: int
    stop: int
    tensor_range: slice


@dataclass(frozen=True)
class ParamSelection:
    """Some parameters, the same on every rank.

    Attributes:
        groups: parameter groups that they are in.
        beside: tensors that this step updates, of any group. A step may be of some units only:
            then the parameters are those of the units that these are parts of.
    """

    groups: tuple[int, ...]
    updated_tensors: tuple[Tensor, ...]


TransformFn = Callable[[WholeParam, Tensor], Tensor]


class WholeParamOps(Protocol):
    """Access to whole parameters, whoever holds what of them. Calls are collective."""

    @property
    def num_params(self) -> int:
        """How many parameters are trained."""

    def segments(self, tensor: Tensor) -> Sequence[ParamSegment]:
        """What lies in one of the tensors that the optimizer updates."""

    def all_reduce_sum(self, values: Tensor) -> None:
        """Sums over the ranks, in place, where ranks hold parts."""

    def transform(
        self,
        chosen: ParamSelection,
        parts: Mapping[int, Tensor],
        solve: TransformFn,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replaces each parameter's values by those that `solve` makes of the whole.

        Args:
            chosen: which parameters.
            parts: by parameter number this rank's part, flat; it is overwritten.
            solve: called where the whole is, with a flat tensor; returns another, of any dtype.
            dtype: what values may be rounded to on their way to it; None for not at all.
        """

    def params_in_groups(self, groups: Sequence[int]) -> list[WholeParam]:
        """The parameters of some parameter groups."""


@runtime_checkable
class NeedsWholeParams(Protocol):
    """An optimizer that looks at whole parameters."""

    def bind_whole_params(self, wholes: WholeParamOps) -> None:
        """Called once, before the first step."""


class LocalWholeParamOps:
    """Every tensor is a whole parameter: an optimizer on its own, without an engine."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._segments: dict[Tensor, tuple[ParamSegment]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                param = WholeParam(len(self._segments), tuple(tensor.shape), number)
                self._segments[tensor] = (
                    ParamSegment(param, 0, param.numel, slice(0, param.numel)),
                )

    @property
    def num_params(self) -> int:
        return len(self._segments)

    def segments(self, tensor: Tensor) -> Sequence[ParamSegment]:
        return self._segments[tensor]

    def all_reduce_sum(self, values: Tensor) -> None:
        return

    def params_in_groups(self, groups: Sequence[int]) -> list[WholeParam]:
        found = [one.param for (one,) in self._segments.values()]
        return [param for param in found if param.group in groups]

    def transform(
        self,
        chosen: ParamSelection,
        parts: Mapping[int, Tensor],
        solve: TransformFn,
        dtype: torch.dtype | None = None,
    ) -> None:
        for (one,) in self._segments.values():
            if one.param.number in parts:
                part = parts[one.param.number]
                part.copy_(solve(one.param, part))
