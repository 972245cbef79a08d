"""Run in namespaces of its own: a cluster whose autoscaler adds and removes nodes.

Ray's fake provider starts each node as a raylet on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler._private import fake_multi_node

from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.policies.placement import ResourceRequest
from tests.integration.namespaces import command, prepare
from tests.integration.tiny import TinyWorker, setup

ADDRESS = "127.0.0.1:6379"
HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
STORE_BYTES = 80 * 2**20


def start(folder: Path) -> None:
    """A head without CPUs, and an autoscaler that may add nodes of two CPUs each."""
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
            "two": {
                "resources": {"CPU": 2, "object_store_memory": STORE_BYTES},
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
        **{f"{which}setup_commands": [] for which in ("", "head_", "worker_")},
        **{f"{which}_start_ray_commands": [] for which in ("head", "worker")},
        **{key: [] for key in ("initialization_commands", "cluster_synced_files")},
    }
    path = folder / "autoscaler.json"
    path.write_text(json.dumps(config))
    _supply_defaults(folder, path)
    start = [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--head", "--disable-usage-stats", "--include-dashboard=false"),
        *("--node-ip-address=127.0.0.1", "--port=6379", "--num-cpus=0"),
        *(f"--temp-dir={folder / 'ray'}", f"--object-store-memory={STORE_BYTES}"),
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
    subprocess.run(start, env=env, check=True, stdout=subprocess.DEVNULL, timeout=200)


def _supply_defaults(folder: Path, config: Path) -> None:
    """The autoscaler reads a file of defaults that Ray's wheel lacks: here it finds our config."""
    there = Path(fake_multi_node.__file__).parent
    shutil.copytree(there, folder / "fake_multi_node")
    shutil.copy(config, folder / "fake_multi_node" / "example.yaml")
    command("mount", "--bind", str(folder / "fake_multi_node"), str(there))


async def grow_and_shrink(folder: Path) -> dict[str, Any]:
    """Two workers at least, six wished for: three nodes come. Then two are enough."""
    began = time.monotonic()
    vaults = VaultGroup(setup(folder))
    workers = WorkerGroup(setup(folder), Clock(), True, vaults, TinyWorker)
    try:
        came = list(await workers.start_workers(ResourceRequest(2, 6, 1.0, 0.0, 150.0)))
        at_first, placed_s = len(came), time.monotonic() - began
        while len(came) < 6:
            came.append(await asyncio.wait_for(workers.next_worker(), 150))
        grown_s = time.monotonic() - began
        await vaults.open(sorted({one.node_id for one in came}))
        stay = Counter(one.node_id for one in came).most_common(1)[0][0]
        workers.resize(2, 2)
        for one in came:
            if one.node_id != stay:
                await workers.release_worker(one.index)
                await vaults.close(one.node_id)
        until = time.monotonic() + 150
        while (left := working_nodes()) != {stay} and time.monotonic() < until:
            await asyncio.sleep(0.2)
        return {
            "at_first": at_first,
            "placed_s": placed_s,
            "grown_s": grown_s,
            "nodes": len({one.node_id for one in came}),
            "left": len(left),
            "shrunk_s": time.monotonic() - began - grown_s,
        }
    finally:
        await workers.release()
        await vaults.release()


def working_nodes() -> set[str]:
    return {n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")}


def main(scenario: str) -> None:
    folder = prepare()
    start(folder)
    ray.init(address=ADDRESS, log_to_driver=False)
    print(json.dumps(asyncio.run({"grow_and_shrink": grow_and_shrink}[scenario](folder))))


if __name__ == "__main__":
    main(sys.argv[1])
