"""The workers of a job, and where their states are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rayzero.orchestrator.aio import ObservedState
from rayzero.orchestrator.control.generation import GenerationState
from rayzero.orchestrator.policies.membership import Selected, WorkerLimits, WorkerRegistry
from rayzero.orchestrator.policies.placement import assign_ranks
from rayzero.workers.messages import RankAssignment


class Members(ObservedState):
    """All workers of the job (`registry`), those that train (`generation`), and their vaults.

    Args:
        replicas: `recovery.replicas`.
    """

    def __init__(
        self, limits: WorkerLimits, replicas: int, on_change: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(on_change)
        self.registry = WorkerRegistry(limits, on_change)
        self.generation = GenerationState(on_change=on_change)
        """The newest generation. Its only writer is Rendezvous; before the start, the
        controller."""
        self.vault_addresses: Mapping[str, str] = {}
        """The address of each live vault, by node. Its only writer is VaultManager."""
        self.role_nodes: frozenset[str] = frozenset()
        """The nodes of the roles' workers. Its only writer is RolePools."""
        self._replicas = replicas

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that need a vault: the nodes of ready workers and of the roles' workers."""
        return self.role_nodes.union(self.registry.nodes)

    def assign(self, selection: Selected) -> dict[int, RankAssignment]:
        """Returns the assignments of selected workers for the next generation, by worker, in the
        order of the ranks."""
        nodes = [worker.node_id for worker in self.generation.workers]
        calls, addresses = self.registry.calls, self.vault_addresses
        return assign_ranks(selection.members, addresses, calls, nodes, self._replicas)
