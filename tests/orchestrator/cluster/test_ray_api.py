"""The private Ray APIs that rayzero uses, so that a Ray upgrade without one fails a test."""

from __future__ import annotations

from importlib import import_module

import pytest

PRIVATE = (
    ("ray._private.node", "Node.start_api_server"),
    ("ray._private.parameter", "RayParams.update"),
    ("ray._private.services", "find_gcs_addresses"),
    ("ray._private.services", "resolve_ip_for_localhost"),
    ("ray._private.worker", "global_worker"),
    ("ray._private.state", "available_resources_per_node"),
    ("ray._private.state", "state.get_draining_nodes"),
    (
        "ray._private.authentication.http_token_authentication",
        "get_auth_headers_if_auth_enabled",
    ),
    ("ray.experimental.internal_kv", "_internal_kv_get"),
    ("ray.experimental.internal_kv", "_internal_kv_put"),
    ("ray.experimental.internal_kv", "_internal_kv_list"),
    ("ray.experimental.internal_kv", "_internal_kv_del"),
    ("ray._raylet", "GcsClient"),
    ("ray._private.ray_constants", "DASHBOARD_ADDRESS"),
    ("ray._private.ray_constants", "KV_NAMESPACE_DASHBOARD"),
    ("ray._private.node", "Node.get_logs_dir_path"),
    ("ray._private.ray_constants", "get_runtime_env_default_excludes"),
    ("ray._private.runtime_env.packaging", "_get_excludes"),
    ("ray._private.runtime_env.packaging", "_dir_travel"),
)


@pytest.mark.parametrize(("module", "name"), PRIVATE, ids=lambda value: value)
def test_private_ray_api_exists(module: str, name: str) -> None:
    value = import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
