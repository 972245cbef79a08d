"""`ctx` of a role's function, the view that its process keeps up to date, and what it reports."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayzero.engine.errors import ConfigError, EngineError
from rayzero.workers.context import Context
from rayzero.workers.messages import RoleReport, RoleWorkerSpec
from rayzero.workers.roles.context import RoleContext
from rayzero.workers.roles.process import RoleProcess
from rayzero.workers.roles.reporter import RoleReporter
from rayzero.workers.roles.view import TASKS_PHASE, RoleView
from rayzero.workers.spread import Spread
from rayzero.workers.training_thread import ProgressRecord
from tests.workers.support import mirrored_setup
from tests.workers.vault.support import VaultCluster


class Host(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(index=7, ending=Event(), view=RoleView(), vault=None, reporter=None)
        self.now_s = 0.0
        self.progress = ProgressRecord(0, lambda: self.now_s)


def context(folder: Path, host: Host, **changes: Any) -> RoleContext:
    spec = RoleWorkerSpec(**vars(mirrored_setup(folder, "m:f")), role="rollout", **changes)
    return RoleContext(spec, 0, torch.device("cpu"), host)


def test_tasks_need_a_place_in_the_chain(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="which takes nothing") as error:
        context(tmp_path, Host()).tasks()
    assert error.value.fix == "roles.rollout.takes in the job file"


def test_rollouts_need_roles_that_make_them(tmp_path: Path) -> None:
    session: Any = SimpleNamespace(assignment=SimpleNamespace(rollout_group=0))
    ctx = Context(mirrored_setup(tmp_path, "m:f"), torch.device("cpu"), session)
    with pytest.raises(ConfigError, match="in a job without rollouts"):
        ctx.rollouts([1, 2], None)


def test_worker_that_waits_for_tasks_gives_signs_and_sees_the_end(tmp_path: Path) -> None:
    host = Host()
    ctx = context(tmp_path, host, stage=0, group=2)
    host.now_s = 50.0
    tasks = ctx.tasks()
    assert (host.progress.heartbeat().phase, tasks.group) == (TASKS_PHASE, 2)
    host.now_s = 60.0
    assert host.progress.heartbeat().silent_s == 10.0
    ctx.check()
    assert host.progress.heartbeat().silent_s == 0.0
    host.ending.set()
    with pytest.raises(SystemExit):
        next(tasks)  # there is no buffer, for however long


def test_process_connects_to_the_present_vault(cluster: VaultCluster) -> None:
    process: Any = SimpleNamespace(vault=None, view=RoleView(), index=7)
    first, second = cluster.vault("a").address(), cluster.vault("b").address()
    RoleProcess.update(process, RoleView(first))
    client = process.vault
    assert client.address == first
    RoleProcess.update(process, RoleView(""))  # it is being opened again
    assert process.vault is client
    RoleProcess.update(process, RoleView(second))
    assert process.vault.address == second
    assert client._closed.is_set()
    RoleProcess.update(process, RoleView("gone"))  # a vault that was lost meanwhile
    assert (process.vault.address, process.view) == (second, RoleView("gone"))
    process.vault.close()


def test_report_is_of_what_came_since_the_last_one():
    reporter = RoleReporter()
    assert reporter.take("rollout", 2) == []
    for reward in (0.0, torch.tensor([3.0])):
        reporter.add({"reward": reward, "tokens": 10})
    reporter.add_refresh(7, 0.25)
    values = {"reward": Spread(2, 3.0, 0.0, 3.0)}
    assert reporter.take("rollout", 2) == [RoleReport("rollout", 2, values, 20.0, 7, 0.25)]
    assert reporter.take("rollout", 2) == []


def test_threads_of_the_function_lose_nothing():
    reporter, reports = RoleReporter(), list[RoleReport]()
    threads = [
        Thread(target=lambda: [reporter.add({"a": 1, "tokens": 1}) for _ in range(2000)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        reports += reporter.take("rollout", 0)
    reports += reporter.take("rollout", 0)
    assert sum(report.tokens for report in reports) == 6000
    assert sum(report.values["a"].count for report in reports if report.values) == 6000


@pytest.mark.parametrize("metrics", [{"a": "high"}, {"phases/a": 1}, {"": 1}, {"a": [1, 2]}])
def test_wrong_values_are_errors_and_change_nothing(metrics: dict[str, Any]):
    reporter = RoleReporter()
    with pytest.raises(EngineError, match=r"ctx\.report"):
        reporter.add({"good": 1, **metrics})
    assert reporter.take("rollout", 0) == []
