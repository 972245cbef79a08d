"""Ray's workers are forked, as those of a local cluster, in clusters that tests start.

Each worker that starts by itself takes one to three more CPU seconds. Clusters without a fork
server: tests/integration/test_two_hosts.py, benchmarks/soak.py with several nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rayzero.orchestrator.cluster import local_cluster
from rayzero.orchestrator.cluster.local_cluster import ForkServer
from rayzero.workers.fork_server import ADDRESS_VARIABLE, SETUP_SCRIPT

_START = """
import sys
from ray._private import node, ray_constants
node.Node.start_ray_client_server = lambda self: None
if sys.argv[1]:
    ray_constants.SETUP_WORKER_FILENAME = sys.argv[1]
sys.argv[:2] = ["ray"]
from ray.scripts.scripts import main
main()
"""


def ray_start(*, forks: bool) -> tuple[str, ...]:
    """As the words `ray start`, but without a server for Ray's client, which takes a CPU second.

    Args:
        forks: whether the environment has the address of a fork server.
    """
    return sys.executable, "-c", _START, SETUP_SCRIPT if forks else "", "start"


@contextmanager
def fork_server(*, launches: bool = True) -> Iterator[None]:
    """For the clusters that this process starts meanwhile.

    Args:
        launches: whether their workers run launched scripts, whose libraries it then imports.
    """
    from ray._private import ray_constants  # it reads the environment

    with pytest.MonkeyPatch.context() as patch:
        if launches:
            modules = (*local_cluster._PRELOADED, "tests.support.launched")
            patch.setattr(local_cluster, "_PRELOADED", modules)
        server = ForkServer({})
        patch.setenv(ADDRESS_VARIABLE, server.address)
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", SETUP_SCRIPT)
        try:
            yield
        finally:
            server.stop()
