"""The controller under faults, comings and goings in any order, at any moment.

However it goes: there are never two generations at once, no committed step is lost as long as its
copies are there, and once everybody does their part the job comes to its end. The first two are
asserted by the world at the moment they could break.
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
from tests.orchestrator.support import Stage, settle
from tests.orchestrator.world import World

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

        async def start() -> Stage:
            world = World(size, lambda index: "ab"[index % 2], checkpoint_every=every)
            return Stage(
                Path(self.folder.name),
                world,
                workers={"min": 1, "max": 4, "spares": 1, "start_timeout_s": 1e6},
                recovery={"max_faults": 10**6},
                checkpoint={"every_steps": every} if every else {},
            )

        self.stage = self.runner.run(start())
        self.world = self.stage.world

    def after(self, moments: int) -> None:
        async def turns() -> None:
            for _ in range(moments):
                await asyncio.sleep(0)

        self.runner.run(turns())

    def living(self) -> list[int]:
        return [index for index, one in self.world.processes.items() if one.alive]

    @rule(count=st.integers(1, 3), moments=MOMENTS)
    def train(self, count: int, moments: int) -> None:
        for _ in range(count):
            self.world.step()
            self.after(moments)

    @precondition(lambda self: len(self.living()) > 1)
    @rule(data=st.data(), told=st.booleans(), moments=MOMENTS)
    def kill(self, data: st.DataObject, told: bool, moments: int) -> None:
        worker = data.draw(st.sampled_from(self.living()))
        self.world.kill(worker, told=told)
        self.after(moments)

    @precondition(lambda self: bool(self.world.members))
    @rule(data=st.data(), moments=MOMENTS)
    def break_a_collective(self, data: st.DataObject, moments: int) -> None:
        member = data.draw(st.sampled_from(self.world.members))
        if member.ready:
            self.world.crash(member.info.index, "collective", "Connection closed")
        self.after(moments)

    @precondition(lambda self: bool(self.world.vaults.of))
    @rule(data=st.data(), moments=MOMENTS)
    def kill_vault(self, data: st.DataObject, moments: int) -> None:
        self.world.kill_vault(data.draw(st.sampled_from(sorted(self.world.vaults.of))))
        self.after(moments)

    @precondition(
        lambda self: len({self.world.processes[one].info.node_id for one in self.living()}) > 1
    )
    @rule(node=st.sampled_from("ab"), moments=MOMENTS)
    def drop_node(self, node: str, moments: int) -> None:
        self.world.drop_node(node)
        self.after(moments)

    @precondition(lambda self: len(self.world.processes) < 14)
    @rule(node=st.sampled_from("ab"), moments=MOMENTS)
    def arrive(self, node: str, moments: int) -> None:
        self.world.arrive(node)
        self.after(moments)

    @rule(most=st.integers(1, 4), moments=MOMENTS)
    def scale(self, most: int, moments: int) -> None:
        if not self.stage.run.done():
            self.stage.controller.scale(1, most)
        self.after(moments)

    @rule(nodes=st.sets(st.sampled_from("ab")), moments=MOMENTS)
    def leave(self, nodes: set[str], moments: int) -> None:
        self.world.leaving = frozenset(nodes)
        self.after(moments)

    @precondition(lambda self: bool(self.living()))
    @rule(data=st.data(), how=st.sampled_from(["slow", "deaf", "stuck"]), moments=MOMENTS)
    def hamper(self, data: st.DataObject, how: str, moments: int) -> None:
        process = self.world.processes[data.draw(st.sampled_from(self.living()))]
        setattr(process, how, True)
        self.after(moments)

    @rule(
        command=st.sampled_from(["fence", "drain", "assign", "store", "kill", "inventory"]),
        lag=st.sampled_from([0, 5, 20, 60]),
    )
    def be_slow(self, command: str, lag: int) -> None:
        self.world.lag[command] = lag

    @precondition(lambda self: self.world.can_step)
    @rule(data=st.data(), how=st.sampled_from(["", "deaf", "stuck"]), moments=MOMENTS)
    def kill_two(self, data: st.DataObject, how: str, moments: int) -> None:
        """In the middle of training, and one of the survivors may not behave."""
        if len(self.living()) < 3:
            self.world.arrive("a")
        first, second, *others = data.draw(st.permutations(self.living()))
        self.world.step()
        if others and how:
            setattr(self.world.processes[others[0]], how, True)
        self.world.kill(first)
        self.after(moments)
        self.world.kill(second)
        self.after(moments)

    @rule(moments=MOMENTS)
    def catch_up(self, moments: int) -> None:
        for worker in self.world.processes:
            self.world.catch_up(worker)
        self.after(moments)

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0, 11.0, 40.0]))
    def turn(self, seconds: float) -> None:
        self.runner.run(self.stage.clock.turn(seconds))

    @rule(stops=st.just(True), moments=MOMENTS)
    @precondition(lambda self: len(self.world.assigned) > 8)
    def stop(self, stops: bool, moments: int) -> None:
        self.stage.controller.post_event(machine.StopRequested())
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
        world, stage = self.world, self.stage
        world.leaving = frozenset()
        world.lag.clear()
        for index, process in world.processes.items():
            process.deaf = process.stuck = False
            world.catch_up(index)
        stage.world.arrive("a")
        for _ in range(40):
            if stage.run.done():
                break
            await stage.clock.turn(20)
            world.step(last=stage.states[-1] is State.RUNNING)
            await settle()
        try:
            result = await stage.result()
        except JobStoppedError:
            assert State.STOPPING in stage.states or stage.states[-1] is State.STOPPED
        else:
            assert result.steps == world.committed
        # Whatever was made a checkpoint of stays one, and nothing is written twice.
        assert len(stage.shelf.steps) == len(set(stage.shelf.steps))


AnyOrder.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = AnyOrder.TestCase
