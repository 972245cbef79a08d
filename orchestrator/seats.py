"""Seats: what a job reserves in the cluster, one worker's CPUs and GPUs each."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ray import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rayzero.orchestrator import nodes
from rayzero.orchestrator.policies.placement import Need
from rayzero.orchestrator.policies.seating import targets

_NODE_LABEL = "ray.io/node-id"  # Ray puts it on every node


@dataclass(eq=False)
class Seat:
    """A placement group of one bundle. Ray keeps looking for a place for it: at first until there
    is room, and again when its node is lost.

    Args:
        avoid: nodes it must not be on.
        worker: the index of the worker in it; None while it is vacant.
        due_s: by the group's clock, when a vacant seat may be taken.
        failures: workers that did not start in it since the last one that did.
        doomed: its node is leaving, and another seat was asked for in its place.
    """

    group: PlacementGroup
    avoid: frozenset[str] = frozenset()
    worker: int | None = None
    due_s: float = 0.0
    failures: int = 0
    doomed: bool = False


class Seats:
    """The seats of one job. Each has a placement group of its own, so that seats come, go and wait
    for nodes one by one; what waits is the demand that Ray's autoscaler sees."""

    def __init__(self, job: str = "") -> None:
        self._job = job
        self._seats: list[Seat] = []

    def __len__(self) -> int:
        """How many there will be: those that are doomed do not count."""
        return sum(not seat.doomed for seat in self._seats)

    def __iter__(self) -> Iterator[Seat]:
        """The oldest first."""
        return iter(tuple(self._seats))

    @property
    def vacant(self) -> list[Seat]:
        return [seat for seat in self._seats if seat.worker is None]

    async def ask(self, count: int, need: Need) -> None:
        """Asks for more seats, next to those that are there where that can be."""
        seen = await asyncio.to_thread(nodes.look)
        in_use = set((await self.standing()).values())
        for target in targets(count, need, seen.free, in_use):
            self._seats.append(Seat(_group(self._job, need, target, frozenset())))

    def move(self, seat: Seat, need: Need, avoid: Collection[str]) -> None:
        """Asks for the seat anew, on none of these nodes nor those it is to avoid anyway."""
        remove_placement_group(seat.group)
        seat.group = _group(self._job, need, None, seat.avoid | frozenset(avoid))

    async def standing(self) -> dict[Seat, str]:
        """The seats that are there, each with its node's id."""
        if not self._seats:
            return {}
        table = await asyncio.to_thread(placement_group_table)
        living = await asyncio.to_thread(nodes.alive)
        found = {}
        for seat in self._seats:
            entry = table.get(seat.group.id.hex())
            if entry is None or entry["state"] != "CREATED":
                continue
            node = entry["bundles_to_node_id"][0]
            if node in living:  # else Ray moves the seat in a moment
                found[seat] = node
        return found

    def give_back(self, seat: Seat) -> None:
        if seat in self._seats:
            self._seats.remove(seat)
            remove_placement_group(seat.group)

    def clear(self) -> None:
        for seat in self:
            self.give_back(seat)


def sweep(job: str) -> int:
    """Gives back what an earlier process of that job reserved and left; how many seats. Ray removes
    them with the actor that made them, but not where that actor is started anew."""
    left = [
        id_
        for id_, one in placement_group_table().items()
        if one["name"].startswith(_name(job)) and one["state"] != "REMOVED"
    ]
    for id_ in left:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(id_))))
    return len(left)


def _name(job: str) -> str:
    return f"rayzero/{job}/"


def _group(job: str, need: Need, target: str | None, avoid: frozenset[str]) -> PlacementGroup:
    """Ray takes a wish for a node with this strategy only; with one bundle all are the same."""
    bundle = {"CPU": need.cpus} | ({"GPU": need.gpus} if need.gpus else {})
    selector = {_NODE_LABEL: f"!in({','.join(sorted(avoid))})"} if avoid else {}
    group: PlacementGroup = placement_group(
        [bundle],
        strategy="STRICT_PACK",
        name=_name(job) + secrets.token_hex(8),
        _soft_target_node_id=target,
        bundle_label_selector=[selector] if selector else None,
    )
    return group
