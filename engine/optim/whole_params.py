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
    name: str = ""

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


TransformFn = Callable[[WholeParam, Tensor], Tensor]


class WholeParamOps:
    """Access to whole parameters. Calls are collective.

    In this class every tensor is a whole parameter, as for an optimizer without an engine;
    `ShardedWholeParamOps` assembles parameters from the ranks' shards.

    Args:
        params: all trained parameters, by number.
        segments: the segments in each tensor that the optimizer updates.
        device: where parameters are transformed; None: where they are.
    """

    def __init__(
        self,
        params: Sequence[WholeParam],
        segments: Mapping[Tensor, Sequence[ParamSegment]],
        device: torch.device | None = None,
    ) -> None:
        self.params = params
        self.segments = segments
        self._device = device

    @classmethod
    def of_optimizer(cls, optimizer: torch.optim.Optimizer) -> WholeParamOps:
        """The parameters of an optimizer without an engine."""
        params: list[WholeParam] = []
        segments: dict[Tensor, list[ParamSegment]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                param = WholeParam(len(params), tuple(tensor.shape), number)
                params.append(param)
                segments[tensor] = [ParamSegment(param, 0, param.numel, slice(0, param.numel))]
        return cls(params, segments)

    def params_in_groups(self, groups: Sequence[int]) -> list[WholeParam]:
        return [param for param in self.params if param.group in groups]

    def params_of(self, updated: Sequence[Tensor]) -> list[WholeParam]:
        """The parameters that tensors which the current step updates are of, on any rank: the same
        list on every rank."""
        return [segment.param for tensor in updated for segment in self.segments[tensor]]

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """`values`, summed if ranks hold parts of parameters, on their device. The host waits only
        if that is not the one of collectives."""
        return values

    def transform(
        self,
        groups: Sequence[int],
        updated: Sequence[Tensor],
        parts: Mapping[int, Tensor],
        function: TransformFn,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replace each parameter's values by `function` of the whole parameter.

        Args:
            groups: parameter groups of the parameters, the same on every rank.
            updated: tensors that the current step updates, of any group. A step may update some
                units only, the same on every rank: parameters of other units are left out.
            parts: this rank's part by parameter number, flat; overwritten.
            function: called on the owning rank with the flat parameter; returns a flat tensor of
                any dtype.
            dtype: values may be rounded to it in transit; None: not at all.
        """
        for number, part in parts.items():
            part.copy_(function(self.params[number], part.to(self._device, dtype)))


@runtime_checkable
class NeedsWholeParams(Protocol):
    """An optimizer whose update needs whole parameters."""

    def bind_whole_params(self, whole_params: WholeParamOps) -> None:
        """Called once, before the first step."""
