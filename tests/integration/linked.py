"""Run in namespaces of its own: two hosts with a cable between them.

The process itself, the head of the cluster and the driver are on one host, 10.0.0.1; the other is
a network namespace with a raylet in it, 10.0.0.2.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.errors import VaultLostError
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job_events import Repaired
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.vault.vault import Vault
from tests.integration.namespaces import command, prepare
from tests.integration.test_jobs_on_nodes import running, size, step, wait
from tests.integration.tiny import TinyWorker, lost, setup
from tests.orchestrator.support import EventLog

HERE, THERE = "10.0.0.1", "10.0.0.2"
ENV = {
    **os.environ,
    **{f"RAY_health_check_{name}_ms": "1000" for name in ("initial_delay", "period", "timeout")},
    "RAY_health_check_failure_threshold": "3",
}
# The other host's own /tmp and /dev/shm. What follows are the words of the command to run there.
_ON_THE_OTHER_HOST = (
    *("ip", "netns", "exec", "there", "unshare", "--mount", "sh", "-c"),
    'ip link set lo up; mount -t tmpfs tmpfs /dev/shm; mkdir -p "$0"; exec "$@"',
)


def start(folder: Path) -> None:
    command("ip", "netns", "add", "there")
    command("ip", "link", "add", "cable", "type", "veth", "peer", "cable", "netns", "there")
    command("ip", "addr", "add", f"{HERE}/24", "dev", "cable")
    command("ip", "link", "set", "cable", "up")
    command("ip", "-n", "there", "addr", "add", f"{THERE}/24", "dev", "cable")
    command("ip", "-n", "there", "link", "set", "cable", "up")
    _ray(folder / "here", HERE, "--head", "--port=6379", "--include-dashboard=false")
    ray.init(address=f"{HERE}:6379", log_to_driver=False, _node_ip_address=HERE)
    _ray(folder / "there", THERE, f"--address={HERE}:6379", on=_ON_THE_OTHER_HOST)
    while len([node for node in ray.nodes() if node["Alive"]]) < 2:
        time.sleep(0.1)


def _ray(folder: Path, ip: str, *words: str, on: tuple[str, ...] = ()) -> None:
    start = [
        *((*on, str(folder)) if on else ()),
        str(Path(sys.executable).with_name("ray")),
        *("start", f"--node-ip-address={ip}", "--num-cpus=2", "--disable-usage-stats"),
        *(f"--temp-dir={folder}", f"--object-store-memory={80 * 2**20}", *words),
    ]
    subprocess.run(start, env=ENV, check=True, stdout=subprocess.DEVNULL, timeout=150)


async def cut_link(folder: Path) -> dict[str, Any]:
    """Two workers on each host; the cable is cut, and put back when both were replaced."""
    vaults = VaultGroup(setup(folder))
    workers = WorkerGroup(setup(folder), Clock(), True, vaults, TinyWorker)
    try:
        four = await workers.start_workers(ResourceRequest(4, 4, 1.0, 0.0, 150.0))
        here = ray.get_runtime_context().get_node_id()
        there = [one for one in four if one.node_id != here]
        await vaults.open(sorted({one.node_id for one in four}))
        for one in four[:]:
            if one.node_id == here:
                await workers.release_worker(one.index)  # room for those that are going to be lost
        polls: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(lost(workers, *(one.index for one in there))),
            asyncio.ensure_future(vaults.call(there[0].node_id, Vault.poll, 60)),
        ]
        await asyncio.sleep(0.5)
        command("ip", "link", "set", "cable", "down")
        cut_s = time.monotonic()
        answers = await asyncio.wait_for(asyncio.gather(*polls, return_exceptions=True), 100)
        noticed_s = time.monotonic() - cut_s
        kinds = [dict, VaultLostError]
        for one in there:
            workers.replace(one.index, 0.0, [])
        new = [await asyncio.wait_for(workers.next_worker(), 100) for _ in there]
        command("ip", "link", "set", "cable", "up")
        healed_s = time.monotonic()
        until = healed_s + 100
        while any(_lives(one.pid) for one in there) and time.monotonic() < until:
            await asyncio.sleep(0.2)
        return {
            "as_expected": [type(one) for one in answers] == kinds,
            "noticed_s": noticed_s,
            "new_are_here": {one.node_id for one in new} == {here},
            "healed_s": time.monotonic() - healed_s,
            "left": sum(_lives(one.pid) for one in there),
        }
    finally:
        await workers.release()
        await vaults.release()


async def partition(folder: Path) -> dict[str, Any]:
    """A whole job, two workers on each host; the other host cuts itself off for a while."""
    notes = EventLog()
    with running(folder, notes, min=2, max=4) as handle:
        await asyncio.to_thread(wait, handle, lambda: size(notes) == 4 and step(notes) > 60)
        struck_s, before = time.monotonic(), step(notes)
        cut_off_the_other(handle)
        await asyncio.to_thread(wait, handle, lambda: bool(notes.of(Repaired)))
        back_s = time.monotonic() - struck_s
    (repaired,) = notes.of(Repaired)
    return {
        "fired": [one.fault.partition("(")[0] for one in FaultRecord(folder / "steady").read()],
        "sizes": [repaired.world_size_before, repaired.world_size],
        "back_s": back_s,
        "before": before,
        "step": repaired.step,
        "steps_redone": repaired.steps_redone,
    }


def cut_off_the_other(handle: JobHandle) -> None:
    """Nodes are counted by their first ranks, either may be first; the controller's refuses."""
    try:
        handle.inject("partition(node=1, seconds=20)")
    except ConfigError:
        handle.inject("partition(node=0, seconds=20)")


def _lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


SCENARIOS = {"cut_link": cut_link, "partition": partition}


def main(scenario: str) -> None:
    os.environ.update(ENV)
    folder = prepare()
    start(folder)
    print(json.dumps(asyncio.run(SCENARIOS[scenario](folder))))


if __name__ == "__main__":
    main(sys.argv[1])
