"""A role's worker's view of its job. Imports no torch: the controller makes it."""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.weights.directory import WeightDirectory

TASKS_PHASE = "tasks"
"""Of a worker that has asked for tasks: from then on, one without a sign of life hangs."""


@dataclass(frozen=True)
class RoleView:
    """The job, as the controller last described it to a role's worker.

    Args:
        vault: the address of its node's vault; empty: it has none at the moment.
        buffer: of the job's rollouts; None: it has none at the moment.
        weights: where the newest version of the trainer's weights is; None: there is none yet.
    """

    vault: str = ""
    buffer: BufferAddress | None = None
    weights: WeightDirectory | None = None
