"""Assembles whole parameters from the ranks' shards, for optimizers that need them.

A parameter that is transformed as a whole has one owner. Every rank sends its part to the owner and
receives the same range of the result: about 1/W of the parameters each way and rank, by
`Collectives.all_to_all_v`. Owners and holders follow from the layouts, so ranks exchange no
metadata.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.optim.sharded_optimizer import OptimizerShard
from rayzero.engine.optim.whole_params import ParamSegment, ParamSelection, TransformFn, WholeParam
from rayzero.engine.zero.unit import Unit


@dataclass(frozen=True)
class _ExchangePlan:
    """Segments to send and to receive, by rank, and the parameters that this rank owns."""

    owned_params: list[WholeParam]
    to_owner: list[list[ParamSegment]]
    from_holder: list[list[ParamSegment]]


class ShardedWholeParamOps:
    """`WholeParamOps` over the parameters of an engine's units.

    Args:
        units: all units of the engine, in the same order on every rank.
        shards: the tensors that this rank's optimizer updates.
        device: where parameters are assembled.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        shards: Sequence[OptimizerShard],
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._units = [unit for unit in units if unit.main_weights is not None]
        self._collectives = collectives
        self._device = device
        self._params: list[WholeParam] = []
        self._first_number: dict[str, int] = {}  # the number of each unit's first parameter
        for unit in self._units:
            self._first_number[unit.name] = len(self._params)
            for spec in unit.layout.params:
                self._params.append(WholeParam(len(self._params), spec.shape, spec.group))
        self._segments: dict[Tensor, list[ParamSegment]] = {
            shard.weight: self._segments_in(shard.unit, shard.layout_range) for shard in shards
        }
        self._sharded = any(unit.owned != slice(0, unit.layout.numel) for unit in self._units)
        self._unit_of: dict[Tensor, Unit] = {shard.weight: shard.unit for shard in shards}
        self._plans: dict[object, _ExchangePlan] = {}

    @property
    def num_params(self) -> int:
        return len(self._params)

    def segments(self, tensor: Tensor) -> Sequence[ParamSegment]:
        return self._segments[tensor]

    def params_in_groups(self, groups: Sequence[int]) -> list[WholeParam]:
        return [param for param in self._params if param.group in groups]

    def all_reduce_sum(self, values: Tensor) -> None:
        if self._sharded:
            on_device = values.to(self._device)  # weights may be offloaded
            self._collectives.all_reduce_scalars(on_device, "sums")
            values.copy_(on_device)

    def transform(
        self,
        selection: ParamSelection,
        parts: Mapping[int, Tensor],
        function: TransformFn,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not self._sharded:  # every rank holds whole parameters and computes all of them
            for number, part in parts.items():
                part.copy_(function(self._params[number], part.to(self._device, dtype)))
            return
        plan = self._plan_for(selection)
        wire_dtype = dtype or self._widest_dtype()
        send = [self._pack(segments, parts, wire_dtype) for segments in plan.to_owner]
        received = [self._empty_buffer(segments, wire_dtype) for segments in plan.from_holder]
        self._all_to_all(received, send)
        self._transform_owned(plan, received, function)
        self._all_to_all(send, received)
        for segments, buffer in zip(plan.to_owner, send, strict=True):
            for segment, view in _segment_views(segments, buffer):
                parts[segment.param.number].copy_(view)

    def _transform_owned(
        self, plan: _ExchangePlan, received: Sequence[Tensor], function: TransformFn
    ) -> None:
        """Transform the parameters that this rank owns; results overwrite `received`."""
        views: dict[int, list[tuple[ParamSegment, Tensor]]] = {
            param.number: [] for param in plan.owned_params
        }
        for segments, buffer in zip(plan.from_holder, received, strict=True):
            for segment, view in _segment_views(segments, buffer):
                views[segment.param.number].append((segment, view))
        for param in plan.owned_params:
            whole = received[0].new_empty(param.numel)
            for segment, view in views[param.number]:
                whole[segment.start : segment.stop] = view
            result = function(param, whole)
            for segment, view in views[param.number]:
                view.copy_(result[segment.start : segment.stop])

    def _all_to_all(self, output: Sequence[Tensor], input_: Sequence[Tensor]) -> None:
        """Blocks until both sides may be overwritten."""
        work = self._collectives.all_to_all_v(output, input_)
        work.wait()
        work.release()

    def _pack(
        self, segments: Sequence[ParamSegment], parts: Mapping[int, Tensor], dtype: torch.dtype
    ) -> Tensor:
        buffer = self._empty_buffer(segments, dtype)
        for segment, view in _segment_views(segments, buffer):
            view.copy_(parts[segment.param.number])
        return buffer

    def _empty_buffer(self, segments: Sequence[ParamSegment], dtype: torch.dtype) -> Tensor:
        numel = sum(segment.stop - segment.start for segment in segments)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _plan_for(self, selection: ParamSelection) -> _ExchangePlan:
        unit_ids = {id(self._unit_of[tensor]) for tensor in selection.updated_tensors}
        key = selection.groups, frozenset(unit_ids)
        if key not in self._plans:
            units = [unit for unit in self._units if id(unit) in unit_ids]
            self._plans[key] = self._make_plan(selection.groups, units)
        return self._plans[key]

    def _make_plan(self, groups: Sequence[int], units: Sequence[Unit]) -> _ExchangePlan:
        rank, world_size = self._collectives.rank, self._collectives.world_size
        owners = choose_owners(self.params_in_groups(groups), world_size)
        to_owner: list[list[ParamSegment]] = [[] for _ in range(world_size)]
        from_holder: list[list[ParamSegment]] = [[] for _ in range(world_size)]
        for unit in units:
            for holder in range(world_size):
                for segment in self._segments_in(unit, unit.layout.shard(holder)):
                    owner = owners.get(segment.param.number)
                    if owner is not None and holder == rank:
                        to_owner[owner].append(segment)
                    if owner == rank:
                        from_holder[holder].append(segment)
        owned = {segment.param.number: segment.param for held in from_holder for segment in held}
        return _ExchangePlan(list(owned.values()), to_owner, from_holder)

    def _segments_in(self, unit: Unit, extent: slice) -> list[ParamSegment]:
        """The parameter segments in a range of a unit's flat layout."""
        first = self._first_number[unit.name]
        return [
            ParamSegment(self._params[first + part.index], part.start, part.stop, part.memory)
            for part in unit.layout.overlaps(extent)
        ]

    def _widest_dtype(self) -> torch.dtype:
        """The widest dtype of main weights."""
        dtypes = [unit.main_weights.dtype for unit in self._units if unit.main_weights is not None]
        return max(dtypes, key=lambda dtype: dtype.itemsize)


def choose_owners(params: Sequence[WholeParam], world_size: int) -> dict[int, int]:
    """The owner of each parameter, balanced greedily: largest first, to the least loaded rank."""
    loads = [(0, rank) for rank in range(world_size)]
    owners = {}
    for param in sorted(params, key=lambda param: (-_orthogonalize_cost(param), param.number)):
        load, rank = heapq.heappop(loads)
        owners[param.number] = rank
        heapq.heappush(loads, (load + _orthogonalize_cost(param), rank))
    return owners


def _orthogonalize_cost(param: WholeParam) -> int:
    """Multiplications of the matrix with its transpose."""
    rows = param.shape[0] if param.shape else 1
    columns = prod(param.shape[1:])
    return rows * columns * min(rows, columns)


def _segment_views(
    segments: Sequence[ParamSegment], buffer: Tensor
) -> list[tuple[ParamSegment, Tensor]]:
    """Each segment with its view of a buffer that holds them one after another."""
    lengths = [segment.stop - segment.start for segment in segments]
    return list(zip(segments, buffer.split(lengths) if lengths else (), strict=True))
