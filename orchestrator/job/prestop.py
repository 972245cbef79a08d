"""Ends a cluster's jobs before it: `python -m rayzero.orchestrator.job.prestop SECONDS`.

It is what a head pod does before its end (preStop): the jobs' own processes are there, and without
them no worker would write a last checkpoint.
"""

from __future__ import annotations

import os
import sys
from time import monotonic, sleep
from typing import Any

from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job import client as reach

_POLL_S = 0.2


_CALL_TIMEOUT_S = 5.0


def stop_all_jobs(limit_s: float) -> tuple[list[str], list[str]]:
    """Stops every job of the cluster that this process has joined, each with a last checkpoint.

    Returns:
        The names of those that have ended, and of those that did not within so many seconds.
    """
    until_s = monotonic() + limit_s
    asked = {
        name: actor
        for name in reach.list_running()
        if (actor := reach.find_job_actor(name)) is not None
    }
    for actor in asked.values():
        reach.call_async(actor, "stop")
    left = dict(asked)
    while (left := {name: one for name, one in left.items() if not _has_ended(one)}) and (
        monotonic() < until_s
    ):
        sleep(_POLL_S)
    return sorted(asked.keys() - left.keys()), sorted(left)


def _has_ended(actor: Any) -> bool:
    try:
        return reach.call(actor, "spec", timeout_s=_CALL_TIMEOUT_S) is None
    except reach.JobProcessLostError:
        return True
    except (reach.JobUnavailableError, JobFailedError):
        return False  # busy, or being started anew: it has not said that it ended


def main() -> int:
    cluster = connect(os.environ.get("RAY_ADDRESS") or "auto")
    try:
        ended, left = stop_all_jobs(float(sys.argv[1]))
    finally:
        cluster.close()
    for name in ended:
        print(f"{name}: stopped", flush=True)
    for name in left:
        print(f"{name}: it did not stop in time", file=sys.stderr, flush=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
