"""Run in namespaces of its own: what a worker pod's preStop does, on the other of two hosts."""

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
from tests.deploy.chart import pod_of, rendered
from tests.integration.namespaces import set_up_namespaces
from tests.integration.two_hosts import ENV, LOCAL_IP, REMOTE_IP, start_cluster

_LIMIT_S = 60


@ray.remote(num_cpus=0)
class Busy:
    """What is on the node that is to end."""

    def ready(self) -> None:
        """Returns when it runs."""


def main() -> None:
    os.environ.update(ENV)
    start_cluster(set_up_namespaces())
    (worker,) = pod_of(rendered("default"), "worker")["spec"]["containers"]
    ended = worker["lifecycle"]["preStop"]["exec"]["command"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    own = os.environ | {"PATH": path, "RAY_ADDRESS": f"{LOCAL_IP}:6379"}
    (there,) = [one["NodeID"] for one in ray.nodes() if one["NodeManagerAddress"] == REMOTE_IP]
    strategy = NodeAffinitySchedulingStrategy(there, soft=False)
    busy = Busy.options(scheduling_strategy=strategy).remote()  # an idle node would end at once
    ray.get(busy.ready.remote(), timeout=_LIMIT_S)
    begun = time.monotonic()
    with subprocess.Popen(["ip", "netns", "exec", "remote", *ended], env=own) as hook:
        while not draining_node_ids() and time.monotonic() < begun + _LIMIT_S:
            time.sleep(0.1)
        told_s = time.monotonic() - begun
        holds = hook.poll() is None
        hook.kill()
    print(json.dumps({"told_s": told_s, "holds": holds, "right": draining_node_ids() == {there}}))


if __name__ == "__main__":
    main()
