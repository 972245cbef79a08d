"""Faults of workers on NCCL's semantics: what is believed, told and kept after an abort.

`tests/support/nccl_like` is the backend. Each test names the finding of `gpu.md` that it shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    LogLine,
    MirrorPolicy,
    StepReport,
    Stopped,
)
from tests.support.nccl_like.settings import NcclLike
from tests.workers import recovery_jobs
from tests.workers.local_workers import LocalWorkers
from tests.workers.recovery_checks import check_results, wait_for_lost_worker
from tests.workers.support import mirrored_setup

STEPS = 12
MAX_FENCE_S = 15
STANDS_S = 0.4
pytestmark = pytest.mark.slow

StartWorkers = Callable[..., LocalWorkers]


@pytest.fixture
def start_workers(tmp_path) -> Iterator[StartWorkers]:
    groups: list[LocalWorkers] = []

    def make(
        stage: int, settings: NcclLike, function: str = "train", count: int = 3, **changes: Any
    ) -> LocalWorkers:
        entrypoint = f"tests.workers.nccl_like_jobs:{function}"
        defaults = {"steps": STEPS, "engine_config": recovery_jobs.engine_config(stage)}
        spec = mirrored_setup(tmp_path, entrypoint, **(defaults | changes))
        groups.append(LocalWorkers(spec, count, settings))
        return groups[-1]

    yield make
    for local in groups:
        local.close()


def fence(local: LocalWorkers, *indices: int) -> dict[int, Any]:
    """The ends of generation 1. Who has seen the lost peer's error itself has ended with that."""
    for index in indices:
        local.workers[index].call("fence", 1)
    ends = {index: local.wait_end(index, 1) for index in indices}
    for index, end in ends.items():
        group_failed = isinstance(end, Crashed) and end.kind == "collective"
        assert isinstance(end, Stopped) or group_failed, local.texts(index)
    return ends


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
    local.form(2, members, restore)
    for index in members:
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)


def reported_steps(local: LocalWorkers, index: int) -> list[int]:
    return [
        message.step
        for message in local.seen[index]
        if isinstance(message, StepReport) and message.generation == 1
    ]


def heartbeat(local: LocalWorkers, index: int) -> Heartbeat:
    local.seen[index] += local.workers[index].call("poll", 0.0)
    return [message for message in local.seen[index] if isinstance(message, Heartbeat)][-1]


@pytest.mark.parametrize(
    ("stage", "garbage"), [(0, "nan"), (3, "nan"), (0, "random"), (3, "plausible")]
)
def test_aborted_vote_is_not_believed(start_workers, stage, garbage):
    """B2: survivors read the ballot when the peer dies, and what an abort leaves there."""
    fault = 'kill(rank=1, step=5, phase="reduce")'
    settings = NcclLike(garbage=garbage, watchdog_s=30)
    local = start_workers(stage, settings, faults=(fault,), args={"mirror": [1, "await", 4]})
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == 1
    wait_until_standing(local, 0, 2)
    for index, end in fence(local, 0, 2).items():
        assert max(reported_steps(local, index)) == 4, "rank 1 never voted for step 5"
        assert end.memory is None or end.memory.step == 4
    assert max(slot.step for slot in local.vault.inventory()) == 4
    finish(local, [0, 2], step=4)


def test_aborted_vote_is_not_reported_without_a_mirror(start_workers):
    """B2: a NaN ballot looks like a skipped step."""
    fault = 'kill(rank=1, step=5, phase="reduce")'
    settings = NcclLike(garbage="nan", watchdog_s=30)
    local = start_workers(0, settings, faults=(fault,), mirror=MirrorPolicy())
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == 1
    wait_until_standing(local, 0, 2)
    for index, end in fence(local, 0, 2).items():
        assert max(reported_steps(local, index)) == 4
        assert end.memory is not None, "at stage 0 a survivor has all of the state"
        assert end.memory.step == 4


def test_two_threads_abort_one_group(start_workers):
    """B6: the fence's thread aborts, and the training thread, which that has freed, too."""
    local = start_workers(
        0,
        NcclLike(abort_s=1.0, garbage="plausible"),
        faults=('kill(rank=1, step=5, phase="backward")',),
        mirror=MirrorPolicy(),
    )
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == 1
    for index in (0, 2):
        local.wait_step(index, 1, 4)  # rank 1 passed its vote, so they will
    for index, end in fence(local, 0, 2).items():
        lost = [text for text in local.texts(index) if "state is lost" in text]
        assert not lost
        assert end.memory is not None, "at stage 0 a survivor has all of the state"
        assert end.memory.step == 4


def test_survivor_of_a_stopped_rank_is_waiting(start_workers):
    """B9: a survivor's host waits in a read; the hang rule must not take it for the culprit."""
    local = start_workers(
        3,
        NcclLike(),
        faults=('stop(rank=2, step=4, phase="backward")',),
        args={"mirror": [2, "await", 3]},
    )
    local.form(1, [0, 1, 2])
    for index in (0, 1):
        local.wait_step(index, 1, 3)
    deadline_s = time.monotonic() + 60
    while not FaultRecord(local.setup.output_dir).read():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    wait_until_standing(local, 0, 1)
    deadline_s = time.monotonic() + 15  # a busy machine may have stopped it on its way there
    while not all(heartbeat(local, index).waiting for index in (0, 1)):
        assert time.monotonic() < deadline_s, [heartbeat(local, index) for index in (0, 1)]
        time.sleep(0.1)
    started = time.monotonic()
    fence(local, 0, 1)
    assert time.monotonic() - started < MAX_FENCE_S
    finish(local, [1, 0], step=3)


@pytest.mark.parametrize("seed", range(3))
def test_launch_on_an_aborted_group_is_a_stop(start_workers, seed):
    """B19: torch raises errors of several types there, and none is the user's."""
    local = start_workers(0, NcclLike(seed=seed), "reduce_twice", steps=10_000, ledger=False)
    local.form(1, [0, 1, 2])
    local.wait_step(0, 1, 3)
    local.kill(1)
    assert wait_for_lost_worker(local) == 1
    fence(local, 0, 2)


def test_survivors_live_on_after_a_repair(start_workers):
    """B1: by torch's defaults a watchdog ends the process a while after it has seen a loss."""
    settings = NcclLike(watchdog_s=0.0, dump_s=2.0)
    local = start_workers(
        2,
        settings,
        faults=('kill(rank=1, step=5, phase="backward")',),
        args={"pause_s": 0.5},
    )
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == 1
    time.sleep(0.3)  # the watchdogs see it
    fence(local, 0, 2)
    finish(local, [0, 2], step=4)


def test_poisoned_device_is_a_fault_of_hardware(start_workers):
    """B3: a sticky error is not the user's, and its process must end."""
    local = start_workers(2, NcclLike(), args={"poison": [[1, 5]]})
    local.form(1, [0, 1, 2])
    crash = local.wait_end(1, 1)
    assert isinstance(crash, Crashed)
    assert crash.kind == "device", crash
    fence(local, 0, 2)
    # Step 4 may have been finished, but not mirrored and reported, when the kernel failed.
    told = min(max(reported_steps(local, index)) for index in (0, 1, 2))
    assert told in (3, 4)
    finish(local, [0, 2], step=told)


def test_late_errors_on_other_ranks_are_stops(start_workers):
    """A launch fails some time after a peer's death: that is not the user's error either."""
    local = start_workers(
        0,
        NcclLike(late_error_s=0.0),
        "reduce_twice",
        steps=10_000,
        ledger=False,
    )
    local.form(1, [0, 1, 2])
    local.wait_step(0, 1, 3)
    local.kill(1)
    assert wait_for_lost_worker(local) == 1
    fence(local, 0, 2)


def test_no_line_says_that_a_generation_was_lost(start_workers):
    """A slow abort of every rank at once, and of one that is still joining."""
    local = start_workers(3, NcclLike(abort_s=0.6))
    local.form(1, [0, 1, 2], recipients=(0, 1))
    time.sleep(0.5)
    fence(local, 0, 1)
    for index in (0, 1):
        assert not [line for line in local.seen[index] if isinstance(line, LogLine)]
    local.form(2, [0, 1])
    for index in (0, 1):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)


@pytest.mark.parametrize(("mirror", "restored"), [("hold", 3), ("await", 4)])
def test_step_is_done_again_only_if_nobody_was_told(start_workers, mirror, restored):
    """Rank 1 dies in step 5. Its mirror of step 4 is complete, and then that step is reported; or
    it is not, and then the step was no news yet."""
    fault = 'kill(rank=1, step=5, phase="forward")'
    local = start_workers(2, NcclLike(), faults=(fault,), args={"mirror": [1, mirror, 4]})
    local.form(1, [0, 1, 2])
    local.read_until_lost(1)
    assert wait_for_lost_worker(local) == 1
    assert [fired.step for fired in FaultRecord(local.setup.output_dir).read()] == [5]
    for index in (0, 2):
        local.wait_step(index, 1, 4)
    fence(local, 0, 2)
    assert max(reported_steps(local, 1)) <= restored
    assert max(local.told_steps([(3, 0)])) <= restored
    finish(local, [0, 2], step=restored)
    assert local.told_steps([(3, 0), (2, restored)]) == [*range(1, STEPS + 1)]
