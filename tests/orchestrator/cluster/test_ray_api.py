"""The private Ray APIs that rayzero uses, so that a Ray upgrade without one fails a test."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import ray
from ray._private.parameter import RayParams
from ray._private.runtime_env.context import RuntimeEnvContext

PRIVATE = """
ray._private.node: Node.start_api_server Node.get_logs_dir_path
ray._private.parameter: RayParams.update
ray._private.services: find_gcs_addresses resolve_ip_for_localhost
ray._private.worker: global_worker
ray._private.state: available_resources_per_node state.get_draining_nodes
ray._private.authentication.http_token_authentication: get_auth_headers_if_auth_enabled
ray.experimental.internal_kv: _internal_kv_get _internal_kv_put _internal_kv_list _internal_kv_del
ray._raylet: GcsClient
ray._private.ray_constants: DASHBOARD_ADDRESS KV_NAMESPACE_DASHBOARD
ray._private.ray_constants: get_runtime_env_default_excludes
ray._private.runtime_env.packaging: _get_excludes _dir_travel
"""


@pytest.mark.parametrize("line", PRIVATE.split("\n")[1:-1])
def test_private_ray_api_exists(line: str) -> None:
    module, _, names = line.partition(": ")
    for name in names.split():
        attrgetter(name)(import_module(module))


def test_script_that_prepares_workers_can_be_replaced() -> None:
    """`workers/fork_server.py` does what it does, for an environment that has only variables."""
    assert hasattr(RayParams(), "setup_worker_path")
    assert (Path(ray.__file__).parent / "_private/workers/setup_worker.py").exists()
    context = vars(RuntimeEnvContext())
    assert {name for name, value in context.items() if value} == {"py_executable"}
    assert "env_vars" in context
