"""The controller under faults, comings and goings in any order, at any moment.

However it goes: there are never two generations at once, no committed step is lost as long as its
copies are there, and once everybody does their part the job comes to its end. The first two are
asserted by the fake cluster at the moment they could break.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rayzero.orchestrator import machine
from rayzero.orchestrator.control import reconfigure
from rayzero.orchestrator.control.reconfigure import LARGE_JOB_WORKERS
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.machine import State
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.support import Harness, settle

MOMENTS = st.integers(0, 40)
"""Turns of the event loop until the next thing happens: mostly in the middle of something."""


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(
        size=st.integers(2, 4), every=st.sampled_from([0, 2, 3]), many=st.sampled_from([1, 500])
    )
    def begin(self, size: int, every: int, many: int) -> None:
        reconfigure.LARGE_JOB_WORKERS = many  # as a large job's controller does, in small ones

        async def start() -> Harness:
            cluster = FakeCluster(size, lambda index: "ab"[index % 2], checkpoint_every=every)
            return Harness(
                Path(self.folder.name),
                cluster,
                workers={"min": 1, "max": 4, "spares": 1, "start_timeout_s": 1e6},
                recovery={"max_faults": 10**6},
                checkpoint={"every_steps": every} if every else {},
            )

        self.harness = self.runner.run(start())
        self.cluster = self.harness.cluster

    def after(self, moments: int) -> None:
        async def turns() -> None:
            for _ in range(moments):
                await asyncio.sleep(0)

        self.runner.run(turns())

    def living(self) -> list[int]:
        return [index for index, one in self.cluster.processes.items() if one.alive]

    @rule(count=st.integers(1, 3), moments=MOMENTS)
    def train(self, count: int, moments: int) -> None:
        for _ in range(count):
            self.cluster.step()
            self.after(moments)

    @precondition(lambda self: len(self.living()) > 1)
    @rule(data=st.data(), reported=st.booleans(), moments=MOMENTS)
    def kill(self, data: st.DataObject, reported: bool, moments: int) -> None:
        worker = data.draw(st.sampled_from(self.living()))
        self.cluster.kill(worker, reported=reported)
        self.after(moments)

    @precondition(lambda self: bool(self.cluster.members))
    @rule(data=st.data(), moments=MOMENTS)
    def break_a_collective(self, data: st.DataObject, moments: int) -> None:
        member = data.draw(st.sampled_from(self.cluster.members))
        if member.ready:
            self.cluster.crash(member.info.index, "collective", "Connection closed")
        self.after(moments)

    @precondition(lambda self: bool(self.cluster.vaults.by_node))
    @rule(data=st.data(), moments=MOMENTS)
    def kill_vault(self, data: st.DataObject, moments: int) -> None:
        self.cluster.kill_vault(data.draw(st.sampled_from(sorted(self.cluster.vaults.by_node))))
        self.after(moments)

    @precondition(
        lambda self: len({self.cluster.processes[one].info.node_id for one in self.living()}) > 1
    )
    @rule(node=st.sampled_from("ab"), moments=MOMENTS)
    def drop_node(self, node: str, moments: int) -> None:
        self.cluster.lose_node(node)
        self.after(moments)

    @precondition(lambda self: len(self.cluster.processes) < 14)
    @rule(node=st.sampled_from("ab"), moments=MOMENTS)
    def arrive(self, node: str, moments: int) -> None:
        self.cluster.join(node)
        self.after(moments)

    @rule(most=st.integers(1, 4), moments=MOMENTS)
    def scale(self, most: int, moments: int) -> None:
        if not self.harness.run.done():
            self.harness.controller.scale(1, most)
        self.after(moments)

    @rule(nodes=st.sets(st.sampled_from("ab")), moments=MOMENTS)
    def leave(self, nodes: set[str], moments: int) -> None:
        self.cluster.draining = frozenset(nodes)
        self.after(moments)

    @precondition(lambda self: bool(self.living()))
    @rule(data=st.data(), how=st.sampled_from(["slow", "deaf", "stuck"]), moments=MOMENTS)
    def hamper(self, data: st.DataObject, how: str, moments: int) -> None:
        process = self.cluster.processes[data.draw(st.sampled_from(self.living()))]
        setattr(process, how, True)
        self.after(moments)

    @rule(
        command=st.sampled_from(["fence", "drain", "assign", "store", "kill", "inventory"]),
        lag=st.sampled_from([0, 5, 20, 60]),
    )
    def be_slow(self, command: str, lag: int) -> None:
        self.cluster.delays[command] = lag

    @precondition(lambda self: self.cluster.can_step)
    @rule(data=st.data(), how=st.sampled_from(["", "deaf", "stuck"]), moments=MOMENTS)
    def kill_two(self, data: st.DataObject, how: str, moments: int) -> None:
        """In the middle of training, and one of the survivors may not behave."""
        if len(self.living()) < 3:
            self.cluster.join("a")
        first, second, *others = data.draw(st.permutations(self.living()))
        self.cluster.step()
        if others and how:
            setattr(self.cluster.processes[others[0]], how, True)
        self.cluster.kill(first)
        self.after(moments)
        self.cluster.kill(second)
        self.after(moments)

    @rule(moments=MOMENTS)
    def catch_up(self, moments: int) -> None:
        for worker in self.cluster.processes:
            self.cluster.deliver_delayed(worker)
        self.after(moments)

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0, 11.0, 40.0]))
    def turn(self, seconds: float) -> None:
        self.runner.run(self.harness.clock.advance(seconds))

    @rule(stops=st.just(True), moments=MOMENTS)
    @precondition(lambda self: len(self.cluster.assigned) > 8)
    def stop(self, stops: bool, moments: int) -> None:
        self.harness.controller.post_event(machine.StopRequested())
        self.after(moments)

    def teardown(self) -> None:
        reconfigure.LARGE_JOB_WORKERS = LARGE_JOB_WORKERS
        try:
            if hasattr(self, "stage"):
                self.runner.run(self.end())
        finally:
            self.runner.close()
            self.folder.cleanup()

    async def end(self) -> None:
        """Everybody does their part from now on."""
        cluster, harness = self.cluster, self.stage
        cluster.draining = frozenset()
        cluster.delays.clear()
        for index, process in cluster.processes.items():
            process.unresponsive = process.stuck = False
            cluster.deliver_delayed(index)
        harness.cluster.join("a")
        for _ in range(40):
            if harness.run.done():
                break
            await harness.clock.advance(20)
            cluster.step(last=harness.states[-1] is State.RUNNING)
            await settle()
        try:
            result = await harness.result()
        except JobStoppedError:
            assert State.STOPPING in harness.states or harness.states[-1] is State.STOPPED
        else:
            assert result.steps == cluster.committed
        # Whatever was made a checkpoint of stays one, and nothing is written twice.
        assert len(harness.store.steps) == len(set(harness.store.steps))


AnyOrder.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = AnyOrder.TestCase
