"""The view that a role's worker has of its job. Imports no torch: the controller makes it."""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.weights.directory import WeightDirectory

TASKS_PHASE = "tasks"
"""The phase of a worker that has asked for tasks. In this phase, a worker that gives no sign of
life counts as hanging."""


@dataclass(frozen=True)
class RoleView:
    """The job, as the controller last described it to a role's worker.

    Args:
        vault: the address of the node's vault; empty: there is none at the moment.
        buffer: the buffer of the job's rollouts; None: there is none at the moment.
        weights: the location of the newest version of the trainer's weights; None: none yet.
    """

    vault: str = ""
    buffer: BufferAddress | None = None
    weights: WeightDirectory | None = None
