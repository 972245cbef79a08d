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
from rayzero.engine.optim.local import Run
from rayzero.engine.optim.whole import Chosen, Segment, Solve, WholeParam
from rayzero.engine.zero.unit import Unit


@dataclass(frozen=True)
class _Routes:
    """Where parts go: by rank, this rank's parts of what that rank owns, and the other way."""

    owned: list[WholeParam]
    to_owner: list[list[Segment]]
    from_holder: list[list[Segment]]


class EngineWholes:
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
        runs: Sequence[Run],
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._units = [unit for unit in units if unit.main is not None]
        self._collectives = collectives
        self._device = device
        self._params: list[WholeParam] = []
        self._first: dict[str, int] = {}  # the number of each unit's first parameter
        for unit in self._units:
            self._first[unit.name] = len(self._params)
            for spec in unit.layout.params:
                self._params.append(WholeParam(len(self._params), spec.shape, spec.group))
        self._segments: dict[Tensor, list[Segment]] = {
            run.weight: self._within(run.unit, run.extent) for run in runs
        }
        self._sharded = any(unit.owned != slice(0, unit.layout.numel) for unit in self._units)
        self._unit_of: dict[Tensor, Unit] = {run.weight: run.unit for run in runs}
        self._routes: dict[object, _Routes] = {}

    @property
    def count(self) -> int:
        return len(self._params)

    def segments(self, tensor: Tensor) -> Sequence[Segment]:
        return self._segments[tensor]

    def params_of(self, groups: Sequence[int]) -> list[WholeParam]:
        return [param for param in self._params if param.group in groups]

    def add_up(self, values: Tensor) -> None:
        if self._sharded:
            moved = values.to(self._device)  # weights may rest elsewhere
            self._collectives.add_up(moved)
            values.copy_(moved)

    def transform(
        self,
        chosen: Chosen,
        parts: Mapping[int, Tensor],
        solve: Solve,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not self._sharded:  # every rank has the whole, and does what all do
            for number, part in parts.items():
                part.copy_(solve(self._params[number], part.to(self._device, dtype)))
            return
        routes = self._routes_of(chosen)
        travelling = dtype or self._widest()
        ours = [self._packed(segments, parts, travelling) for segments in routes.to_owner]
        theirs = [self._empty(segments, travelling) for segments in routes.from_holder]
        self._exchange(theirs, ours)
        self._solve_owned(routes, theirs, solve)
        self._exchange(ours, theirs)
        for segments, buffer in zip(routes.to_owner, ours, strict=True):
            for segment, stretch in _stretches(segments, buffer):
                parts[segment.param.number].copy_(stretch)

    def _solve_owned(self, routes: _Routes, theirs: Sequence[Tensor], solve: Solve) -> None:
        """Makes every parameter that this rank owns whole, and puts the result in its place."""
        pieces: dict[int, list[tuple[Segment, Tensor]]] = {one.number: [] for one in routes.owned}
        for segments, buffer in zip(routes.from_holder, theirs, strict=True):
            for segment, stretch in _stretches(segments, buffer):
                pieces[segment.param.number].append((segment, stretch))
        for param in routes.owned:
            whole = theirs[0].new_empty(param.numel)
            for segment, stretch in pieces[param.number]:
                whole[segment.start : segment.stop] = stretch
            result = solve(param, whole)
            for segment, stretch in pieces[param.number]:
                stretch.copy_(result[segment.start : segment.stop])

    def _exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """To the end, so that either side may be written afterwards."""
        pending = self._collectives.exchange(received, sent)
        pending.wait()
        pending.release()

    def _packed(
        self, segments: Sequence[Segment], parts: Mapping[int, Tensor], dtype: torch.dtype
    ) -> Tensor:
        buffer = self._empty(segments, dtype)
        for segment, stretch in _stretches(segments, buffer):
            stretch.copy_(parts[segment.param.number])
        return buffer

    def _empty(self, segments: Sequence[Segment], dtype: torch.dtype) -> Tensor:
        numel = sum(segment.stop - segment.start for segment in segments)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _routes_of(self, chosen: Chosen) -> _Routes:
        units = {id(self._unit_of[tensor]) for tensor in chosen.beside}
        key = chosen.groups, frozenset(units)
        if key not in self._routes:
            here = [unit for unit in self._units if id(unit) in units]
            self._routes[key] = self._find_routes(chosen.groups, here)
        return self._routes[key]

    def _find_routes(self, groups: Sequence[int], units: Sequence[Unit]) -> _Routes:
        rank, world_size = self._collectives.rank, self._collectives.world_size
        owners = choose_owners(self.params_of(groups), world_size)
        to_owner: list[list[Segment]] = [[] for _ in range(world_size)]
        from_holder: list[list[Segment]] = [[] for _ in range(world_size)]
        for unit in units:
            for holder in range(world_size):
                for segment in self._within(unit, unit.layout.shard(holder)):
                    owner = owners.get(segment.param.number)
                    if owner is not None and holder == rank:
                        to_owner[owner].append(segment)
                    if owner == rank:
                        from_holder[holder].append(segment)
        owned = {one.param.number: one.param for held in from_holder for one in held}
        return _Routes(list(owned.values()), to_owner, from_holder)

    def _within(self, unit: Unit, extent: slice) -> list[Segment]:
        """What lies in a part of a unit's flat layout."""
        layout, found = unit.layout, []
        for index, start, stop in layout.overlaps(extent):
            at = layout.offsets[index] + start - extent.start
            param = self._params[self._first[unit.name] + index]
            found.append(Segment(param, start, stop, slice(at, at + stop - start)))
        return found

    def _widest(self) -> torch.dtype:
        """A dtype that holds the main weights' dtypes exactly."""
        dtypes = [unit.main.dtype for unit in self._units if unit.main is not None]
        return max(dtypes, key=lambda dtype: dtype.itemsize)


def choose_owners(params: Sequence[WholeParam], world_size: int) -> dict[int, int]:
    """Each parameter's owner, so that ranks have about equal work: the largest first, each to the
    rank that has least so far.
    """
    loads = [(0, rank) for rank in range(world_size)]
    owners = {}
    for param in sorted(params, key=lambda one: (-_cost(one), one.number)):
        load, rank = heapq.heappop(loads)
        owners[param.number] = rank
        heapq.heappush(loads, (load + _cost(param), rank))
    return owners


def _cost(param: WholeParam) -> int:
    """About the multiplications that a product of the matrix with its transpose takes."""
    rows = param.shape[0] if param.shape else 1
    columns = prod(param.shape[1:])
    return rows * columns * min(rows, columns)


def _stretches(segments: Sequence[Segment], buffer: Tensor) -> list[tuple[Segment, Tensor]]:
    """Segments that lie behind one another in a buffer, each with its view."""
    lengths = [segment.stop - segment.start for segment in segments]
    return list(zip(segments, buffer.split(lengths) if lengths else (), strict=True))
