"""Where a replacement starts, and when: nodes that keep failing wait longer, then are avoided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayzero.orchestrator.policies.failure import HARDWARE, Fault, incidents

MAX_DELAY_S = 60.0
BLAMED_FROM = 3
"""So many hardware faults of one node within the window, and it is avoided."""


def delay_s(faults: Sequence[Fault], node_id: str, window_s: float, now_s: float) -> float:
    """How long a replacement on that node waits: 0 for its first fault, then 1, 2, 4 ... 60."""
    count = _count(faults, node_id, window_s, now_s)
    return 0.0 if count <= 1 else min(MAX_DELAY_S, 2.0 ** (count - 2))


def blamed(
    faults: Sequence[Fault], nodes: Iterable[str], window_s: float, now_s: float
) -> frozenset[str]:
    """The nodes to avoid; none when that would leave no node of the job's to go to."""
    known = frozenset(nodes)
    bad = frozenset(one for one in known if _count(faults, one, window_s, now_s) >= BLAMED_FROM)
    return bad if bad < known else frozenset()


def _count(faults: Sequence[Fault], node_id: str, window_s: float, now_s: float) -> int:
    """Hardware faults of a node. A collective that failed says nothing about who is at fault."""
    mine = [
        one
        for one in faults
        if one.worker.node_id == node_id
        and one.cause in HARDWARE
        and one.cause != "collective"
        and one.at_s > now_s - window_s
    ]
    return len(incidents(mine))
