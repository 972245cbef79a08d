"""What Ray knows about the cluster's nodes, in the policies' words.

Every call asks the head once, and blocks for that long: some milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray._private import state as ray_state  # who drains and what is free where: nowhere public

from rayzero.orchestrator.policies.placement import Capacity


@dataclass(frozen=True)
class Nodes:
    """The living nodes at one moment.

    Args:
        whole: what each node has, by its id.
        free: what of that nobody has reserved; Ray's own view, late by some tenths of a second.
    """

    whole: dict[str, Capacity]
    free: dict[str, Capacity]

    @property
    def capacities(self) -> list[Capacity]:
        return list(self.whole.values())

    @property
    def all_free(self) -> Capacity:
        """What is free in the cluster as a whole."""
        free = self.free.values()
        return Capacity(sum(one.cpus for one in free), sum(one.gpus for one in free))


def look() -> Nodes:
    """The nodes as they are now."""
    whole = {
        node["NodeID"]: _capacity(node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }
    free = ray_state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return Nodes(whole, {node: _capacity(free.get(node, {})) for node in whole})


def alive() -> frozenset[str]:
    """The ids of the living nodes."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return frozenset(node["NodeID"] for node in nodes if node["Alive"])


def draining() -> frozenset[str]:
    """The ids of the nodes that take nothing new and will go: drained by hand, preempted, idle."""
    return frozenset(ray_state.state.get_draining_nodes())


def _capacity(resources: dict[str, float]) -> Capacity:
    return Capacity(resources.get("CPU", 0.0), resources.get("GPU", 0.0))
