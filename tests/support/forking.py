"""Workers that are forked, as those of a local cluster, in clusters that tests start.

A worker that imports torch itself takes two more CPU seconds to start. Clusters without a fork
server: tests/integration/test_two_hosts.py, tests/benchmarks/test_recovery.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rayzero.orchestrator.cluster.local_cluster import ForkServer
from rayzero.workers.fork_server import ADDRESS_VARIABLE


@contextmanager
def fork_server() -> Iterator[None]:
    """For the clusters that this process starts meanwhile."""
    server = ForkServer({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLE, server.address)
        try:
            yield
        finally:
            server.stop()
