"""Drain and partition of a host. This module is also the scenarios, run in namespaces: two hosts
connected by a virtual network link, which share the head; each scenario has a new remote node.

This process (the driver) and the head run on one host, 10.0.0.1. The remote host, 10.0.0.2, is a
network namespace with a raylet in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cluster.ray_api import draining_node_ids
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import Repaired, WorkersReady
from rayzero.workers.chaos.inject import FaultRecord
from tests.deploy.chart import find_pod, render_scenario
from tests.integration.namespaces import run_command, run_in_namespaces, set_up_namespaces
from tests.integration.steady_job import latest_step, running_job, wait_for, world_size
from tests.orchestrator.support import EventLog

LOCAL_IP, REMOTE_IP = "10.0.0.1", "10.0.0.2"
ENV = {
    **os.environ,
    **{f"RAY_health_check_{name}_ms": "1000" for name in ("initial_delay", "period", "timeout")},
    "RAY_health_check_failure_threshold": "3",
}
# With a separate /dev/shm. The command follows: the folder first, then the words.
_ON_REMOTE = (
    "ip",
    "netns",
    "exec",
    "remote",
    "unshare",
    "--mount",
    "sh",
    "-c",
    'ip link set lo up; mount -t tmpfs tmpfs /dev/shm; mkdir -p "$0"; exec "$@"',
)


@ray.remote(num_cpus=0)
class Busy:
    """Keeps the node in use: Ray would remove an idle draining node at once."""

    def ready(self) -> None:
        """Return once the actor runs."""


def start_head(folder: Path) -> None:
    run_command("ip", "netns", "add", "remote")
    run_command("ip", "link", "add", "cable", "type", "veth", "peer", "cable", "netns", "remote")
    run_command("ip", "addr", "add", f"{LOCAL_IP}/24", "dev", "cable")
    run_command("ip", "link", "set", "cable", "up")
    run_command("ip", "-n", "remote", "addr", "add", f"{REMOTE_IP}/24", "dev", "cable")
    run_command("ip", "-n", "remote", "link", "set", "cable", "up")
    _start_node(folder / "local", LOCAL_IP, "--head", "--port=6379", "--include-dashboard=false")
    ray.init(address=f"{LOCAL_IP}:6379", log_to_driver=False, _node_ip_address=LOCAL_IP)


def start_remote_node(folder: Path) -> str:
    """Start a node on the remote host, instead of the previous scenario's, and return its id."""
    pids = ("ip", "netns", "pids", "remote")
    while remote := subprocess.run(pids, capture_output=True, check=True, timeout=20).stdout:
        for pid in remote.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    while _remote_nodes():  # until Ray detects the loss
        time.sleep(0.1)
    _start_node(folder / "remote", REMOTE_IP, f"--address={LOCAL_IP}:6379", prefix=_ON_REMOTE)
    while not _remote_nodes():
        time.sleep(0.1)
    (node_id,) = _remote_nodes()
    return node_id


def _remote_nodes() -> list[str]:
    """Ids of the remote host's nodes that Ray considers alive."""
    return [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeManagerAddress"] == REMOTE_IP
    ]


def _start_node(folder: Path, ip: str, *options: str, prefix: tuple[str, ...] = ()) -> None:
    command = [
        *((*prefix, str(folder)) if prefix else ()),
        str(Path(sys.executable).with_name("ray")),
        *("start", f"--node-ip-address={ip}", "--num-cpus=2", "--disable-usage-stats"),
        *("--no-monitor", "--include-log-monitor=false"),
        *(f"--temp-dir={folder}", f"--object-store-memory={80 * 2**20}", *options),
    ]
    subprocess.run(command, env=ENV, check=True, stdout=subprocess.DEVNULL, timeout=150)


async def drain(folder: Path) -> dict[str, Any]:
    """A worker pod's preStop hook runs on the remote host."""
    (remote_id,) = _remote_nodes()
    (container,) = find_pod(render_scenario("default"), "worker")["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "RAY_ADDRESS": f"{LOCAL_IP}:6379"}
    strategy = NodeAffinitySchedulingStrategy(remote_id, soft=False)
    busy = Busy.options(scheduling_strategy=strategy).remote()
    await busy.ready.remote()
    start_s = time.monotonic()
    with subprocess.Popen(["ip", "netns", "exec", "remote", *command], env=env) as hook:
        while not draining_node_ids() and time.monotonic() < start_s + 60:
            await asyncio.sleep(0.1)
        drain_s = time.monotonic() - start_s
        hook_running = hook.poll() is None
        hook.kill()
    return {
        "drain_s": drain_s,
        "hook_running": hook_running,
        "drained_own_node": draining_node_ids() == {remote_id},
    }


async def partition(folder: Path) -> dict[str, Any]:
    """A whole job, two workers per host; the remote host is partitioned for a while."""
    event_log = EventLog()
    with running_job(folder, event_log, min=2, max=4) as handle:
        await asyncio.to_thread(
            wait_for, handle, lambda: world_size(event_log) == 4 and latest_step(event_log) > 20
        )
        fault_at_s = time.monotonic()
        (remote_id,) = _remote_nodes()
        first = event_log.of(WorkersReady)
        remote = [it.pid for ready in first for it in ready.workers if it.node_id == remote_id]
        partition_remote_host(handle)
        await asyncio.to_thread(wait_for, handle, lambda: bool(event_log.of(Repaired)))
        repair_s = time.monotonic() - fault_at_s
        await asyncio.to_thread(wait_for, handle, lambda: not any(map(_is_running, remote)))
    (repaired,) = event_log.of(Repaired)
    return {
        "fired": [event.fault.partition("(")[0] for event in FaultRecord(folder / "steady").read()],
        "world_sizes": [repaired.world_size_before, repaired.world_size],
        "repair_s": repair_s,
        "step": repaired.step,
        "remote_workers": len(remote),
    }


def partition_remote_host(handle: JobHandle) -> None:
    """Inject the fault into the node that does not host the controller, which rejects it.

    Nodes are numbered by their lowest rank, so either may be node 0.
    """
    try:
        handle.inject("partition(node=1, seconds=15)")
    except ConfigError:
        handle.inject("partition(node=0, seconds=15)")


def _is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_in_namespaces(__name__)


@pytest.mark.slow
def test_pre_stop_hook_drains_node(results: dict[str, Any]) -> None:
    result = results["drain"]
    assert result["drained_own_node"]
    assert result["hook_running"], "the pod must stay alive while its work moves away"
    assert result["drain_s"] < 25, "most of the grace period must remain for moving the work"


@pytest.mark.slow
def test_job_survives_partitioned_host_whose_workers_exit(results: dict[str, Any]) -> None:
    result = results["partition"]
    assert result["fired"] == ["partition"]
    assert result["world_sizes"] == [4, 2]
    assert result["repair_s"] < 150
    assert result["step"] > 0, "the state came from memory"
    assert result["remote_workers"] == 2


def main() -> None:
    os.environ.update(ENV)
    folder = set_up_namespaces()
    start_head(folder)
    results = {}
    for scenario in (drain, partition):
        start_remote_node(folder / scenario.__name__)
        results[scenario.__name__] = asyncio.run(scenario(folder))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
