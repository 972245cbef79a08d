"""preStop hook of a head pod: stops the jobs of a cluster, each with a last checkpoint.

`python -m rayzero.orchestrator.job.prestop SECONDS`. The jobs' processes run on the head node;
without them no worker would write a last checkpoint.
"""

from __future__ import annotations

import os
import sys
from time import monotonic, sleep

from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job.client import JobProcess, JobProcessLostError, list_running

_POLL_S = 0.2
_CALL_TIMEOUT_S = 5.0


def stop_all_jobs(limit_s: float) -> tuple[list[str], list[str]]:
    """Stops every job of the connected cluster, each with a last checkpoint.

    Returns:
        The names of the jobs that have ended, and of those that have not within `limit_s`.
    """
    deadline_s = monotonic() + limit_s
    jobs = list_running()
    for job in jobs:
        job.request_stop()
    running = jobs
    while (running := [job for job in running if not _has_ended(job)]) and monotonic() < deadline_s:
        sleep(_POLL_S)
    late = [job.name for job in running]
    return [job.name for job in jobs if job.name not in late], late


def _has_ended(job: JobProcess) -> bool:
    try:
        return job.call(JobActor.spec, timeout_s=_CALL_TIMEOUT_S) is None
    except JobProcessLostError:
        return True
    except JobFailedError:
        return False  # busy, or being restarted


def main() -> int:
    cluster = connect(os.environ.get("RAY_ADDRESS") or "auto")
    try:
        ended, running = stop_all_jobs(float(sys.argv[1]))
    finally:
        cluster.close()
    for name in ended:
        print(f"{name}: stopped", flush=True)
    for name in running:
        print(f"{name}: did not stop in time", file=sys.stderr, flush=True)
    return 1 if running else 0


if __name__ == "__main__":
    sys.exit(main())
