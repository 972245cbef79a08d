"""Whole parameters out of the parts that ranks hold: who owns which, and how the parts get there.

A parameter that is transformed as a whole has one owner. Every rank sends its part to the owner and
gets the same stretch of the result back: per rank about a W-th of the parameters each way, by the
all-to-all `Collectives.exchange`. Who owns what, and who holds which elements, follows from the
layouts alone, so nobody has to ask.
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
    """Where parts go: by rank, this rank's parts of what that rank owns, and the other way."""

    owned_params: list[WholeParam]
    to_owner: list[list[ParamSegment]]
    from_holder: list[list[ParamSegment]]


class ShardedWholeParamOps:
    """The parameters of an engine's units.

    Args:
        units: all of the engine's, in one order on every rank.
        runs: what the optimizer of this rank updates.
        collectives: to the other ranks.
        device: where parameters are made whole.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        runs: Sequence[OptimizerShard],
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
            run.weight: self._segments_in(run.unit, run.layout_range) for run in runs
        }
        self._sharded = any(unit.owned != slice(0, unit.layout.numel) for unit in self._units)
        self._unit_of: dict[Tensor, Unit] = {run.weight: run.unit for run in runs}
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
            moved = values.to(self._device)  # weights may rest elsewhere
            self._collectives.all_reduce_now(moved)
            values.copy_(moved)

    def transform(
        self,
        chosen: ParamSelection,
        parts: Mapping[int, Tensor],
        solve: TransformFn,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not self._sharded:  # every rank has the whole, and does what all do
            for number, part in parts.items():
                part.copy_(solve(self._params[number], part.to(self._device, dtype)))
            return
        routes = self._plan_for(chosen)
        travelling = dtype or self._widest_dtype()
        ours = [self._pack(segments, parts, travelling) for segments in routes.to_owner]
        theirs = [self._empty_buffer(segments, travelling) for segments in routes.from_holder]
        self._all_to_all(theirs, ours)
        self._transform_owned(routes, theirs, solve)
        self._all_to_all(ours, theirs)
        for segments, buffer in zip(routes.to_owner, ours, strict=True):
            for segment, stretch in _segment_views(segments, buffer):
                parts[segment.param.number].copy_(stretch)

    def _transform_owned(
        self, routes: _ExchangePlan, theirs: Sequence[Tensor], solve: TransformFn
    ) -> None:
        """Makes every parameter that this rank owns whole, and puts the result in its place."""
        pieces: dict[int, list[tuple[ParamSegment, Tensor]]] = {
            one.number: [] for one in routes.owned_params
        }
        for segments, buffer in zip(routes.from_holder, theirs, strict=True):
            for segment, stretch in _segment_views(segments, buffer):
                pieces[segment.param.number].append((segment, stretch))
        for param in routes.owned_params:
            whole = theirs[0].new_empty(param.numel)
            for segment, stretch in pieces[param.number]:
                whole[segment.start : segment.stop] = stretch
            result = solve(param, whole)
            for segment, stretch in pieces[param.number]:
                stretch.copy_(result[segment.start : segment.stop])

    def _all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """To the end, so that either side may be written afterwards."""
        pending = self._collectives.all_to_all_v(received, sent)
        pending.wait()
        pending.release()

    def _pack(
        self, segments: Sequence[ParamSegment], parts: Mapping[int, Tensor], dtype: torch.dtype
    ) -> Tensor:
        buffer = self._empty_buffer(segments, dtype)
        for segment, stretch in _segment_views(segments, buffer):
            stretch.copy_(parts[segment.param.number])
        return buffer

    def _empty_buffer(self, segments: Sequence[ParamSegment], dtype: torch.dtype) -> Tensor:
        numel = sum(segment.stop - segment.start for segment in segments)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _plan_for(self, chosen: ParamSelection) -> _ExchangePlan:
        units = {id(self._unit_of[tensor]) for tensor in chosen.updated_tensors}
        key = chosen.groups, frozenset(units)
        if key not in self._plans:
            here = [unit for unit in self._units if id(unit) in units]
            self._plans[key] = self._make_plan(chosen.groups, here)
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
        owned = {one.param.number: one.param for held in from_holder for one in held}
        return _ExchangePlan(list(owned.values()), to_owner, from_holder)

    def _segments_in(self, unit: Unit, extent: slice) -> list[ParamSegment]:
        """What lies in a part of a unit's flat layout."""
        layout, found = unit.layout, []
        for index, start, stop in layout.overlaps(extent):
            at = layout.offsets[index] + start - extent.start
            param = self._params[self._first_number[unit.name] + index]
            found.append(ParamSegment(param, start, stop, slice(at, at + stop - start)))
        return found

    def _widest_dtype(self) -> torch.dtype:
        """A dtype that holds the main weights' dtypes exactly."""
        dtypes = [unit.main_weights.dtype for unit in self._units if unit.main_weights is not None]
        return max(dtypes, key=lambda dtype: dtype.itemsize)


def choose_owners(params: Sequence[WholeParam], world_size: int) -> dict[int, int]:
    """Each parameter's owner, so that ranks have about equal work: the largest first, each to the
    rank that has least so far.
    """
    loads = [(0, rank) for rank in range(world_size)]
    owners = {}
    for param in sorted(params, key=lambda one: (-_orthogonalize_cost(one), one.number)):
        load, rank = heapq.heappop(loads)
        owners[param.number] = rank
        heapq.heappush(loads, (load + _orthogonalize_cost(param), rank))
    return owners


def _orthogonalize_cost(param: WholeParam) -> int:
    """About the multiplications that a product of the matrix with its transpose takes."""
    rows = param.shape[0] if param.shape else 1
    columns = prod(param.shape[1:])
    return rows * columns * min(rows, columns)


def _segment_views(
    segments: Sequence[ParamSegment], buffer: Tensor
) -> list[tuple[ParamSegment, Tensor]]:
    """Segments that lie behind one another in a buffer, each with its view."""
    lengths = [segment.stop - segment.start for segment in segments]
    return list(zip(segments, buffer.split(lengths) if lengths else (), strict=True))
