"""Which node holds copies of which other nodes' slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rayzero.workers.messages import SlotRef


def copies(slots: Sequence[SlotRef], replicas: int) -> dict[str, list[SlotRef]]:
    """What each node is to copy from others: each node's slots go to the next `replicas` nodes
    of the ring, in the order of ranks. Nothing, where there is one node only.

    Args:
        slots: originals, by rank.
    """
    ring = list(dict.fromkeys(slot.node_id for slot in slots))
    homes = {node: place for place, node in enumerate(ring)}
    wanted: defaultdict[str, list[SlotRef]] = defaultdict(list)
    for slot in slots:
        home = homes[slot.node_id]
        for ahead in range(1, min(replicas, len(ring) - 1) + 1):
            wanted[ring[(home + ahead) % len(ring)]].append(slot)
    return dict(wanted)
