"""Jobs with roles and rollouts under the random sequences of `random_faults`, with losses of
roles' workers, slow and hung ones, resizes of roles, and controllers that adopt the job.

Invariants: a generation reads from a buffer that answers, or leaves; role workers know this buffer,
and it knows the lost ones; a version of the weights is published once all ranks have mirrored it
(the fake vault asserts it); and the job goes on once ranks and role workers are there.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from rayzero.engine.data.consumed import SAMPLES_PHASE
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import Heartbeat
from rayzero.workers.roles.view import TASKS_PHASE
from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.vault.process_end import ProcessEnd
from rayzero.workers.vault.server import ConnectionLost
from tests.orchestrator.control.random_faults import TURNS, ControllerStateMachine
from tests.orchestrator.fake_cluster import FakeCheckpointStore, FakeCluster
from tests.orchestrator.fake_roles import FakeRoleGroup
from tests.orchestrator.support import Harness, reread, settle

MOST = 3
_LIMITS = {"max_faults": 10**6}
JOB: dict[str, Any] = {
    "engine": {"train_batch_size": 24},
    "rollouts": {"group": 2},
    "roles": {
        "rollout": {
            "entrypoint": "m:generate",
            "takes": "prompts",
            "workers": {"min": 1, "max": 2, "spares": 1, "start_timeout_s": 1e6},
            "recovery": _LIMITS,
        },
        "score": {
            "entrypoint": "m:score",
            "takes": "rollout",
            "workers": {"min": 1, "start_timeout_s": 1e6},
            "recovery": _LIMITS,
        },
    },
    "workers": {"min": 1, "max": 4, "spares": 1, "start_timeout_s": 1e6},
    "recovery": {"max_faults": 10**6},
}


class StarvingCluster(FakeCluster):
    """Ranks wait for samples."""

    roles: dict[str, FakeRoleGroup]

    @property
    def can_step(self) -> bool:
        return super().can_step and self.reads_from(self.members[0].assign.rollouts)

    def reads_from(self, buffer: BufferAddress | None) -> bool:
        """Whether a buffer answers, and each role has a worker that knows it."""
        return self.vaults.has_buffer(buffer) and all(
            any(group.views[it][-1].buffer == buffer for it in group.alive if it in group.views)
            for group in self.roles.values()
        )


class RolloutStateMachine(ControllerStateMachine):
    @initialize(size=st.integers(2, 4), every=st.sampled_from([0, 2, 3]))
    def start_job(self, size: int, every: int) -> None:
        checkpoint = {"every_steps": every} if every else {}
        self.settings = {"unix": time.time, "checkpoint": checkpoint, **JOB}
        self.every = every
        self.store = FakeCheckpointStore()
        self.runner.run(self.begin("abab"[:size], None))

    async def begin(self, nodes: str, past: Any) -> None:
        cluster = StarvingCluster(nodes, checkpoint_every=self.every)
        cluster.other_nodes = "abc"
        cluster.losses_allowed = past is not None
        self.cluster = cluster
        folder = Path(self.folder.name)
        self.harness = Harness(folder, cluster, self.store, past, **self.settings)
        cluster.roles = self.harness.roles
        self.groups = self.harness.roles
        self.refill()

    def refill(self) -> None:
        """Starts the processes that the pools have requested."""
        for group in self.groups.values():
            for _ in range(max(group.wanted[1], 1) - len(group.alive)):
                group.start("a")

    @rule(adopted_on=st.sampled_from(["a", "ab", "abb"]), turns=TURNS)
    @precondition(lambda self: self.cluster.committed > 3)
    def lose_cluster(self, adopted_on: str, turns: int) -> None:
        """The controller with all of its processes; another one adopts the job."""
        if self.harness.run.done():
            return

        async def adopt() -> None:
            past = reread(self.harness.events.facts)
            await self.cancel()
            assert self.harness.run.done()
            await self.begin(adopted_on, past)

        self.runner.run(adopt())
        self.run_turns(turns)

    def kill_others(self, kills: bool) -> None:
        for group in self.groups.values():
            for worker in [*group.alive][:kills]:
                group.alive.pop(worker)

    @precondition(lambda self: any(group.alive for group in self.groups.values()))
    @rule(data=st.data(), seen_by=st.sampled_from(["poll", "vault", "beat"]), turns=TURNS)
    def lose_role_worker(self, data: st.DataObject, seen_by: str, turns: int) -> None:
        """Or it hangs."""
        group, worker = data.draw(
            st.sampled_from([(it, worker) for it in self.groups.values() for worker in it.alive])
        )
        info = group.alive[worker]
        vault = self.cluster.vaults.by_node.get(info.node_id)
        if seen_by == "beat":
            group.post(worker, Heartbeat(0, 0, TASKS_PHASE, 121.0))
        else:
            if seen_by == "vault" and vault is not None:
                vault.events.put_nowait(
                    [ConnectionLost(worker, info.pid, ProcessEnd("it was killed", ""))]
                )
            group.lose(worker)
        self.run_turns(turns)

    @rule(name=st.sampled_from(["rollout", "score"]), node=st.sampled_from("ab"), turns=TURNS)
    def start_role_worker(self, name: str, node: str, turns: int) -> None:
        if len(self.groups[name].alive) < MOST + 1:
            self.groups[name].start(node)
        self.run_turns(turns)

    @rule(name=st.sampled_from(["rollout", "score"]), turns=TURNS)
    def stop_role_workers(self, name: str, turns: int) -> None:
        """They do not answer until `continue_role_workers`."""
        self.groups[name].updating.clear()
        self.run_turns(turns)

    @rule(turns=TURNS)
    def continue_role_workers(self, turns: int) -> None:
        for group in self.groups.values():
            group.updating.set()
        self.run_turns(turns)

    @rule(most=st.integers(1, MOST), turns=TURNS)
    def scale_role(self, most: int, turns: int) -> None:
        async def scale() -> None:
            self.harness.controller.scale(1, most, "rollout")

        if not self.harness.run.done():
            self.runner.run(scale())
        self.run_turns(turns)

    @precondition(lambda self: len(self.live_nodes()) > 1)
    @rule(node=st.sampled_from("ab"), turns=TURNS)
    def drop_node(self, node: str, turns: int) -> None:
        self.cluster.lose_node(node)
        for group in self.groups.values():
            for worker in [it for it, info in group.alive.items() if info.node_id == node]:
                group.lose(worker, "its node is gone")
        self.run_turns(turns)

    @rule(delay=st.sampled_from([0, 5, 20, 60]))
    def delay_buffer(self, delay: int) -> None:
        self.cluster.delays["rollouts"] = delay

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0, 11.0, 40.0]))
    def advance(self, seconds: float) -> None:
        self.beat()
        super().advance(seconds)
        self.check_rollouts()

    @rule()
    def settle_and_check(self) -> None:
        self.runner.run(settle())
        self.check_rollouts()

    def beat(self) -> None:
        for group in self.groups.values():
            for worker in group.alive:
                group.post(worker)
        members = self.cluster.members
        if members and not self.cluster.reads_from(members[0].assign.rollouts):
            for process in members:
                self.cluster.send_heartbeat(process.info.index, phase=SAMPLES_PHASE)

    def check_rollouts(self) -> None:
        """While nothing happens but time."""
        generation = self.harness.controller._members.generation
        if self.harness.run.done() or self.harness.states[-1] is State.STOPPING:
            return
        buffer = self.harness.controller._parts.roles.rollouts.address
        has_buffer = self.cluster.vaults.has_buffer(buffer)
        assert has_buffer or buffer is None
        if generation.active and not generation.fenced:
            for _, assign in self.cluster.assigned:
                if assign.generation == generation.number:
                    assert assign.rollouts == buffer, "nobody writes what it reads"
                    assert has_buffer, "a generation reads from a lost buffer"
        lost = set[int]()
        for group in self.groups.values():
            for worker, views in group.views.items():
                if worker not in group.alive:
                    lost |= {worker} if buffer in [it.buffer for it in views] else set()
                elif group.updating.is_set():
                    assert views[-1].buffer == buffer, "a role's worker knows another buffer"
        if has_buffer:
            (vault,) = [it for it in self.cluster.vaults.by_node.values() if it.buffer == buffer]
            assert lost <= {*vault.told[2]}, "a lost worker keeps its tasks"

    async def finish(self) -> None:
        for group in self.groups.values():
            group.updating.set()
        on_idle = self.harness.clock.on_idle

        def keep_alive() -> None:
            self.refill()
            self.beat()
            on_idle()

        self.harness.clock.on_idle = keep_alive
        await super().finish()
