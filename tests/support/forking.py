"""Ray's workers are forked, as those of a local cluster, in clusters that tests start.

Each worker that starts by itself takes one to three more CPU seconds. Clusters without a fork
server: tests/integration/test_two_hosts.py, benchmarks/soak.py with several nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rayzero.orchestrator.cluster.local_cluster import ForkServer
from rayzero.workers.fork_server import ADDRESS_VARIABLE, SETUP_SCRIPT

_START = f"""
import sys
from ray._private import ray_constants
ray_constants.SETUP_WORKER_FILENAME = {SETUP_SCRIPT!r}
from ray.scripts.scripts import main
sys.argv[0] = "ray"
main()
"""
RAY_WITH_FORKS = (sys.executable, "-c", _START)
"""As the program `ray`, for `ray start` with the fork server's address in its environment."""


@contextmanager
def fork_server() -> Iterator[None]:
    """For the clusters that this process starts meanwhile."""
    from ray._private import ray_constants  # it reads the environment

    server = ForkServer({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLE, server.address)
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", SETUP_SCRIPT)
        try:
            yield
        finally:
            server.stop()
