"""A real Ray head with a dashboard, shared by the integration tests of jobs."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterator

import pytest
import ray
from ray.util import list_named_actors
from ray.util.placement_group import placement_group_table

from tests.integration.nodes import Nodes
from tests.support.forking import fork_server
from tests.support.token_head import TokenHead


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests may be coroutines: each runs in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


CPUS = 4  # more than the machine may have: test workers hardly compute
Head = TokenHead


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """Without token authentication."""
    head = TokenHead(tmp_path_factory.mktemp("head"), CPUS, has_token=False)
    try:
        head.start()
        yield head
    finally:
        head.close()


@pytest.fixture(scope="module")
def connected(head: Head) -> Iterator[None]:
    """This process is a driver; the jobs of a module share the connection."""
    ray.init(address=head.address, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def no_leaks(connected: None, head: Head) -> Iterator[None]:
    """Check after a test that no actor, placement group, CPU or process is leaked."""
    yield
    deadline = time.monotonic() + 60
    while (leaks := find_leaks(head)) and time.monotonic() < deadline:
        time.sleep(0.3)
    for actor in list_named_actors(all_namespaces=True) if leaks else []:
        ray.kill(ray.get_actor(**actor))  # later tests need the CPUs
    assert leaks == []


def find_leaks(head: Head) -> list[str]:
    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    actors = list_named_actors(all_namespaces=True)
    cpus = ray.available_resources().get("CPU")
    processes = head.processes("ray::JobActor", "ray::WorkerActor", "ray::VaultActor")
    leaks = [f"group {group['name']}" for group in groups]
    server = {"name": "command_server", "namespace": "rayzero"}  # lives as long as the cluster
    leaks += [str(it) for it in actors if it["namespace"] == "rayzero" and it != server]
    leaks += [str(process) for process in processes]
    return [*leaks, f"{cpus} CPUs"] if leaks or cpus != CPUS else []


@pytest.fixture(scope="module")
def node_cluster() -> Iterator[Nodes]:
    """A separate cluster with short health-check timeouts, to detect lost nodes quickly."""
    with fork_server(launches=False), pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "initial_delay_ms": "1000",
            "period_ms": "1000",
            "timeout_ms": "1000",
            "failure_threshold": "3",
        }.items():
            patch.setenv(f"RAY_health_check_{name}", value)
        cluster = Nodes()
        yield cluster
        cluster.close()


@pytest.fixture
def nodes(node_cluster: Nodes) -> Iterator[Nodes]:
    """The module's cluster of several nodes, for one test."""
    yield node_cluster
    node_cluster.end_test()
