"""Scenario in network namespaces: run a worker pod's preStop hook on the second of two hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.orchestrator.cluster.ray_api import draining_node_ids
from tests.deploy.chart import find_pod, render_scenario
from tests.integration.namespaces import set_up_namespaces
from tests.integration.two_hosts import ENV, LOCAL_IP, REMOTE_IP, start_cluster

_TIMEOUT_S = 60


@ray.remote(num_cpus=0)
class Busy:
    """Keeps the node in use: Ray would remove an idle draining node at once."""

    def ready(self) -> None:
        """Return once the actor runs."""


def main() -> None:
    os.environ.update(ENV)
    start_cluster(set_up_namespaces())
    (container,) = find_pod(render_scenario("default"), "worker")["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "RAY_ADDRESS": f"{LOCAL_IP}:6379"}
    (remote_id,) = [
        node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == REMOTE_IP
    ]
    strategy = NodeAffinitySchedulingStrategy(remote_id, soft=False)
    busy = Busy.options(scheduling_strategy=strategy).remote()
    ray.get(busy.ready.remote(), timeout=_TIMEOUT_S)
    start_s = time.monotonic()
    with subprocess.Popen(["ip", "netns", "exec", "remote", *command], env=env) as hook:
        while not draining_node_ids() and time.monotonic() < start_s + _TIMEOUT_S:
            time.sleep(0.1)
        drain_s = time.monotonic() - start_s
        hook_running = hook.poll() is None
        hook.kill()
    result = {
        "drain_s": drain_s,
        "hook_running": hook_running,
        "drained_own_node": draining_node_ids() == {remote_id},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
