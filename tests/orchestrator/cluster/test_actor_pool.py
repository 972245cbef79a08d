"""What a worker's process is started with, by its node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.cluster.actor_pool import ActorPool, Reservation
from rayzero.orchestrator.policies.placement import Capacity, ResourceRequest
from tests.integration.tiny import make_spec


class RecordedActor:
    """Ray's handle of an actor's class."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []

    def options(self, **options: Any) -> RecordedActor:
        self._options = options
        return self

    def remote(self, spec: Any, index: int) -> None:
        self.started.append(self._options)


@pytest.mark.parametrize(
    ("cpus", "gpus", "threads", "expected"),
    [(208, 8, 0, 26), (26, 8, 0, 3), (4, 8, 0, 1), (6, 0, 0, 6), (208, 8, 4, 4)],
)
def test_threads_are_the_nodes_unless_given(
    tmp_path: Path, cpus: float, gpus: float, threads: int, expected: int
):
    env = {"NCCL_DEBUG": "INFO"}
    pool: Any = ActorPool(make_spec(tmp_path), None, None, object)  # type: ignore[arg-type]
    pool._actor, pool._capacities = RecordedActor(), {"node": Capacity(cpus, gpus)}
    need = ResourceRequest(1, 1, 1.0, 1.0, 30.0, threads, env)
    pool._start(Reservation(None), "node", need)  # type: ignore[arg-type]
    (options,) = pool._actor.started
    assert (options["num_cpus"], options["num_gpus"]) == (1, 1)
    assert options["runtime_env"]["env_vars"] == {**env, "OMP_NUM_THREADS": str(expected)}
