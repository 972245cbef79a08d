"""Which node a worker's seat should be on: as few nodes as can be, so that neighbours share one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rayzero.orchestrator.policies.placement import Capacity, Need


def targets(
    count: int, need: Need, free: Mapping[str, Capacity], in_use: Collection[str]
) -> list[str | None]:
    """A node to wish for, for each of `count` new seats; None where none has room.

    Wishes only: by the time a seat is made, its node may be full, and it goes elsewhere.

    Args:
        free: what each node has left, by its id.
        in_use: nodes that hold seats of the job already; these come first.
    """
    rooms = {node: capacity.room(need) for node, capacity in free.items()}
    order = sorted(rooms, key=lambda node: (node not in in_use, -rooms[node], node))
    wishes = [node for node in order for _ in range(rooms[node])][:count]
    return [*wishes, *[None] * (count - len(wishes))]
