"""Survivors shrink their communicator: on NCCL's semantics (`tests/support/nccl_like`).

What the controller decides is in `tests/orchestrator/control/test_communicator_shrink.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rayzero.engine.errors import CollectiveError, ConfigError
from rayzero.workers import communicator_shrink, process_group
from rayzero.workers.communicator_shrink import (
    CommunicatorShrinker,
    check_shrink,
    register_default_group,
)
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import (
    Crashed,
    Finished,
    GenerationSpec,
    LogLine,
    RankAssignment,
    Shrunk,
)
from rayzero.workers.rendezvous_store import AuthenticatedStore
from tests.support.nccl_like.settings import NcclLike
from tests.workers.local_workers import LocalWorkers
from tests.workers.support import ASSIGN, poll_until
from tests.workers.test_nccl_like import (
    StartWorkers,
    reported_steps,
    start_workers,
    wait_until_standing,
)
from tests.workers.test_recovery import check_results, wait_for_lost_worker
from tests.workers.test_worker import MakeWorker, make_worker

__all__ = ["make_worker", "start_workers"]  # fixtures
LIMIT_S = 20.0
CPU = torch.device("cpu")


def shrink(local: LocalWorkers, lost: tuple[int, ...], *indices: int) -> dict[int, str]:
    """Of generation 1; each one's error, empty if it succeeded."""
    for index in indices:
        local.workers[index].call("shrink", 1, lost)
    return {index: outcome(local, index) for index in indices}


def outcome(local: LocalWorkers, index: int) -> str:
    local.wait_end(index, 1)
    (message,) = (message for message in local.seen[index] if isinstance(message, Shrunk))
    return message.error


def finish(local: LocalWorkers, members: list[int], *, shrunk: bool, generation: int = 2) -> None:
    """The next generation continues over that group, and ends like plain torch."""
    restore = local.slots(1, world_size=3)
    # A step is finished once every rank, the lost one too, has reported it: its mirror is complete.
    told = [max(reported_steps(local, index)) for index in (0, 1, 2)]
    assert restore.step in (3, 4), "the fault was in step 5, beside the copy of 4"
    assert min(told) <= restore.step, "a step that all have told is lost"
    local.form(generation, members, restore, shrinks=True, shrunk=shrunk)
    kind = "shrunken" if shrunk else "made"
    for index in members:
        assert isinstance(local.wait_end(index, generation), Finished), local.texts(index)
        lines = [line.text for line in local.seen[index] if isinstance(line, LogLine)]
        groups = [line for line in lines if line.startswith("group of")]
        assert groups == ["group of 3: made", f"group of {len(members)}: {kind}"]
    check_results(local)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "fault", "lost"),
    [
        (3, 'kill(rank=0, step=5, phase="backward")', 0),  # its process serves the store
        (2, 'kill(rank=2, step=5, phase="reduce")', 2),
    ],
)
def test_survivors_continue_over_the_shrunken_group(
    start_workers: StartWorkers, stage, fault, lost
):
    settings = NcclLike(watchdog_s=0.0, dump_s=2.0)
    local = start_workers(stage, settings, faults=(fault,))
    local.form(1, [0, 1, 2], shrinks=True)
    local.read_until_lost(lost)
    assert wait_for_lost_worker(local) == lost
    members = [index for index in range(3) if index != lost]
    wait_until_standing(local, *members)
    assert shrink(local, (lost,), *members) == dict.fromkeys(members, "")
    finish(local, members, shrunk=True)


@pytest.mark.slow
def test_failure_on_one_rank_leads_to_another_group(start_workers: StartWorkers):
    """Rank 0's fails, so rank 2 waits for it until its limit. Neither has a shrunken group."""
    fault = 'kill(rank=1, step=5, phase="backward")'
    settings = NcclLike(watchdog_s=30, shrink_fails=(0,))
    local = start_workers(2, settings, faults=(fault,), hang_timeout_s=4)
    local.form(1, [0, 1, 2], shrinks=True)
    local.read_until_lost(1)
    assert wait_for_lost_worker(local) == 1
    wait_until_standing(local, 0, 2)
    errors = shrink(local, (1,), 0, 2)
    assert "injected" in errors[0]
    assert "within" in errors[2]
    restore = local.slots(1, world_size=3)
    local.form(2, [0, 2], restore, shrinks=True, shrunk=True)
    for index in (0, 2):
        end = local.wait_end(index, 2)
        assert isinstance(end, Crashed)
        assert (end.kind, "no shrunken communicator" in end.error) == ("collective", True)
    finish(local, [0, 2], shrunk=False, generation=3)


@pytest.mark.slow
def test_shrunken_group_that_is_not_wanted_is_aborted(start_workers: StartWorkers):
    """Rank 1 is killed, and a replacement is ready before the next generation begins."""
    fault = 'kill(rank=1, step=5, phase="forward")'
    local = start_workers(2, NcclLike(watchdog_s=30), faults=(fault,))
    local.form(1, [0, 1, 2], shrinks=True)
    assert wait_for_lost_worker(local) == 1
    assert shrink(local, (1,), 0, 2) == {0: "", 2: ""}
    restore = local.slots(1, world_size=3)
    members = [0, local.start_worker(), 2]
    local.form(2, members, restore, shrinks=True)
    for index in members:
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)


class SlowBackend:
    """A group on gloo that stands in `shrink` until the test lets it go on."""

    supports_shrinking = True

    def __init__(self) -> None:
        self.entered, self.goes_on, self.aborted = Event(), Event(), Event()

    def shrink(self, lost: list[int], flags: int) -> SlowBackend:
        assert (lost, flags) == ([1, 2], c10d.SHRINK_ABORT)
        self.entered.set()
        assert self.goes_on.wait(LIMIT_S)
        return self

    def rank(self) -> int:
        return 0

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def shrinker(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CommunicatorShrinker, SlowBackend]]:
    """Of a process that has joined a group."""
    backend, shrinker = SlowBackend(), CommunicatorShrinker(longest_s=LIMIT_S)
    group = SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(c10d, "_get_default_group", lambda: group)
    assert shrinker.take(ASSIGN) is None
    monkeypatch.setattr(communicator_shrink, "LEAST_LIMIT_S", LIMIT_S)
    shrinker.open(CPU)
    yield shrinker, backend
    backend.goes_on.set()


def begin(shrinker: CommunicatorShrinker) -> None:
    shrinker.begin(CPU, (2, 1), AuthenticatedStore(dist.HashStore(), b"secret"))


def test_abandoned_attempt_fails_and_what_it_makes_later_is_aborted(shrinker):
    shrinker, backend = shrinker
    begin(shrinker)
    assert backend.entered.wait(LIMIT_S)
    shrinker.abandon()
    assert "another one was lost" in (shrinker.settle() or "")
    assert not backend.aborted.is_set()
    backend.goes_on.set()
    assert backend.aborted.wait(LIMIT_S)
    assert shrinker.take(ASSIGN) is None


def test_attempt_that_nobody_waited_for_is_given_up_by_the_next_generation(shrinker):
    """The training function has returned meanwhile."""
    shrinker, backend = shrinker
    begin(shrinker)
    assert backend.entered.wait(LIMIT_S)
    assert shrinker.take(ASSIGN) is None
    backend.goes_on.set()
    assert backend.aborted.wait(LIMIT_S)


def test_groups_beside_it_prevent_a_shrink(shrinker, monkeypatch: pytest.MonkeyPatch):
    shrinker, backend = shrinker
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_map={"default": 0, "hpz": 0}))
    begin(shrinker)
    assert "groups beside it" in (shrinker.settle() or "")
    assert not backend.entered.is_set()


def test_job_fails_where_the_backend_has_no_shrink(make_worker: MakeWorker):
    worker = make_worker("returns")
    spec = GenerationSpec(1, 1, "127.0.0.1", worker.open_store(), shrinks=True)
    worker.assign(spec, RankAssignment(0, 0, 1, vault=""))
    crash = poll_until(worker.poll, Crashed)[-2]
    assert isinstance(crash, Crashed)
    assert crash.kind == "config"
    assert "recovery.communicator_shrink: the backend gloo of torch" in crash.error


def test_abandon_after_success_changes_nothing(shrinker):
    shrinker, backend = shrinker
    begin(shrinker)
    backend.goes_on.set()
    assert shrinker.settle() == ""
    shrinker.abandon()
    assert shrinker.settle() == ""
    assert shrinker.take(replace(ASSIGN, shrunk=True)) is backend
    assert not backend.aborted.is_set()


def test_no_attempt_begins_once_the_group_may_be_aborted(shrinker):
    shrinker, backend = shrinker
    assert shrinker.settle() is None
    begin(shrinker)
    assert shrinker.settle() is None
    assert not backend.entered.is_set()
    with pytest.raises(CollectiveError, match="rank 0 has no shrunken"):
        shrinker.take(replace(ASSIGN, shrunk=True))


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    process_group.abort_default_group(CPU, SocketTracker())
    assert not dist.is_initialized()


def test_backend_in_cpp_is_registered_like_a_group_that_was_made(no_group: None):
    """As torch's own would be: all that reads torch's tables works, and so does the abort."""
    store = dist.HashStore()
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=LIMIT_S))
    register_default_group(backend, store, CPU)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.barrier()
    subgroup = dist.new_group([0])
    dist.all_reduce(tensor, group=subgroup)
    assert dist.get_process_group_ranks(subgroup) == [0]
    assert c10d._resolve_process_group(dist.group.WORLD.group_name) is dist.group.WORLD
    with pytest.raises(ConfigError, match=r"(?s)communicator_shrink.*gloo.*2\.10.*NCCL 2\.27"):
        check_shrink(CPU)
