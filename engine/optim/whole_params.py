"""Access to whole parameters for optimizers that are not elementwise.

Such an optimizer has `bind_whole_params` and is given a `WholeParamOps`; elementwise optimizers do
not and pay nothing.
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
    """A trained parameter. `number` is its index over all of them, equal on every rank."""

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
        start, stop: range of its elements, flattened.
        tensor_range: position in the tensor that the optimizer updates.
    """

    param: WholeParam
    start: int
    stop: int
    tensor_range: slice


@dataclass(frozen=True)
class ParamSelection:
    """Selects parameters, the same on every rank.

    Attributes:
        groups: their parameter groups.
        updated_tensors: tensors that the current step updates, of any group. A step may update
            some units only: the selection is restricted to the units of these tensors.
    """

    groups: tuple[int, ...]
    updated_tensors: tuple[Tensor, ...]


TransformFn = Callable[[WholeParam, Tensor], Tensor]


class WholeParamOps(Protocol):
    """Access to whole parameters, however they are sharded. Calls are collective."""

    @property
    def num_params(self) -> int:
        """Number of trained parameters."""

    def segments(self, tensor: Tensor) -> Sequence[ParamSegment]:
        """The parameter segments in a tensor that the optimizer updates."""

    def all_reduce_sum(self, values: Tensor) -> None:
        """Sum over the ranks in place; does nothing where every rank holds whole parameters."""

    def transform(
        self,
        selection: ParamSelection,
        parts: Mapping[int, Tensor],
        function: TransformFn,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replace each selected parameter's values by `function` of the whole parameter.

        Args:
            parts: this rank's part by parameter number, flat; overwritten.
            function: called on the owning rank with the flat parameter; returns a flat tensor of
                any dtype.
            dtype: values may be rounded to it in transit; None: not at all.
        """

    def params_in_groups(self, groups: Sequence[int]) -> list[WholeParam]:
        """The parameters of some parameter groups."""


@runtime_checkable
class NeedsWholeParams(Protocol):
    """An optimizer whose update needs whole parameters."""

    def bind_whole_params(self, whole_params: WholeParamOps) -> None:
        """Called once, before the first step."""


class LocalWholeParamOps:
    """For an optimizer without an engine: every tensor is a whole parameter."""

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
        params = [segment.param for (segment,) in self._segments.values()]
        return [param for param in params if param.group in groups]

    def transform(
        self,
        selection: ParamSelection,
        parts: Mapping[int, Tensor],
        function: TransformFn,
        dtype: torch.dtype | None = None,
    ) -> None:
        for (segment,) in self._segments.values():
            if segment.param.number in parts:
                part = parts[segment.param.number]
                part.copy_(function(segment.param, part))
