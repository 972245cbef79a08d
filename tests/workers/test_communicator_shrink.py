"""Survivors shrink their communicator: on NCCL's semantics (`tests/support/nccl_like`).

What the controller decides is in `tests/orchestrator/control/test_communicator_shrink.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rayzero.engine.errors import ConfigError
from rayzero.workers import process_group
from rayzero.workers.communicator_shrink import check_shrink, register_default_group
from rayzero.workers.group_sockets import SocketTracker
from rayzero.workers.messages import Crashed, Finished, LogLine, Shrunk
from tests.support.nccl_like.settings import NcclLike
from tests.workers.local_workers import LocalWorkers
from tests.workers.test_nccl_like import StartWorkers, start_workers, wait_until_standing
from tests.workers.test_recovery import check_results, wait_for_lost_worker

__all__ = ["start_workers"]  # a fixture
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


def finish(local: LocalWorkers, members: list[int], step: int, *, shrunk: bool) -> None:
    """The next generation continues behind `step`, over that group, and ends like plain torch."""
    restore = local.slots(1, world_size=3)
    assert restore.step == step
    local.form(2, members, restore, shrunk=shrunk)
    kind = "shrunken" if shrunk else "made"
    for index in members:
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
        lines = [line.text for line in local.seen[index] if isinstance(line, LogLine)]
        groups = [line for line in lines if line.startswith("group of")]
        assert groups == ["group of 3: made", f"group of {len(members)}: {kind}"]
    check_results(local)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "fault", "lost"),
    [
        (3, 'kill(rank=1, step=5, phase="forward")', 1),
        (2, 'kill(rank=0, step=5, phase="backward")', 0),  # its process serves the store
        (0, 'kill(rank=2, step=5, phase="reduce")', 2),
    ],
)
def test_survivors_continue_over_the_shrunken_group(
    start_workers: StartWorkers, stage, fault, lost
):
    settings = NcclLike(watchdog_s=0.0, dump_s=2.0)
    local = start_workers(stage, settings, faults=(fault,), communicator_shrink=True)
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == lost
    members = [index for index in range(3) if index != lost]
    wait_until_standing(local, *members)
    assert shrink(local, (lost,), *members) == dict.fromkeys(members, "")
    finish(local, members, 4, shrunk=True)


@pytest.mark.slow
def test_failure_ends_where_the_controller_gives_up(start_workers: StartWorkers):
    """Rank 0's fails; rank 2 waits for it, until it is fenced. The next group is made anew."""
    fault = 'kill(rank=1, step=5, phase="backward")'
    settings = NcclLike(watchdog_s=30, shrink_fails=(0,))
    local = start_workers(
        2, settings, faults=(fault,), communicator_shrink=True, hang_timeout_s=120
    )
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == 1
    wait_until_standing(local, 0, 2)
    local.workers[2].call("shrink", 1, (1,))
    local.workers[0].call("shrink", 1, (1,))
    assert "injected" in outcome(local, 0)
    local.workers[2].call("fence", 1)
    assert "another one was lost" in outcome(local, 2)
    finish(local, [0, 2], 4, shrunk=False)


@pytest.mark.slow
def test_rank_that_shrinks_alone_gives_up_after_its_limit(start_workers: StartWorkers):
    """The others abort, as they do when a replacement joins; rank 0 has no shrunken group then."""
    fault = 'kill(rank=1, step=5, phase="reduce")'
    local = start_workers(
        0, NcclLike(watchdog_s=30), faults=(fault,), communicator_shrink=True, hang_timeout_s=4
    )
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == 1
    began_s = time.monotonic()
    local.workers[2].call("fence", 1)
    assert "within" in shrink(local, (1,), 0)[0]
    assert time.monotonic() - began_s < LIMIT_S
    local.form(2, [0, 2], shrunk=True)
    for index in (0, 2):
        end = local.wait_end(index, 2)
        assert isinstance(end, Crashed)
        assert end.kind == "collective"
        assert "no shrunken communicator" in end.error


@pytest.mark.slow
def test_shrunken_group_that_is_not_wanted_is_aborted(start_workers: StartWorkers):
    """Rank 1 is killed, and a replacement is ready before the next generation begins."""
    fault = 'kill(rank=1, step=5, phase="forward")'
    local = start_workers(2, NcclLike(watchdog_s=30), faults=(fault,), communicator_shrink=True)
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == 1
    assert shrink(local, (1,), 0, 2) == {0: "", 2: ""}
    restore = local.slots(1, world_size=3)
    members = [0, local.start_worker(), 2]
    local.form(2, members, restore)
    for index in members:
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)


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
