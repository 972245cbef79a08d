"""Pools of a role's workers, in virtual time: started again alone, within a budget of their own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.errors import JobConfigError, JobFailedError
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.job_events import RoleFault, RoleWorkerEnded, RoleWorkerReady
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.role_facts import MAX_ROLE_ENTRIES
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import Crashed, Finished, LogLine
from rayzero.workers.vault.process_end import ProcessEnd
from rayzero.workers.vault.server import ConnectionLost
from tests.orchestrator.fake_roles import FakeRoleGroup
from tests.orchestrator.support import Harness, reread, settle

ROLE: dict[str, Any] = {"entrypoint": "m:generate", "workers": {"min": 1, "max": 2}}


async def started(folder: Path, ready: int = 2, **role: Any) -> tuple[Harness, FakeRoleGroup]:
    """A job that trains, with that many workers of its role `rollout`."""
    harness = Harness(folder, unix=lambda: 1000.0, roles={"rollout": ROLE | role})
    group = harness.roles["rollout"]
    await settle()
    for _ in range(ready):
        group.start()
        await settle()
    return await harness.trained(2), group


def crash(number: int, text: str, kind: Any = "user") -> Crashed:
    return Crashed(0, number, kind, 0, text, "Traceback: line 3")


async def test_lost_worker_is_started_again_alone(folder: Path):
    harness, group = await started(folder)
    assert group.began == {101: (0, "vault-a-1"), 102: (1, "vault-a-1")}
    assert [it.number for it in harness.log.of(RoleWorkerReady)] == [0, 1]
    group.lose(101, "it was killed")
    await settle()
    assert (group.killed, group.replaced) == ([101], [(101, 0.0)])
    (fault,) = harness.log.of(RoleFault)
    assert (fault.cause, fault.number) == ("lost", 0)
    assert fault.text == "rollout 0 on node node-a (pid 5101): it was killed"
    new = group.start()
    await settle()
    assert group.began[new] == (0, "vault-a-1"), "the number of the lost one"
    status = harness.controller.status()
    assert (status.roles["rollout"].workers, status.roles["rollout"].faults) == (2, {"lost": 1})
    assert (status.generation, status.faults) == (1, {}), "the ranks hear nothing of it"
    facts = harness.events.facts.roles["rollout"]
    assert [size.workers for size in facts.sizes] == [1, 2, 1, 2]
    (entry,) = facts.seen_faults
    assert (entry.cause, entry.number, entry.at_s) == ("lost", 0, 1000.0)
    await harness.steps(3)
    assert harness.states[-1] is State.RUNNING


async def test_worker_that_does_not_start_is_none_of_those_that_run(folder: Path):
    harness, group = await started(folder)
    group.fail_start()
    await settle()
    assert [fault.workers for fault in harness.log.of(RoleFault)] == [2]
    assert harness.events.facts.roles["rollout"].workers == 2
    assert harness.states[-1] is State.RUNNING


async def test_vault_sees_process_end_before_the_cluster(folder: Path):
    harness, group = await started(folder)
    vault = harness.cluster.vaults.by_node["a"]
    end = ProcessEnd("its process was killed by SIGKILL", "")
    vault.events.put_nowait([ConnectionLost(102, 1, end), ConnectionLost(102, 5102, end)])
    await settle()
    (fault,) = harness.log.of(RoleFault)
    assert (fault.number, fault.cause) == (1, "lost")
    group.lose(102, "an actor died")  # Ray's later report
    await settle()
    assert len(group.replaced) == 1


async def test_silent_process_is_lost(folder: Path):
    harness, group = await started(folder, recovery={"hang_timeout_s": 60})
    for _ in range(40):
        group.post(101)
        await harness.clock.advance(2)
    (fault,) = harness.log.of(RoleFault)
    assert fault.number == 1
    assert "did not respond for 72 s" in fault.text


@pytest.mark.parametrize(
    ("errors", "max_faults", "error"),
    [
        (["ValueError: a 1", "ValueError: a 2", "ValueError: a 3"], 20, "3 times in a row"),
        (["ValueError: a", "TypeError: b", "ValueError: a", "TypeError: b"], 20, None),
        (["ValueError: a", "TypeError: b", "OSError: c"], 2, "had 3 faults within 3600 s"),
    ],
)
async def test_function_that_fails(
    folder: Path, errors: list[str], max_faults: int, error: str | None
):
    harness, group = await started(folder, 1, recovery={"max_faults": max_faults})
    for index, text in enumerate(errors, start=101):
        group.post(index, crash(0, text))
        await settle()
        if not harness.run.done():
            group.start()
            await settle()
    if error is None:
        assert harness.states[-1] is State.RUNNING
        assert [fault.cause for fault in harness.log.of(RoleFault)] == ["user"] * len(errors)
        return
    failure = await harness.fails(JobFailedError, error)
    assert "role rollout" in failure.seen
    assert failure.traceback == "Traceback: line 3"


async def test_mistake_in_the_job_file_fails_at_once(folder: Path):
    harness, group = await started(folder)
    group.post(101, crash(0, "'generate' is not in m.py", "entrypoint"))
    await settle()
    await harness.fails(JobConfigError, "role rollout: 'generate' is not in m.py")


async def test_function_that_returns_is_not_called_again(folder: Path):
    harness, group = await started(folder)
    group.post(101, LogLine(0, "stdout", "done", "rollout"), Finished(0, 0, None, {}, 0))
    await harness.clock.advance(30)
    assert (group.released, group.replaced) == ([101], [])
    assert [it.number for it in harness.log.of(RoleWorkerEnded)] == [0]
    role = harness.controller.status().roles["rollout"]
    assert (role.workers, role.finished) == (1, 1)
    assert harness.events.facts.roles["rollout"].finished == 1
    assert harness.states[-1] is State.RUNNING


async def test_replacement_of_the_lower_number_beside_one_that_returned(folder: Path):
    harness, group = await started(folder)
    group.post(102, Finished(0, 1, None, {}, 0))
    group.lose(101)
    await settle()
    new = group.start()
    await settle()
    assert group.began[new] == (0, "vault-a-1")
    assert harness.controller.status().roles["rollout"].finished == 1


@pytest.mark.parametrize("comes", [False, True])
async def test_too_few_workers_fail_the_job_with_the_roles_name(folder: Path, comes: bool):
    workers = {"min": 2, "start_timeout_s": 30}
    harness, group = await started(folder, workers=workers)
    group.lose(101)
    if comes:  # to a node on which no vault can be opened: its function is not called
        harness.cluster.vaults.may_open = False
        group.start("z")
        await settle()
    else:  # nobody starts one while the cluster's head is away
        harness.cluster.head_answers.clear()
        await harness.clock.advance(60)
        harness.cluster.head_answers.set()
    await harness.clock.advance(25)
    assert harness.states[-1] is State.RUNNING
    await harness.clock.advance(8)
    failure = await harness.fails(JobFailedError, "role rollout has 1 of at least 2 workers")
    assert "roles.rollout.workers.min" in failure.fix


async def test_scaling_and_spares(folder: Path):
    harness, group = await started(folder, workers=ROLE["workers"] | {"spares": 1})
    assert group.wanted == (1, 3)
    spare = group.start()
    await settle()
    assert spare not in group.began
    group.lose(102)
    await settle()
    assert group.began[spare] == (1, "vault-a-1"), "at once"
    assert "rollout: 1 worker wanted; it has 1" in harness.controller.scale(1, 1, "rollout")
    await settle()
    assert (group.wanted, group.released) == ((1, 2), [spare])
    harness.controller.scale(1, 4, "rollout")
    new = group.start()
    await settle()
    assert group.began[new] == (1, "vault-a-1")
    assert harness.events.facts.roles["rollout"].scaled == (1, 4)
    assert reread(harness.events.facts).roles == harness.events.facts.roles
    with pytest.raises(ConfigError, match=r"no role .rolout. .did you mean .rollout"):
        harness.controller.scale(1, 1, "rolout")


async def test_draining_node_is_left(folder: Path):
    harness, group = await started(folder)
    harness.cluster.draining = frozenset("a")
    await harness.clock.advance(4)
    assert group.left == {"a"}
    assert [fault.cause for fault in harness.log.of(RoleFault)] == ["preempted"] * 2
    assert sorted(index for index, _ in group.replaced) == [101, 102]


async def test_faults_of_a_roles_worker(folder: Path):
    harness, group = await started(folder)
    reply = await harness.controller.inject(['kill(role="rollout", worker=1)'])
    assert reply == 'job: kill(role="rollout", worker=1, step=3) at the next opportunity'
    await settle()
    assert group.injected == [(102, "kill")], "at once: no step may end before it"
    (fired,) = harness.log.of(FaultFired)
    assert fired == FaultFired(1, 3, 'kill(role="rollout", worker=1, step=3)', "rollout")
    group.lose(102)
    await harness.controller.inject(['stop(role="rollout", worker=1, step=5)'])
    await harness.steps(2)
    assert len(group.injected) == 1, "the worker is not there"
    group.start()
    await harness.steps(1)
    assert group.injected[1:] == [(103, "stop")]
    await harness.steps(1)
    assert len(group.injected) == 2
    for text, why in (
        ('kill(role="rolout", worker=0)', "no role 'rolout' .did you mean 'rollout'"),
        ('kill(role="rollout", worker=2)', "role rollout has at most 2 workers"),
    ):
        with pytest.raises(ConfigError, match=why):
            await harness.controller.inject([text])


async def test_functions_see_the_end_of_the_job(folder: Path):
    harness, group = await started(folder)
    await harness.finish()
    assert sorted(group.ended) == [101, 102]


async def test_limits_stay_when_another_controller_continues(folder: Path):
    harness, _ = await started(folder)
    harness.controller.scale(2, 5, "rollout")
    await settle()
    harness.run.cancel()
    await settle()
    second = Harness(folder, past=reread(harness.events.facts), roles={"rollout": ROLE})
    await settle()
    assert second.events.facts.roles["rollout"].sizes[-1].workers == 0
    role = second.controller.status().roles["rollout"]
    assert (role.workers, role.workers_min, role.workers_max) == (0, 2, 5)


async def test_budget_goes_on_when_another_controller_continues(folder: Path):
    """However many faults it allows: more than the journal keeps to show."""
    past, most = JobFacts(1.0), MAX_ROLE_ENTRIES + 20
    worker = FakeRoleGroup().info(1)
    for at_s in [time.time() - 5000] * MAX_ROLE_ENTRIES + [time.time() - 20] * most:
        lost = RoleFault("rollout", 0, "lost", worker, "killed", 0, window_s=3600.0)
        past = past.apply(lost, at_s)
    assert len(past.roles["rollout"].seen_faults) == most
    roles = {"rollout": ROLE | {"recovery": {"max_faults": most, "fault_window_s": 3600}}}
    harness = Harness(folder, past=reread(past), roles=roles)
    group = harness.roles["rollout"]
    await settle()
    group.start()
    await settle()
    await harness.trained(2)
    group.lose(101)
    await settle()
    failure = await harness.fails(JobFailedError, f"had {most + 1} faults within 3600 s")
    assert "role rollout" in failure.seen


async def test_each_role_has_its_least_number_before_one_has_more(folder: Path):
    reward = {"entrypoint": "m:score", "workers": {"min": 2, "max": 3}}
    harness = Harness(folder, roles={"rollout": ROLE, "reward": reward})
    first, second = harness.roles["rollout"], harness.roles["reward"]
    await settle()
    first.start()
    second.start()
    await settle()
    assert (first.wanted, second.wanted) == ((1, 1), (2, 2))
    second.start()
    await settle()
    assert (first.wanted, second.wanted) == ((1, 2), (2, 3))
    await harness.finish()
