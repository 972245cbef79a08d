"""The counts of a buffer of rollouts. Imports no torch, because the controller reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutCounts:
    """The contents of a buffer at one moment, and its totals since it was opened. Tuples have one
    value for each stage.

    Args:
        waiting: tasks that no worker has leased.
        leased: tasks that a worker has leased.
        ready: tasks that have all their samples and are not in the log yet.
        read: prompts in the log, including those dropped from it, from the job's first prompt on.
        published: finished steps of the newest weights that generators can have.
        nbytes: size of the prompts and samples.
        max_bytes: the size beyond which no further prompt is begun.
        max_version_lag: as in `RolloutPlan`.
        lag_mean, lag_max: by how many steps the weights that made the newest batch's samples are
            older than the weights trained on them; None before the first batch.
        expired: total of expired leases.
        wait_s: total of seconds that workers have waited for tasks.
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
