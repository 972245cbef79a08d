"""In-place repair by workers: real processes and a vault, without Ray.

The oracle is a plain torch loop over the same samples.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rayzero
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.messages import (
    Crashed,
    Finished,
    MirrorPolicy,
    Pinned,
    Restored,
    StepReport,
    Stopped,
)
from rayzero.workers.vault.records import Restore
from tests.workers import recovery_jobs
from tests.workers.local_workers import NODE, LocalWorkers
from tests.workers.recovery_checks import STEPS, check_results, check_weights, wait_for_lost_worker
from tests.workers.support import setup

MAX_FENCE_S = 15  # less than the timeouts of collectives and the vault
pytestmark = pytest.mark.slow


@pytest.fixture
def start_workers(tmp_path) -> Iterator[Callable[..., LocalWorkers]]:
    groups: list[LocalWorkers] = []

    def make(count: int, stage: int = 2, function: str = "train", **changes: Any) -> LocalWorkers:
        changes = {"mirror": MirrorPolicy(replicas=1, every_steps=1), "ledger": True} | changes
        groups.append(
            LocalWorkers(
                setup(
                    entrypoint=f"tests.workers.recovery_jobs:{function}",
                    steps=STEPS,
                    output_dir=str(tmp_path),
                    working_dir=os.getcwd(),
                    **{"engine_config": recovery_jobs.engine_config(stage), "args": {}} | changes,
                ),
                count,
            )
        )
        return groups[-1]

    yield make
    for local in groups:
        local.close()


def carried(local: LocalWorkers, rank: int) -> list[list[int]]:
    """What the state of its own was set to in that rank: [generation, rank of the value, step, sum
    of the steps until then]."""
    path = Path(local.setup.output_dir, f"carried-{rank}")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


PHASES = ("forward", "reduce", "update", "publish", "mirror", "data")


@pytest.mark.parametrize(("step", "phase"), [*((5, phase) for phase in PHASES), (1, "reduce")])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_killed_worker_loses_no_finished_step(start_workers, stage, step, phase, pytestconfig):
    """In the first step, too, whose beginning is mirrored. Survivors stay."""
    fault = f'kill(rank=1, step={step}, phase="{phase}")'
    local = start_workers(3, stage, faults=(fault,))
    pids = {index: worker.pid for index, worker in local.workers.items()}
    local.form(1, [0, 1, 2])
    local.read_until_lost(1)
    assert wait_for_lost_worker(local) == 1
    assert [fired.step for fired in FaultRecord(local.setup.output_dir).read()] == [step]
    ends = {}
    for index in (0, 2) if step > 1 else ():
        local.wait_step(index, 1, step - 1)
    for index in (0, 2):
        local.workers[index].call("fence", 1)
        ends[index] = local.wait_end(index, 1)
        assert isinstance(ends[index], Stopped | Crashed), local.texts(index)
        assert ends[index].stays
    beside = pytestconfig.getoption("--nccl-like")  # training: there, states are copied
    if beside and step == 1 and local.newest_step(1, 3) is None:
        return  # that of the beginning was not complete: the job starts anew
    restore = local.slots(1, 3)
    told = local.told_steps([(3, 0)])
    # There, a step is told when its copy is complete, which is by the next vote.
    untold = beside and phase in ("forward", "data", "reduce")
    untold = untold and step > 1
    assert restore.step >= max(told, default=0), "a step was told to be finished, and is lost"
    assert step - 1 - bool(untold) <= restore.step <= step - 1
    local.form(2, [0, 2], restore)
    for index in (0, 2):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
        restored = next(
            message
            for message in local.seen[index]
            if isinstance(message, Restored) and message.generation == 2
        )
        assert restored.step == restore.step
    assert {0: pids[0], 2: pids[2]} == {index: local.workers[index].pid for index in (0, 2)}
    told = local.told_steps([(3, 0), (2, restore.step)])
    assert told == [*range(1, STEPS + 1)], "each step was told once"
    check_results(local)


@pytest.mark.parametrize(
    ("stage", "calls", "fault", "entries"),
    [
        (3, (), 'kill(rank=1, step=5, phase="publish")', None),
        (3, (), 'kill(rank=1, step=5, phase="mirror")', None),
        (1, (), 'kill(rank=1, step=5, phase="forward")', 0),
        (3, (), 'kill(rank=1, step=6, phase="data")', None),
        (1, ("groups",), 'kill(rank=1, step=3, phase="backward")', 1),
        (2, ("first", "step", "epoch"), 'kill(rank=1, step=3, phase="backward")', 0),
        (1, ("epoch",), 'kill(rank=1, step=5, phase="update")', None),
        (1, ("ahead", "step"), 'kill(rank=1, step=4, phase="reduce")', 0),
    ],
)
def test_new_rank_and_survivor_meet_where_a_step_begins(
    start_workers, tmp_path, stage, calls, fault, entries
):
    """What the survivor calls with all ranks after the step in which a rank is lost, and what the
    new one calls before its first, has no partner. `entries`: how often the survivor's function is
    called again; None where that depends on how far it was."""
    local = start_workers(
        3, stage, "train_with_calls", faults=(fault,), args={"calls": calls}, ledger=False
    )
    local.form(1, [0, 1])
    assert wait_for_lost_worker(local) == 1
    members, generation = [0, 1], 1
    while generation < 5:
        alive = [index for index in members if index != 1]
        for index in alive:
            local.workers[index].call("fence", generation)
        ends = [local.wait_end(index, generation) for index in alive]
        if all(isinstance(end, Finished) for end in ends):
            break
        restore = local.slots(generation, len(members))
        members, generation = [2, 0], generation + 1
        local.form(generation, members, restore)
        finished = [local.wait_end(index, generation) for index in members]
        if all(isinstance(end, Finished) for end in finished):
            break
    assert generation < 5, local.texts(0)
    check_weights(local, recovery_jobs.EPOCH_STEPS)
    again = [path.name for path in tmp_path.glob("entry-*-1") if path.name != "entry-1-1"]
    if entries is not None:
        assert len(again) == entries, again


@pytest.mark.parametrize("phase", ["reduce", "update"])
def test_offloaded_state_is_restored_from_vault(start_workers, tmp_path, phase):
    """The NVMe file of a worker is removed when its process dies."""
    config = recovery_jobs.engine_config(3)
    config["zero_optimization"] |= {
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")},
        "offload_param": {"device": "cpu"},
        "sub_group_size": 64,
    }
    fault = f'kill(rank=1, step=5, phase="{phase}")'
    local = start_workers(3, 3, faults=(fault,), engine_config=config)
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == 1
    for index in (0, 2):
        local.wait_step(index, 1, 4)
    for index in (0, 2):
        local.workers[index].call("fence", 1)
        assert isinstance(local.wait_end(index, 1), Stopped | Crashed), local.texts(index)
    restore = local.slots(1, 3)
    assert restore.step == 4
    local.form(2, [0, 2], restore)
    for index in (0, 2):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)
    assert not list((tmp_path / "nvme").iterdir())


def test_fence_does_not_wait_for_stopped_worker(start_workers):
    local = start_workers(3, 3, faults=('stop(rank=2, step=4, phase="backward")',))
    local.form(1, [0, 1, 2])
    local.wait(0, lambda message: isinstance(message, StepReport) and message.step == 3)
    deadline_s = time.monotonic() + 200
    while not FaultRecord(local.setup.output_dir).read():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    time.sleep(0.5)  # until the other ranks wait for the stopped one
    started = time.monotonic()
    for index in (0, 1):
        local.workers[index].call("fence", 1)
    assert isinstance(local.wait_end(0, 1), Stopped), local.texts(0)
    # Rank 0 may have closed its connections before rank 1 was told to stop.
    assert isinstance(local.wait_end(1, 1), Stopped | Crashed), local.texts(1)
    assert time.monotonic() - started < MAX_FENCE_S
    local.form(2, [1, 0], local.slots(1, 3))
    for index in (0, 1):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)


@pytest.mark.parametrize("recipients", [(0, 1), (1,)])
def test_fence_ends_wait_for_missing_rank(start_workers, recipients):
    local = start_workers(3)
    local.form(1, [0, 1, 2], recipients=recipients)
    time.sleep(0.5)
    started = time.monotonic()
    for index in recipients:
        local.workers[index].call("fence", 1)
        # The end of the first may close the store that the second uses.
        assert isinstance(local.wait_end(index, 1), Stopped | Crashed), local.texts(index)
    assert time.monotonic() - started < MAX_FENCE_S
    local.form(2, [0, 1])
    for index in (0, 1):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)


def test_growth_and_shrink_lose_no_step(start_workers):
    local = start_workers(3, 3, faults=("slow(rank=0, step=2, seconds=0.2, steps=12)",))
    local.form(1, [0, 1])
    newcomer = 2
    local.wait(1, lambda message: isinstance(message, StepReport))
    local.workers[1].call("drain", 1)
    ends = [local.wait_end(index, 1) for index in (0, 1)]
    assert all(isinstance(message, Stopped) for message in ends), ends
    steps = {message.memory.step for message in ends}
    assert len(steps) == 1, "all ranks must stop after the same step"
    restore = local.slots(1, 2)
    assert {restore.step} == steps
    grown = restore.step
    local.form(2, [0, 1, newcomer], restore)
    local.wait(newcomer, lambda message: isinstance(message, StepReport))
    local.workers[newcomer].call("drain", 2)
    ends = [local.wait_end(index, 2) for index in (0, 1, 2)]
    local.form(3, [2], local.slots(2, 3))
    assert isinstance(local.wait_end(2, 3), Finished), local.texts(2)
    check_results(local)
    # A rank that the state does not have gets rank 0's value; those that stay keep their own.
    total = sum(range(grown + 1))
    assert [carried(local, rank) for rank in (0, 1, 2)] == [[], [], [[2, 0, grown, total]]]


def test_newcomer_has_the_survivors_values_not_its_files(start_workers, tmp_path):
    """Files whose values are the oracle's are read in generation 1 only, each element once; those
    of the repair have others."""
    numel = save_initial_weights(tmp_path / "weights-1")
    save_initial_weights(tmp_path / "weights-2", change=7.0)
    fault = 'kill(rank=1, step=5, phase="backward")'
    local = start_workers(3, 3, "train_pretrained", faults=(fault,))
    local.form(1, [0, 1])
    assert wait_for_lost_worker(local) == 1
    local.wait_step(0, 1, 4)
    local.workers[0].call("fence", 1)
    assert isinstance(local.wait_end(0, 1), Stopped | Crashed), local.texts(0)
    local.form(2, [2, 0], local.slots(1, 2))
    for index in (0, 2):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)
    counts = [int((tmp_path / f"read-1-{rank}").read_text()) for rank in (0, 1)]
    assert sum(counts) == numel
    assert (tmp_path / "read-2-0").read_text() == "0"
    assert not (tmp_path / "read-2-1").exists(), "a survivor's function is not called again"
    # The newcomer is rank 0 now; the survivor, which was, keeps its own.
    assert carried(local, 0) == [[2, 0, 4, 1 + 2 + 3 + 4]]
    assert carried(local, 1) == []


def test_a_checkpoint_to_resume_wins_over_files(start_workers, tmp_path):
    """`checkpoint.resume` of what another run has saved, at another world size; the files, whose
    values differ, are not read."""
    save_initial_weights(tmp_path / "weights-1", change=7.0)
    config = recovery_jobs.engine_config(0)
    engine, *_ = rayzero.initialize(model=recovery_jobs.make_model(torch.float64), config=config)
    for x, y in recovery_jobs.batches(5):
        engine.backward(torch.nn.functional.mse_loss(engine(x), y))
        engine.step()
    total = {"rank": 0, "step": 5, "total": torch.tensor(15), "ema": None}
    engine.state.register("total", lambda: total, print)
    engine.save_checkpoint(tmp_path / "before")
    engine.close()
    local = start_workers(2, 3, "train_pretrained", ledger=False)
    local.form(1, [0, 1], Restore(5, checkpoint=str(tmp_path / "before/global_step5")))
    for index in (0, 1):
        assert isinstance(local.wait_end(index, 1), Finished), local.texts(index)
    check_weights(local)
    assert [(tmp_path / f"read-1-{rank}").read_text() for rank in (0, 1)] == ["0", "0"]
    assert [carried(local, rank) for rank in (0, 1)] == [[[1, 0, 5, 15]], [[1, 0, 5, 15]]]


def save_initial_weights(folder: Path, change: float = 0.0) -> int:
    """The oracle's initial weights, and how many elements they have."""
    folder.mkdir()
    state = recovery_jobs.make_model(torch.float64).state_dict()
    save_file({name: value + change for name, value in state.items()}, folder / "model.safetensors")
    return sum(value.numel() for value in state.values())


def test_drained_rank_does_not_disconnect_slower_ranks(start_workers):
    local = start_workers(3, 2, "train_late")
    local.form(1, [0, 1, 2])
    for index in (0, 1, 2):
        local.workers[index].call("drain", 1)
    ends = [local.wait_end(index, 1) for index in (0, 1, 2)]
    assert all(isinstance(message, Stopped) for message in ends), local.texts(0)
    local.form(2, [1, 2], local.slots(1, 3))
    for index in (1, 2):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)


def test_finished_worker_can_join_another_generation(start_workers):
    local = start_workers(2, 2)
    local.form(1, [0, 1])
    for index in (0, 1):
        assert isinstance(local.wait_end(index, 1), Finished), local.texts(index)
    restore = local.slots(1, 2)
    local.form(2, [1, 0], Restore(restore.step, restore.slots))
    for index in (0, 1):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local)


def test_complete_state_is_salvaged_from_survivor_without_replicas(start_workers):
    """The loop ends before `steps`, as with early stopping."""
    fault, last = 'kill(rank=0, step=6, phase="backward")', STEPS - 2
    local = start_workers(4, 0, faults=(fault,), mirror=MirrorPolicy(), args={"last_step": last})
    local.form(1, [0, 1, 2])
    assert wait_for_lost_worker(local) == 0
    for index in (1, 2):
        local.wait_step(index, 1, 5)
    for index in (1, 2):
        local.workers[index].call("fence", 1)
    memories = {index: local.wait_end(index, 1).memory for index in (1, 2)}
    assert {state.step for state in memories.values()} == {5}
    assert all(state.whole for state in memories.values())
    assert local.vault.inventory() == []
    saved = local.workers[2].call("salvage", local.vault.address())
    assert (saved.step, saved.world_size) == (5, 1)
    from rayzero.workers.vault.records import SlotRef

    newcomer = 3
    local.form(2, [1, newcomer], Restore(5, (SlotRef(1, saved.rank, 5, NODE),)))
    for index in (1, newcomer):
        assert isinstance(local.wait_end(index, 2), Finished), local.texts(index)
    check_results(local, last)
    assert carried(local, 1) == [[2, saved.rank, 5, 15]], "the only rank that was saved"


def test_user_errors_and_damaged_state_are_distinguished(start_workers):
    local = start_workers(1, 2, faults=('raise_error(rank=0, step=3, phase="forward")',))
    local.form(1, [0])
    crash = local.wait_end(0, 1)
    assert isinstance(crash, Crashed)
    assert (crash.kind, crash.step, crash.memory.step) == ("user", 3, 2)
    local.form(2, [0], Restore(2, local.slots(1, 1).slots[:0], checkpoint="/nowhere/step-2"))
    crash = local.wait_end(0, 2)
    assert isinstance(crash, Crashed)
    assert crash.kind == "state", crash


def test_all_ranks_pin_same_checkpoint_step(start_workers):
    plan = MirrorPolicy(replicas=1, every_steps=1, checkpoint_every_steps=5)
    local = start_workers(2, 2, mirror=plan)
    local.form(1, [0, 1])
    for index in (0, 1):
        assert isinstance(local.wait_end(index, 1), Finished), local.texts(index)
        pins = [message for message in local.seen[index] if isinstance(message, Pinned)]
        # Step 10 is due while step 5 is still pinned, and is pinned once that is unpinned.
        assert [(message.step, message.checkpoint) for message in pins] == [(5, True)]
    pinned = [slot for slot in local.vault.inventory() if slot.pinned]
    assert {(slot.rank, slot.step) for slot in pinned} == {(0, 5), (1, 5)}
    check_results(local)


def test_fault_record_is_json_lines(start_workers):
    local = start_workers(1, 1, faults=("slow(rank=0, step=2, seconds=0.01)",))
    local.form(1, [0])
    assert isinstance(local.wait_end(0, 1), Finished)
    with open(f"{local.setup.output_dir}/faults.jsonl") as lines:
        assert [json.loads(line)["step"] for line in lines] == [2]
    assert signal.SIGKILL  # nothing was killed
