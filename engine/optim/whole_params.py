"""Access to whole parameters for optimizers that are not elementwise.

Such an optimizer has `bind_whole_params`, and is given a `WholeParamOps`. Elementwise optimizers
have no such method, and this module costs them nothing.

A parameter that is transformed as a whole is owned by one rank. Every rank sends its part to the
owner and receives the same range of the result, by `Collectives.all_to_all_v`. Each rank thus sends
about 1/W of the parameters each way. Owners and holders follow from the layouts, so ranks exchange
no metadata.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.zero.unit import Unit


@dataclass(frozen=True)
class WholeParam:
    """A trained parameter. `number` is its index in all trained parameters, equal on every rank."""

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
        start, stop: the part's range in the flattened parameter.
        tensor_range: the part's range in the tensor that the optimizer updates.
    """

    param: WholeParam
    start: int
    stop: int
    tensor_range: slice


TransformFn = Callable[[WholeParam, Tensor], Tensor]


class WholeParamOps:
    """Access to whole parameters. Calls are collective.

    In this class every tensor is a whole parameter, as for an optimizer without an engine.
    `ShardedWholeParamOps` assembles parameters from the ranks' shards.

    Args:
        params: all trained parameters, by number.
        segments: the segments in each tensor that the optimizer updates.
        device: the device on which parameters are transformed. None for the parameters' own.
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
        """Makes the ops for the parameters of an optimizer without an engine."""
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
        """Returns the parameters that the current step updates on any rank, given the tensors that
        it updates on this one. The list is the same on every rank."""
        return [segment.param for tensor in updated for segment in self.segments[tensor]]

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Returns `values`, on their device, summed over the ranks if these hold parts of
        parameters. The host waits only if collectives run on another device."""
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
            groups: the groups whose parameters are transformed, the same on every rank.
            updated: the tensors that the current step updates, of any group. A step may update only
                some units, the same on every rank. Parameters of other units are left out.
            parts: this rank's parts by parameter number, flat. Overwritten with the results.
            function: called on the owning rank with the flat parameter. Returns a flat tensor of
                any dtype.
            dtype: values may be rounded to this dtype in transit. None if they may not be.
        """
        for number, part in parts.items():
            part.copy_(function(self.params[number], part.to(self._device, dtype)))


Segments = list[ParamSegment]
Plan = tuple[list[Segments], list[Segments]]
"""Two lists by rank: this rank's segments by their parameters' owner, and the segments of this
rank's own parameters by the rank that holds them."""


class ShardedWholeParamOps(WholeParamOps):
    """`WholeParamOps` over the parameters of an engine's units.

    Args:
        units: all units of the engine, in the same order on every rank.
        shards: the tensors that this rank's optimizer updates, with their unit and their range in
            its flat layout.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        shards: Mapping[Tensor, tuple[Unit, slice]],
        collectives: Collectives,
    ) -> None:
        self._units = [unit for unit in units if unit.main_weights is not None]
        params: list[WholeParam] = []
        self._params_of: dict[str, list[WholeParam]] = {}  # by the unit's name
        for unit in self._units:
            specs = enumerate(unit.layout.params, start=len(params))
            self._params_of[unit.name] = [
                WholeParam(number, spec.shape, spec.group, spec.name) for number, spec in specs
            ]
            params += self._params_of[unit.name]
        segments = {tensor: self._segments_in(*place) for tensor, place in shards.items()}
        super().__init__(params, segments, collectives.device)
        self._collectives = collectives
        self._sharded = any(unit.owned != slice(0, unit.layout.numel) for unit in self._units)
        self._unit_of = {tensor: unit for tensor, (unit, _) in shards.items()}
        self._plans: dict[object, Plan] = {}

    def params_of(self, updated: Sequence[Tensor]) -> list[WholeParam]:
        names = {self._unit_of[tensor].name for tensor in updated}
        params: list[WholeParam] = []
        for unit in self._units:
            if unit.name in names:
                params += self._params_of[unit.name]
        return params

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        if not self._sharded:
            return values
        sums = values.to(self._device, non_blocking=True)  # weights may be offloaded
        if values.device == sums.device:
            return self._collectives.sum_on_device(sums)
        return values.new_tensor(self._collectives.sum_scalars(sums, name="sums")).view_as(values)

    def transform(
        self,
        groups: Sequence[int],
        updated: Sequence[Tensor],
        parts: Mapping[int, Tensor],
        function: TransformFn,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not self._sharded:  # every rank computes all parameters
            super().transform(groups, updated, parts, function, dtype)
            return
        to_owner, from_holder = self._plan_for(groups, updated)
        main_dtypes = [
            unit.main_weights.dtype for unit in self._units if unit.main_weights is not None
        ]
        wire_dtype = dtype or max(main_dtypes, key=lambda main: main.itemsize)
        sent = [self._empty_buffer(segments, wire_dtype) for segments in to_owner]
        received = [self._empty_buffer(segments, wire_dtype) for segments in from_holder]
        views = _segment_views(to_owner, sent)
        for segment, view in views:
            view.copy_(parts[segment.param.number])
        # `release` blocks until both sides may be overwritten.
        self._collectives.all_to_all_v(received, sent).release()
        _transform_owned(_segment_views(from_holder, received), function)
        self._collectives.all_to_all_v(sent, received).release()
        for segment, view in views:
            parts[segment.param.number].copy_(view)

    def _empty_buffer(self, segments: Segments, dtype: torch.dtype) -> Tensor:
        numel = sum(segment.stop - segment.start for segment in segments)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _plan_for(self, groups: Sequence[int], updated: Sequence[Tensor]) -> Plan:
        unit_ids = frozenset(id(self._unit_of[tensor]) for tensor in updated)
        key = tuple(groups), unit_ids
        if key in self._plans:
            return self._plans[key]
        rank, world_size = self._collectives.rank, self._collectives.world_size
        owners = choose_owners(self.params_in_groups(groups), world_size)
        to_owner: list[Segments] = [[] for _ in range(world_size)]
        from_holder: list[Segments] = [[] for _ in range(world_size)]
        for unit in [unit for unit in self._units if id(unit) in unit_ids]:
            for holder in range(world_size):
                for segment in self._segments_in(unit, unit.layout.shard(holder)):
                    owner = owners.get(segment.param.number)
                    if owner is not None and holder == rank:
                        to_owner[owner].append(segment)
                    if owner == rank:
                        from_holder[holder].append(segment)
        self._plans[key] = to_owner, from_holder
        return self._plans[key]

    def _segments_in(self, unit: Unit, extent: slice) -> list[ParamSegment]:
        """Returns the parameter segments in a range of a unit's flat layout."""
        params = self._params_of[unit.name]
        return [
            ParamSegment(params[part.index], part.start, part.stop, part.memory)
            for part in unit.layout.overlaps(extent)
        ]


def choose_owners(params: Sequence[WholeParam], world_size: int) -> dict[int, int]:
    """Returns the owner of each parameter by number. Costs are balanced greedily: the most
    expensive parameter first, to the least loaded rank."""
    loads = [(0, rank) for rank in range(world_size)]
    owners = {}
    for param in sorted(params, key=lambda param: (-_orthogonalize_cost(param), param.number)):
        load, rank = heapq.heappop(loads)
        owners[param.number] = rank
        heapq.heappush(loads, (load + _orthogonalize_cost(param), rank))
    return owners


def _orthogonalize_cost(param: WholeParam) -> int:
    """Returns the number of multiplications in the product of the matrix with its transpose."""
    rows = param.shape[0] if param.shape else 1
    return param.numel * min(rows, prod(param.shape[1:]))


def _segment_views(
    segments_by_rank: Sequence[Segments], buffers: Sequence[Tensor]
) -> list[tuple[ParamSegment, Tensor]]:
    """Returns each segment with its view of its rank's buffer, where segments lie in order."""
    views: list[tuple[ParamSegment, Tensor]] = []
    for segments, buffer in zip(segments_by_rank, buffers, strict=True):
        if segments:
            lengths = [segment.stop - segment.start for segment in segments]
            views += zip(segments, buffer.split(lengths), strict=True)
    return views


def _transform_owned(views: Sequence[tuple[ParamSegment, Tensor]], function: TransformFn) -> None:
    """Assemble and transform each parameter, and overwrite its segments with the result."""
    views_of: defaultdict[WholeParam, list[tuple[ParamSegment, Tensor]]] = defaultdict(list)
    for segment, view in views:
        views_of[segment.param].append((segment, view))
    for param, held in views_of.items():
        whole = held[0][1].new_empty(param.numel)
        for segment, view in held:
            whole[segment.start : segment.stop] = view
        result = function(param, whole)
        for segment, view in held:
            view.copy_(result[segment.start : segment.stop])


@runtime_checkable
class NeedsWholeParams(Protocol):
    """An optimizer whose update needs whole parameters."""

    def bind_whole_params(self, whole_params: WholeParamOps) -> None:
        """Called once, before the first step."""
