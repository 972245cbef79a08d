"""preStop hook of a head pod: stops the jobs of a cluster, each with a last checkpoint.

`python -m rayzero.orchestrator.job.prestop SECONDS`. The jobs' processes run on the head node;
without them no worker would write a last checkpoint.
"""

from __future__ import annotations

import os
import sys
from time import monotonic, sleep
from typing import Any

from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job import client

_POLL_S = 0.2


_CALL_TIMEOUT_S = 5.0


def stop_all_jobs(limit_s: float) -> tuple[list[str], list[str]]:
    """Stops every job of the connected cluster, each with a last checkpoint.

    Returns:
        The names of the jobs that have ended, and of those that have not within `limit_s`.
    """
    deadline_s = monotonic() + limit_s
    actors = {
        name: actor
        for name in client.list_running()
        if (actor := client.find_job_actor(name)) is not None
    }
    for actor in actors.values():
        client.call_async(actor, "stop")
    running = dict(actors)
    while (
        running := {name: actor for name, actor in running.items() if not _has_ended(actor)}
    ) and monotonic() < deadline_s:
        sleep(_POLL_S)
    return sorted(actors.keys() - running.keys()), sorted(running)


def _has_ended(actor: Any) -> bool:
    try:
        return client.call(actor, "spec", timeout_s=_CALL_TIMEOUT_S) is None
    except client.JobProcessLostError:
        return True
    except (client.JobUnavailableError, JobFailedError):
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
