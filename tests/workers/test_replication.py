"""Replicas on other nodes, made by real vaults without a controller, as ranks' votes steer them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from threading import Event, Lock, Thread
from typing import Any

import pytest

from rayzero.engine.session import StepRequests
from rayzero.orchestrator.cluster.node_links import NodeLink, WorkerMail
from rayzero.orchestrator.errors import VaultLostError
from rayzero.orchestrator.policies.recovery import StoredSlot, newest_complete_in_vaults
from rayzero.workers.agent.link import AgentAddress, Attach
from rayzero.workers.agent.node_agent import AgentServer
from rayzero.workers.vault import replicas
from rayzero.workers.vault.actor import VAULT_CALL_THREADS, VaultActor, process_end_event
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.vault.records import NotReplicated, SlotGoneError, SlotRef, VaultGoneError
from tests.workers.mirror_rig import EVERY, Rig, host_state
from tests.workers.vault.support import VaultCluster, refs, steps_of, table, write

LIMIT_S = 20.0


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


class Job:
    """Ranks on a node each, with the votes of their steps.

    Attributes:
        replicated: the newest step that a vote has shown to be on other nodes.
    """

    def __init__(self, cluster: VaultCluster, nodes: str = "abc", **policy: Any) -> None:
        self.cluster, self.nodes = cluster, nodes
        self.replicated = 0
        self.rigs = []
        for rank, node in enumerate(nodes):
            self.rigs.append(
                Rig(
                    cluster,
                    host_state(),
                    replace(EVERY, **policy),
                    node=node,
                    rank=rank,
                    world_size=len(nodes),
                    replica_nodes=(nodes[(rank + 1) % len(nodes)],),
                )
            )

    def step(self, number: int) -> StepRequests:
        requests = [rig.mirror.step_requests(number) for rig in self.rigs]
        sums = map(sum, zip(*(it.to_scalars() for it in requests), strict=True))
        agreed = StepRequests.from_sums([*sums], len(self.rigs))
        for rig in self.rigs:
            rig.state.weights.fill_(number)
            rig.mirror.step_done(number, agreed, rig.state)
        self.replicated = int(self.rigs[0].mirror.gauges().get("replicated_step", 0))
        return agreed

    def wait_copied(self) -> None:
        """All vaults have copied what they were told to."""
        for rig in self.rigs:
            kept = rig.mirror._kept_buffers()
            wait_until(lambda kept=kept: all(buffer.copied_bytes for buffer in kept))

    def step_without(self, lost: str) -> int:
        """The step that a repair would find if that node was lost now."""
        held = [
            StoredSlot(slot, node)
            for node in self.nodes
            for slot in self.cluster.vault(node).inventory()
            if node != lost
        ]
        newest = newest_complete_in_vaults(held)
        return 0 if newest is None else newest.step

    def close(self) -> None:
        for rig in self.rigs:
            rig.mirror.close()


@pytest.fixture
def job(cluster: VaultCluster) -> Iterator[Job]:
    job = Job(cluster)
    yield job
    job.close()


def used(cluster: VaultCluster) -> list[int]:
    usages = [vault.usage() for vault in cluster.vaults.values()]
    return [it["slots"] + it["replicas"] + it["spare"] for it in usages]


def test_every_step_is_replicated_in_constant_memory_while_copies_are_fast(
    cluster: VaultCluster, job: Job
):
    """For as long as a controller may be away: nobody but ranks and vaults takes part."""
    usages = []
    for step in range(1, 61):
        agreed = job.step(step)
        assert agreed.pin
        job.wait_copied()
        assert {job.step_without(node) for node in "abc"} == {step}
        assert job.replicated == step - 1
        assert agreed.copied_bytes > 3 * 1000 or step == 1
        usages.append(used(cluster))
    assert {tuple(it) for it in usages[5:]} == {tuple(usages[5])}
    assert [rig.posted for rig in job.rigs] == [[], [], []], "the controller hears by reports"


def test_checkpoints_that_nobody_writes_do_not_stop_replicas(cluster: VaultCluster):
    """Without a controller: their slots are given up once the next replicas need them."""
    job, vaults = Job(cluster, checkpoint_every_steps=10), cluster.vaults

    def steps(first: int, last: int) -> None:
        for step in range(first, last + 1):
            job.step(step)
            job.wait_copied()

    steps(1, 19)
    assert {job.step_without(node) for node in "abc"} == {11}, "10 waits for its checkpoint"
    with vaults["a"]._registry.open_pinned(refs((1, 0, 10))[0]):
        for vault in vaults.values():
            vault._registry.give_up_checkpoints()
        assert job.rigs[0].mirror._buffers[0].pinned, "it is being written"
        assert not job.step(20).pin
    usages = []
    for first in range(21, 100):
        for vault in vaults.values():
            vault._registry.give_up_checkpoints()
        steps(first, first)
        usages.append(used(cluster))
        assert min(job.step_without(node) for node in "abc") >= first - 1
    assert usages[-1] == usages[5]
    assert [[it.step for it in rig.posted] for rig in job.rigs] == [
        [10, 21, *range(30, 100, 10)]
    ] * 3
    job.close()


def test_vault_gives_checkpoints_up_only_while_no_controller_is_connected():
    asyncio.run(_lose_controller())


def test_controllers_that_come_and_go_hold_one_thread_of_a_vault():
    """Each waits for its end, and is lost without a word."""
    vault = VaultActor("job", "a")
    waiting: list[Thread] = []
    for _ in range(VAULT_CALL_THREADS + 1):
        before = vault._asked_again
        attach = Attach(1, bytes([len(waiting)]))
        waiting.append(Thread(target=vault.wait_end, args=[attach], daemon=True))
        waiting[-1].start()
        while vault._asked_again is before:
            time.sleep(0.001)
        for earlier in waiting[:-1]:
            earlier.join(LIMIT_S)
        for earlier in range(len(waiting) - 1):
            vault.wait_end(Attach(1, bytes([earlier])))  # it comes late, and ends nobody's wait
        assert [thread.is_alive() for thread in waiting] == [False] * (len(waiting) - 1) + [True]
    vault._asked_again.set()
    vault.close()


async def _lose_controller() -> None:
    vault = VaultActor("job", "a")
    client = VaultClient(vault.address(), 0)
    agent = vault._agent = AgentServer(
        "127.0.0.1", vault, lambda _: vault.poll(0.01), process_end_event
    )
    address = AgentAddress("", "127.0.0.1", agent.port, agent.secret)
    link = NodeLink(address, Attach(1, b"controller"), WorkerMail())
    try:
        await link.attached()
        older = client.reserve(1, 0, 2, table())
        write(older, 0, 4, pin=True)
        newer = client.reserve(1, 0, 2, table())
        write(newer, 0, 5, keep=True)
        vault._registry.copied(*refs((1, 0, 5)), 64)
        assert vault.poll(0.0) == []
        assert older.pinned
        link.end(VaultLostError("closed"))
        async with asyncio.timeout(LIMIT_S):
            while older.pinned:
                await asyncio.sleep(0.01)
        assert newer.pinned
    finally:
        link.end(VaultLostError("closed"))
        agent.close()
        client.close()
        vault.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_lost_node_costs_no_step_that_was_replicated_whatever_the_copies_take(
    cluster: VaultCluster, job: Job, seed: int
):
    """Copies of each pair go on and fail at random; at any time any node may be lost."""
    chance = random.Random(seed)
    gates = {node: Event() for node in "abc"}
    failing = set[str]()
    cluster.on_copy = lambda node, ref: _pass(gates[node], failing, node)
    newest, usages = 0, []
    for step in range(1, 60):
        for node, gate in gates.items():
            gate.set() if chance.random() < 0.5 else gate.clear()
            failing.add(node) if chance.random() < 0.2 else failing.discard(node)
        job.step(step)
        if chance.random() < 0.5:
            time.sleep(0.002)
        assert job.replicated >= newest
        newest = job.replicated
        assert min(job.step_without(node) for node in "abc") >= newest
        usages.append(used(cluster))
    assert newest > 3
    assert max(map(max, usages)) <= 1.6 * max(usages[3])
    failing.clear()
    for gate in gates.values():
        gate.set()


def _pass(gate: Event, failing: set[str], node: str) -> None:
    assert gate.wait(LIMIT_S)
    if node in failing:
        raise VaultGoneError("the link is broken")


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RETRY_BACKOFF_S", (0.001, 0.01))


def order(cluster: VaultCluster, step: int, nodes: str, generation: int = 1) -> SlotRef:
    """Rank 0 keeps a step for these nodes."""
    client = cluster.client("a", 0)
    buffer = client.reserve(generation, 0, 2, table())
    write(buffer, 0, step, keep=True)
    client.replicate(generation, 0, step, nodes)
    [ref] = refs((generation, 0, step))
    return ref


def test_dead_peer_gets_attempts_at_growing_distance_until_the_generation_is_over(
    cluster: VaultCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replicas, "RETRY_BACKOFF_S", (0.01, 0.04, LIMIT_S))
    tried, lock = list[tuple[str, int]](), Lock()

    def note(node: str, ref: SlotRef) -> None:
        with lock:
            tried.append((node, ref.step))

    cluster.on_copy = note
    vault = cluster.vault("a")
    cluster.vault("b")
    order(cluster, 4, "bx")
    wait_until(lambda: len(tried) == 4)
    assert sorted(tried) == [("b", 4), ("x", 4), ("x", 4), ("x", 4)], "b has it, x is gone"
    time.sleep(0.1)
    assert len(tried) == 4, "the third attempt is followed by a long pause"
    failures = [it for it in vault.poll(0.0) if isinstance(it, NotReplicated)]
    assert failures == [NotReplicated(4, "no vault is known on node x")] * 3
    order(cluster, 6, "b", generation=2)
    wait_until(lambda: steps_of(cluster.vault("b")) == [(0, 4), (0, 6)])
    wait_until(lambda: not vault._replicas._orders)
    assert tried[4:] == [("b", 6)]
    order(cluster, 5, "b")  # of the generation before: its rank does not know yet
    with suppress(SlotGoneError):
        cluster.vault("b").replicate(refs((1, 0, 3)))
    assert tried[4:] == [("b", 6)]


def test_slots_of_a_generation_that_is_over_are_neither_taken_nor_kept(cluster: VaultCluster):
    ref = order(cluster, 4, "b")
    vault = cluster.vault("b")
    wait_until(lambda: steps_of(vault) == [(0, 4)])
    newer = cluster.client("b", 1).reserve(2, 1, 2, table(1))
    write(newer, 1, 6, keep=True)
    cluster.client("b", 1).announce_replicated(2, 6)
    wait_until(lambda: steps_of(vault) == [(1, 6)])
    with pytest.raises(SlotGoneError, match="generation 1 is over"):
        vault.replicate([ref])


def test_closing_vault_ends_the_attempts(cluster: VaultCluster):
    order(cluster, 4, "x")
    vault = cluster.vaults["a"]
    wait_until(lambda: bool(vault._replicas.failures))
    vault.close()
    wait_until(lambda: not vault._replicas._orders)
