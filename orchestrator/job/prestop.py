"""preStop hook of a head pod: stops the jobs of a cluster, each with a last checkpoint.

`python -m rayzero.orchestrator.job.prestop SECONDS [unless-workers-stay]`. The jobs' processes run
on the head node; without them no worker would write a last checkpoint.

With `unless-workers-stay`, jobs are stopped only if all other nodes are drained, too, as in an
uninstall or a suspended job. Otherwise the head is expected to come back with its state, and the
jobs continue.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from time import monotonic, sleep

from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.cluster.ray_api import (
    draining_node_ids,
    head_node_id,
    node_capacities,
)
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job.client import JobProcess, JobProcessLostError, list_running

_POLL_S = 0.2
_CALL_TIMEOUT_S = 5.0


def stop_all_jobs(limit_s: float) -> int:
    """Stops all jobs of the connected cluster, with last checkpoints. Returns the exit code."""
    deadline_s = monotonic() + limit_s
    running = list_running()
    for job in running:
        job.request_stop()
    while running and monotonic() < deadline_s:
        for job in [job for job in running if _has_ended(job)]:
            print(f"{job.name}: stopped", flush=True)
            running.remove(job)
        sleep(_POLL_S)
    for job in running:
        print(f"{job.name}: did not stop in time", file=sys.stderr, flush=True)
    return 1 if running else 0


def all_nodes_leave(limit_s: float) -> bool:
    """Returns whether every node of the connected cluster except the head begins to drain within
    the limit."""
    deadline_s = monotonic() + limit_s
    while staying := node_capacities().keys() - {head_node_id()} - draining_node_ids():
        if monotonic() > deadline_s:
            print(f"{len(staying)} nodes stay: no job is stopped", flush=True)
            return False
        sleep(_POLL_S)
    return True


def _has_ended(job: JobProcess) -> bool:
    try:
        return job.call(JobActor.spec, timeout_s=_CALL_TIMEOUT_S) is None
    except JobProcessLostError:
        return True
    except JobFailedError:
        return False  # busy, or being restarted


def main() -> int:
    with closing(connect(os.environ.get("RAY_ADDRESS") or "auto")):
        deadline_s = monotonic() + float(sys.argv[1])
        if "unless-workers-stay" in sys.argv and not all_nodes_leave(float(sys.argv[1]) / 4):
            return 0
        return stop_all_jobs(deadline_s - monotonic())


if __name__ == "__main__":
    sys.exit(main())
