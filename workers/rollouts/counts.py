"""The numbers of a buffer of rollouts. Imports no torch: the controller reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutCounts:
    """A buffer at one moment, and its totals since it was opened. Tuples have a value a stage.

    Args:
        waiting: tasks that no worker has; `leased`: those that one has.
        ready: tasks with all their samples that are not in the log yet.
        read: prompts of the log, from the job's first one on.
        published: finished steps of the newest weights that generators can have.
        nbytes, max_bytes: of prompts and samples, and beyond which no further prompt is begun.
        max_version_lag: as in `RolloutPlan`.
        lag_mean, lag_max: steps that the weights of the newest batch's samples were older than
            those that are trained on them; None before the first batch.
        expired: leases whose limit has passed, in all.
        wait_s: seconds that workers have waited for tasks, in all.
    """

    waiting: tuple[int, ...]
    leased: tuple[int, ...]
    ready: int
    read: int
    published: int
    nbytes: int
    max_bytes: int
    max_version_lag: int
    lag_mean: float | None
    lag_max: int | None
    expired: tuple[int, ...]
    wait_s: tuple[float, ...]
