"""Ray calls without a public API or with rough edges: auth check, node tables, actor deaths.

The orchestrator uses Ray's private modules only here. `test_ray_api.py` names each private function
and attribute, so that a test fails with that name if an upgrade of Ray removes one. Functions that
query the cluster block for some milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import ray
from ray._private import node as ray_node
from ray._private import ray_constants, services, worker
from ray._private import state as ray_state
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
from ray._private.runtime_env import packaging
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    RayActorError,
    RayError,
)
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cluster.addresses import CHECK_ALIVE_RPC, only_given_address
from rayzero.orchestrator.policies.placement import Capacity
from rayzero.workers.fork_server import SETUP_SCRIPT

T = TypeVar("T")

ACTOR_LOST = (RayActorError, ActorUnschedulableError, ActorPlacementGroupRemoved)
"""Raised by a call of an actor whose process or node is lost or unreachable."""

_HEAD_RESOURCE = "node:__internal_head__"  # Ray gives only the head node this resource
ON_HEAD = {_HEAD_RESOURCE: 0.001}
"""The resources of a detached actor on the head node. An actor that is placed by the node's id
could not start again when the head comes back, because the new node has another id."""
CONTROLLER_RESOURCE = "rayzero_controller"
"""A custom resource of nodes that are reserved for the processes of jobs."""
_LOOPBACK = "127.0.0.1"
_CONNECT_RETRIES = {
    "raylet_client_connect_timeout_milliseconds": 20,
    "raylet_client_num_connect_attempts": 500,
}
"""Retries every 20 ms instead of every second: the raylet's first attempt to connect to its own
object store is often too early."""
GONE_TIMEOUT_S = 3.0
_PING_INTERVAL_S = 0.05
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes include|$)")


def local_head_addresses() -> set[str]:
    """Returns the addresses of the clusters whose head node runs on this machine."""
    addresses: set[str] = services.find_gcs_addresses()  # type: ignore[no-untyped-call]
    return addresses


class _BareHead(ray_node.Node):
    """A head node on the loopback interface, without processes that a job on one machine does not
    need: the log monitor, the dashboard, and the autoscaler's monitor, which also takes a second to
    end. With a fork server, `prepares` is the path of the script that forks workers."""

    newest: _BareHead | None = None
    prepares: str | None = None

    def __init__(self, ray_params: Any, **options: Any) -> None:
        _BareHead.newest = self
        ray_params.update(no_monitor=True, include_log_monitor=False, node_ip_address=_LOOPBACK)
        if self.prepares is not None:
            ray_params.update(setup_worker_path=self.prepares)
        super().__init__(ray_params, **options)

    def start_api_server(self, **_: Any) -> None:
        self._webui_url = ""


def start_head(object_store_bytes: int, *, forks: bool) -> None:
    """Calls `ray.init` for a cluster on this machine alone. May raise a plain Exception, as Ray
    does.

    Args:
        forks: this process's environment has the address of a fork server.
    """
    _BareHead.prepares = SETUP_SCRIPT if forks else None
    original = ray_node.Node
    ray_node.Node = _BareHead  # type: ignore[assignment, misc]
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=object_store_bytes,
            _system_config=_CONNECT_RETRIES | {"prestart_worker_first_driver": False},
        )
    finally:
        ray_node.Node = original  # type: ignore[misc]


def join_cluster(address: str) -> None:
    """Calls `ray.init` for the running cluster at `address`, even if that is `auto` and RAY_ADDRESS
    is set. Raises ConnectionError, ValueError, RuntimeError."""
    is_loopback = address.startswith(f"{_LOOPBACK}:") and address in local_head_addresses()
    resolve = services.resolve_ip_for_localhost
    # Ray would replace the address by one on which a head of `start_head` does not listen.
    if is_loopback:
        services.resolve_ip_for_localhost = lambda host: host
    try:
        with only_given_address():
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=_LOOPBACK if is_loopback else None,
            )
    finally:
        services.resolve_ip_for_localhost = resolve


def connected_address() -> str:
    """Returns host:port of the head of the cluster to which this process is connected."""
    return str(ray.get_runtime_context().gcs_address)


def head_pids() -> list[int]:
    """Returns the ids of running processes of `start_head`, even if that was interrupted."""
    processes = {} if _BareHead.newest is None else _BareHead.newest.all_processes
    started = [info.process for infos in processes.values() for info in infos]
    return [process.pid for process in started if process.poll() is None]


def stop_ray() -> None:
    """Closes the connection to Ray, and ends the processes of `start_head`. Idempotent."""
    ray.shutdown()
    _BareHead.newest = None


def stop_error_printer() -> None:
    """Stops the thread of `ray.init` that prints the cluster's errors to stdout even with
    `log_to_driver=False`. `ray.shutdown` does the same again, which is harmless."""
    with suppress(AttributeError):  # other versions of Ray: their errors are printed
        worker.global_worker.threads_stopped.set()
        worker.global_worker.gcs_error_subscriber.close()  # type: ignore[attr-defined]


def visit_uploaded_files(
    folder: Path, is_left_out: Callable[[Path], bool], visit: Callable[[Path], object]
) -> None:
    """Calls `visit` with every path that Ray would upload of a working directory, except paths for
    which `is_left_out` returns True. A folder that is left out is not entered."""
    defaults = packaging._get_excludes(folder, ray_constants.get_runtime_env_default_excludes())
    uses_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    silent = logging.Logger("rayzero.upload", logging.CRITICAL)

    def is_excluded(path: Path) -> bool:
        return defaults(path) or is_left_out(path)

    packaging._dir_travel(folder, [is_excluded], visit, uses_gitignore, silent)


def auth_headers() -> dict[str, str]:
    """Returns HTTP headers for requests to the dashboard; none without token authentication."""
    return dict(get_auth_headers_if_auth_enabled({}))


def dashboard_address() -> str:
    """Returns host:port of the connected cluster's dashboard; an empty string if it has none."""
    space = ray_constants.KV_NAMESPACE_DASHBOARD
    address = _internal_kv_get(ray_constants.DASHBOARD_ADDRESS, namespace=space)
    return address.decode() if address else ""


def log_folder() -> str:
    """Returns the folder of the logs of Ray's processes on this node."""
    return str(worker.global_worker.node.get_logs_dir_path())  # type: ignore[union-attr]


class AuthRefusedError(ConfigError):
    """The cluster rejected the auth token."""


def check_auth(address: str, limit_s: float) -> bool:
    """Checks the auth token with one RPC to the head at host:port, within the time limit.
    `ray.init` would retry a rejected token for 20 s and then report that the cluster does not
    respond. Returns False if another gRPC server listens there; all other errors are left to
    `ray.init`. Raises AuthRefusedError if the token is rejected or missing."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True
    import grpc  # slow to import

    headers = get_auth_headers_if_auth_enabled({})
    metadata = tuple((key.lower(), value) for key, value in headers.items())
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE_RPC)(b"", timeout=limit_s, metadata=metadata)
            return True
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                return error.code() is not grpc.StatusCode.UNIMPLEMENTED
    problem = "rejected the auth token" if metadata else "requires an auth token, and none is set"
    raise AuthRefusedError(
        f"the Ray cluster at {address!r} {problem}",
        allowed="the token that its head node was started with",
        fix="set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
    )


@dataclass(frozen=True)
class NodeTable:
    """The alive nodes at one moment, by node id: all resources of a node (`capacity`), and the
    unreserved ones (`free`). Ray's view of the latter lags by some tenths of a second."""

    capacity: dict[str, Capacity]
    free: dict[str, Capacity]

    @property
    def all_capacities(self) -> list[Capacity]:
        return list(self.capacity.values())

    @property
    def total_free(self) -> Capacity:
        free = self.free.values()
        return Capacity(sum(node.cpus for node in free), sum(node.gpus for node in free))


def node_capacities() -> dict[str, Capacity]:
    """Returns the resources of the alive nodes, by id."""
    return {
        node["NodeID"]: _to_capacity(node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }


def node_snapshot() -> NodeTable:
    capacity = node_capacities()
    free = ray_state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return NodeTable(capacity, {node: _to_capacity(free.get(node, {})) for node in capacity})


def node_names() -> dict[str, str]:
    """Returns the host names of all nodes, including lost ones, by id."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerHostname"] for node in nodes}


def head_node_id() -> str | None:
    """Returns the id of the head node; None if the cluster has no live head node."""
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and _HEAD_RESOURCE in node["Resources"]:
            return str(node["NodeID"])
    return None


def controller_resources() -> dict[str, float]:
    """Returns the resources of the actor that is a job's process. They place it on a node that
    offers `CONTROLLER_RESOURCE`, so that it outlives the head; on the head if no node does."""
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"] and CONTROLLER_RESOURCE in node["Resources"]:
            return {CONTROLLER_RESOURCE: 0.001}
    return ON_HEAD


def ask_nodes(
    question: Callable[[], T], nodes: Iterable[str], limit_s: float
) -> dict[str, T | RayError]:
    """Calls a function in a process on each of these nodes. Returns the answers by node id; the
    error instead, for a node that has not answered within the limit."""
    task = ray.remote(question)
    calls = {}
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        options = task.options(num_cpus=0, max_retries=0, scheduling_strategy=place)
        calls[node] = options.remote()
    until_s = monotonic() + limit_s
    answers: dict[str, T | RayError] = {}
    for node, reply in calls.items():
        try:
            answers[node] = ray.get(reply, timeout=max(0.0, until_s - monotonic()))
        except RayError as error:
            answers[node] = error
    return answers


def draining_node_ids() -> frozenset[str]:
    """Returns the ids of nodes that accept no new work and will be removed, because they are
    drained, preempted or idle."""
    return frozenset(ray_state.state.get_draining_nodes())


def _to_capacity(resources: dict[str, float]) -> Capacity:
    return Capacity(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def death_cause(error: RayError) -> str:
    """Returns the cause of an actor's death from Ray's error, without identifiers and advice."""
    text = " ".join(line for line in str(error).splitlines() if not line.startswith("\t"))
    match = _EXIT_DETAIL.search(text)
    return match.group(1) if match else text


async def wait_gone(methods: Iterable[Any]) -> None:
    """Waits until no killed actor responds any more, for at most `GONE_TIMEOUT_S`. `methods` has a
    method without side effects of each actor."""
    with suppress(TimeoutError):
        async with asyncio.timeout(GONE_TIMEOUT_S):
            await asyncio.gather(*(await_end(method, _PING_INTERVAL_S) for method in methods))


async def await_end(method: Any, interval_s: float) -> RayError:
    """Calls a method without side effects of an actor again and again, until the actor's process
    ends or cannot be reached. Returns Ray's error."""
    while True:
        try:
            await method.remote()
        except RayError as error:
            return error
        await asyncio.sleep(interval_s)
