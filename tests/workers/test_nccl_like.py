"""Faults of workers on NCCL's semantics: what is believed, told and kept after an abort.

`tests/support/nccl_like` is the backend. Each test names the finding of `gpu.md` that it shows.
"""

from __future__ import annotations

import time

import pytest

from rayzero.workers.messages import Crashed, Heartbeat, MirrorPolicy, StepReport
from tests.support.nccl_like.settings import NcclLike
from tests.workers.local_workers import STEPS, LocalWorkers, check_results

MAX_FENCE_S = 15
STANDS_S = 0.4
TRAIN, REDUCE = "nccl_like_jobs:train", "nccl_like_jobs:reduce_twice"
pytestmark = pytest.mark.slow


def kill(phase: str) -> tuple[str]:
    return (f'kill(rank=1, step=5, phase="{phase}")',)


def wait_until_standing(local: LocalWorkers, *indices: int) -> None:
    """Until these ranks have stood for a moment."""
    deadline_s = time.monotonic() + 60
    while any(heartbeat(local, index).silent_s < STANDS_S for index in indices):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def finish(local: LocalWorkers, members: list[int], step: int) -> None:
    """The next generation continues behind `step`, and ends like plain torch."""
    restore = local.slots(1, world_size=3)
    assert restore.step == step
    local.finish(2, members, restore)
    check_results(local)


def newest_report(local: LocalWorkers, index: int) -> int:
    reports = [it for it in local.seen[index] if isinstance(it, StepReport) and it.generation == 1]
    return max(report.step for report in reports)


def heartbeat(local: LocalWorkers, index: int) -> Heartbeat:
    local.seen[index] += local.workers[index].call("poll", 0.0)
    return [message for message in local.seen[index] if isinstance(message, Heartbeat)][-1]


@pytest.mark.parametrize(
    ("stage", "garbage", "mirrors"),
    [(0, "nan", True), (3, "nan", True), (3, "plausible", True), (0, "nan", False)],
)
def test_aborted_vote_is_not_believed(start_workers, stage, garbage, mirrors):
    """B2: survivors read the ballot when the peer dies, and what an abort leaves there; a NaN
    ballot looks like a skipped step."""
    settings = NcclLike(garbage=garbage, watchdog_s=30)
    changes = {"args": {"mirror": [1, "await", 4]}} if mirrors else {"mirror": MirrorPolicy()}
    local = start_workers(3, stage, TRAIN, settings, faults=kill("reduce"), **changes)
    local.form(1, [0, 1, 2])
    assert local.wait_lost() == 1
    wait_until_standing(local, 0, 2)
    for index, end in local.fence(1, [0, 2]).items():
        assert newest_report(local, index) == 4, "rank 1 never voted for step 5"
        if end.memory is not None or stage == 0:  # there a survivor has all of the state
            assert end.memory.step == 4
    if mirrors:
        assert max(slot.step for slot in local.vault.inventory()) == 4
        finish(local, [0, 2], step=4)


def test_two_threads_abort_one_group(start_workers):
    """B6: the fence's thread aborts, and the training thread, which that has freed, too."""
    settings = NcclLike(abort_s=1.0, garbage="plausible")
    mirror = MirrorPolicy()
    local = start_workers(3, 0, TRAIN, settings, faults=kill("backward"), mirror=mirror)
    local.form(1, [0, 1, 2])
    assert local.wait_lost() == 1
    for index in (0, 2):
        local.wait_step(index, 1, 4)  # rank 1 passed its vote, so they will
    for index, end in local.fence(1, [0, 2]).items():
        assert not [text for text in local.texts(index) if "state is lost" in text]
        assert end.memory is not None, "at stage 0 a survivor has all of the state"
        assert end.memory.step == 4


def test_survivor_of_a_stopped_rank_is_waiting(start_workers):
    """B9: a survivor's host waits in a read; the hang rule must not take it for the culprit."""
    faults = ('stop(rank=2, step=4, phase="backward")',)
    args = {"mirror": [2, "await", 3]}
    local = start_workers(3, 3, TRAIN, NcclLike(), faults=faults, args=args)
    local.form(1, [0, 1, 2])
    for index in (0, 1):
        local.wait_step(index, 1, 3)
    local.wait_fired()
    wait_until_standing(local, 0, 1)
    deadline_s = time.monotonic() + 15  # a busy machine may have stopped it on its way there
    while not all(heartbeat(local, index).waiting for index in (0, 1)):
        assert time.monotonic() < deadline_s, [heartbeat(local, index) for index in (0, 1)]
        time.sleep(0.1)
    started = time.monotonic()
    local.fence(1, [0, 1])
    assert time.monotonic() - started < MAX_FENCE_S
    finish(local, [1, 0], step=3)


@pytest.mark.parametrize("settings", [NcclLike(seed=0), NcclLike(seed=1), NcclLike(late_error_s=0)])
def test_launch_on_an_aborted_group_is_a_stop(start_workers, settings):
    """B19: torch raises errors of several types there, and some time after a peer's death; none is
    the user's."""
    local = start_workers(3, 0, REDUCE, settings, steps=10_000, ledger=False)
    local.form(1, [0, 1, 2])
    local.wait_step(0, 1, 3)
    local.kill(1)
    assert local.wait_lost() == 1
    local.fence(1, [0, 2])


def test_survivors_live_on_after_a_repair(start_workers):
    """B1: by torch's defaults a watchdog ends the process a while after it has seen a loss."""
    settings = NcclLike(watchdog_s=0.0, dump_s=2.0)
    pauses = {"pause_s": 0.5}
    local = start_workers(3, 2, TRAIN, settings, faults=kill("backward"), args=pauses)
    local.form(1, [0, 1, 2])
    assert local.wait_lost() == 1
    time.sleep(0.3)  # the watchdogs see it
    local.fence(1, [0, 2])
    finish(local, [0, 2], step=4)


def test_poisoned_device_is_a_fault_of_hardware(start_workers):
    """B3: a sticky error is not the user's, and its process must end."""
    local = start_workers(3, 2, TRAIN, NcclLike(), args={"poison": [[1, 5]]})
    local.form(1, [0, 1, 2])
    crash = local.wait_end(1, 1)
    assert isinstance(crash, Crashed)
    assert crash.kind == "device", crash
    local.fence(1, [0, 2])
    # Step 4 may have been finished, but not mirrored and reported, when the kernel failed.
    told = min(newest_report(local, index) for index in (0, 1, 2))
    assert told in (3, 4)
    finish(local, [0, 2], step=told)


@pytest.mark.parametrize(("mirror", "restored"), [("hold", 3), ("await", 4)])
def test_step_is_done_again_only_if_nobody_was_told(start_workers, mirror, restored):
    """Rank 1 dies in step 5. Its mirror of step 4 is complete, and then that step is reported; or
    it is not, and then the step was no news yet."""
    args = {"mirror": [1, mirror, 4], "pause_s": 0.1}  # in which a report would arrive
    local = start_workers(3, 2, TRAIN, NcclLike(), faults=kill("forward"), args=args)
    local.form(1, [0, 1, 2])
    local.read_until_lost(1)
    assert local.wait_lost() == 1
    assert local.fired_steps() == [5]
    for index in (0, 2):
        local.wait_step(index, 1, 4)
    local.fence(1, [0, 2])
    assert newest_report(local, 1) <= restored
    assert max(local.told_steps([(3, 0)])) <= restored
    finish(local, [0, 2], step=restored)
    assert local.told_steps([(3, 0), (2, restored)]) == [*range(1, STEPS + 1)]
