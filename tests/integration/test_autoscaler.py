"""Ray's autoscaler adds nodes for pending reservations and removes idle ones. This module is also
the scenario, run in namespaces: Ray's fake provider starts each node as a raylet on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.autoscaler._private import fake_multi_node

from tests.integration.namespaces import run_command, run_in_namespaces, set_up_namespaces
from tests.integration.tiny import LIMIT_S, groups, next_worker, request

ADDRESS = "127.0.0.1:6379"
HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
OBJECT_STORE_BYTES = 80 * 2**20


def start_cluster(folder: Path) -> None:
    """Start a head without CPUs and an autoscaler that may add nodes with two CPUs each."""
    config = {
        "cluster_name": "fake",
        "max_workers": 4,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": ADDRESS,
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "two_cpus": {
                "resources": {"CPU": 2, "object_store_memory": OBJECT_STORE_BYTES},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 4,
            },
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.05,
        "docker": {},
        "file_mounts": {},
        **{f"{prefix}setup_commands": [] for prefix in ("", "head_", "worker_")},
        **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
        **{key: [] for key in ("initialization_commands", "cluster_synced_files")},
    }
    path = folder / "autoscaler.json"
    path.write_text(json.dumps(config))
    _mount_default_config(folder, path)
    command = [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--head", "--disable-usage-stats", "--include-dashboard=false"),
        "--include-log-monitor=false",
        *("--node-ip-address=127.0.0.1", "--port=6379", "--num-cpus=0"),
        *(f"--temp-dir={folder / 'ray'}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
        f"--autoscaling-config={path}",
    ]
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    }
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, timeout=200)


def _mount_default_config(folder: Path, config: Path) -> None:
    """Provide the default config that the autoscaler reads, which Ray's wheel lacks."""
    package = Path(fake_multi_node.__file__).parent
    shutil.copytree(package, folder / "fake_multi_node")
    shutil.copy(config, folder / "fake_multi_node" / "example.yaml")
    run_command("mount", "--bind", str(folder / "fake_multi_node"), str(package))


async def scale_up_and_down(folder: Path) -> dict[str, Any]:
    """Start two to four workers, which needs two nodes, then scale down to two workers."""
    async with groups(folder) as (workers, vaults):
        started = list(await workers.start_workers(request(2, 4)))
        initial_count = len(started)
        while len(started) < 4:
            started.append(await next_worker(workers))
        await vaults.open(sorted({worker.node_id for worker in started}))
        kept_node = Counter(worker.node_id for worker in started).most_common(1)[0][0]
        workers.resize(2, 2)
        for worker in started:
            if worker.node_id != kept_node:
                await workers.release_worker(worker.index)
                await vaults.close(worker.node_id)
        async with asyncio.timeout(LIMIT_S):
            while worker_nodes() != {kept_node}:
                await asyncio.sleep(0.2)
        nodes = len({worker.node_id for worker in started})
        return {"initial_workers": initial_count, "nodes": nodes}


def worker_nodes() -> set[str]:
    return {n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")}


@pytest.mark.slow
def test_autoscaler_adds_nodes_for_pending_reservations_and_removes_idle_nodes() -> None:
    result = run_in_namespaces(__name__)
    assert 2 <= result["initial_workers"] <= 4
    assert result["nodes"] == 2


def main() -> None:
    folder = set_up_namespaces()
    start_cluster(folder)
    ray.init(address=ADDRESS, log_to_driver=False)
    print(json.dumps(asyncio.run(scale_up_and_down(folder))))


if __name__ == "__main__":
    main()
