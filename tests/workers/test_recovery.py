"""In-place repair by workers: real processes and a vault, without Ray.

The oracle is a plain torch loop over the same samples.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import rayzero
from rayzero.orchestrator.policies.recovery import Excluded, FromWorkers, select_recovery_step
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired, parse_fault
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    Joined,
    LogLine,
    MirrorPolicy,
    Pinned,
    Restored,
    Stopped,
)
from rayzero.workers.vault.records import Restore, SlotRef
from rayzero.workers.vault.vault import Vault
from tests.support.nccl_like.settings import NcclLike
from tests.workers import recovery_jobs
from tests.workers.local_workers import (
    NODE,
    STEPS,
    LocalWorkers,
    check_results,
    check_weights,
    no_other_nodes,
    read_loads,
)

MAX_FENCE_S = 15  # less than the timeouts of collectives and the vault
pytestmark = pytest.mark.slow


def kill(rank: int, step: int, phase: str) -> tuple[str]:
    return (f'kill(rank={rank}, step={step}, phase="{phase}")',)


def carried(local: LocalWorkers, rank: int) -> list[list[int]]:
    """What the state of its own was set to in that rank: [generation, rank of the value, step, sum
    of the steps until then]."""
    path = Path(local.setup.output_dir, f"carried-{rank}")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("stage", "step", "phase", "offloads"),
    [
        (1, 1, "reduce", False),
        (3, 1, "reduce", False),
        (3, 5, "forward", False),
        (1, 5, "reduce", False),
        (2, 5, "update", False),
        (1, 5, "publish", False),
        (3, 5, "publish", False),
        (2, 5, "mirror", False),
        (1, 5, "data", False),
        (3, 5, "update", True),
    ],
)
def test_killed_worker_loses_no_finished_step(
    start_workers, tmp_path, stage, step, phase, offloads, pytestconfig
):
    """In the first step, too, whose beginning is mirrored. Survivors stay. The NVMe file of a
    worker is removed when its process dies."""
    config = recovery_jobs.engine_config(stage)
    if offloads:
        config["zero_optimization"] |= {
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")},
            "offload_param": {"device": "cpu"},
            "sub_group_size": 64,
        }
    local = start_workers(3, faults=kill(1, step, phase), engine_config=config)
    pids = {index: worker.pid for index, worker in local.workers.items() if index != 1}
    local.form(1, [0, 1, 2])
    local.read_until_lost(1)
    assert local.wait_lost() == 1
    assert local.fired_steps() == [step]
    for index in (0, 2) if step > 1 else ():
        local.wait_step(index, 1, step - 1)
    assert all(end.stays for end in local.fence(1, [0, 2]).values())
    beside = pytestconfig.getoption("--nccl-like")  # training: there, states are copied
    if beside and step == 1 and local.newest_step(1, 3) is None:
        return  # that of the beginning was not complete: the job starts anew
    restore = local.slots(1, 3)
    told = local.told_steps([(3, 0)])
    # There, a step is told when its copy is complete, which is by the next vote.
    untold = beside and phase in ("forward", "data", "reduce") and step > 1
    assert restore.step >= max(told, default=0), "a step was told to be finished, and is lost"
    assert step - 1 - bool(untold) <= restore.step <= step - 1
    local.finish(2, [0, 2], restore)
    for index in (0, 2):
        found = [it for it in local.seen[index] if isinstance(it, Restored) and it.generation == 2]
        assert found[0].step == restore.step
    assert pids == {index: local.workers[index].pid for index in (0, 2)}
    told = local.told_steps([(3, 0), (2, restore.step)])
    assert told == [*range(1, STEPS + 1)], "each step was told once"
    check_results(local)
    assert not list(tmp_path.glob("nvme/*"))


@pytest.mark.parametrize(
    ("stage", "calls", "fault", "entries"),
    [
        (3, (), kill(1, 5, "mirror"), None),
        (1, (), kill(1, 5, "forward"), 0),
        (3, (), kill(1, 6, "data"), None),
        (1, ("groups",), kill(1, 3, "backward"), 1),
        (2, ("first", "step", "epoch"), kill(1, 3, "backward"), 0),
        (1, ("epoch",), kill(1, 5, "update"), None),
        (1, ("ahead", "step"), kill(1, 4, "reduce"), 0),
    ],
)
def test_new_rank_and_survivor_meet_where_a_step_begins(
    start_workers, tmp_path, stage, calls, fault, entries
):
    """What the survivor calls with all ranks after the step in which a rank is lost, and what the
    new one calls before its first, has no partner. `entries`: how often the survivor's function is
    called again; None where that depends on how far it was."""
    options = {"args": {"calls": calls}, "ledger": False}
    local = start_workers(3, stage, "recovery_jobs:train_with_calls", faults=fault, **options)
    local.form(1, [0, 1])
    assert local.wait_lost() == 1
    members, generation = [0], 1
    while generation < 5:
        for index in members:
            local.workers[index].call("fence", generation)
        ends = [local.wait_end(index, generation) for index in members]
        if all(isinstance(end, Finished) for end in ends):
            break
        restore = local.slots(generation, 2)
        members, generation = [2, 0], generation + 1
        local.form(generation, members, restore)
        ends = [local.wait_end(index, generation) for index in members]
        if all(isinstance(end, Finished) for end in ends):
            break
    assert generation < 5, local.texts(0)
    check_weights(local, recovery_jobs.EPOCH_STEPS)
    again = [path.name for path in tmp_path.glob("entry-*-1") if path.name != "entry-1-1"]
    if entries is not None:
        assert len(again) == entries, again


def test_survivors_read_nothing_and_a_half_update_is_not_used(start_workers, pytestconfig):
    """Rank 1 is replaced in place; then rank 0's update of step 8 fails half-way, when the others
    have finished that step; then rank 2 leaves."""
    # The pause lets mirrors beside training end: otherwise step 3 is restored.
    faults = ('slow(rank=1, step=5, seconds=0.3, phase="backward")', *kill(1, 5, "reduce"))
    args = {"update_fails": (2, 0, 8)}
    local = start_workers(4, 3, "recovery_jobs:train_kept", faults=faults, args=args)
    folder = local.setup.output_dir
    spare = 3
    local.form(1, [0, 1, 2])
    assert local.wait_lost() == 1
    assert local.fired_steps() == [5, 5]
    local.fence(1, [0, 2])
    restore = local.slots(1, 3)
    assert restore.step == 4
    local.form(2, [0, spare, 2], restore)
    assert isinstance(local.wait_end(0, 2), Crashed)
    assert Path(folder, "update-failed").exists()
    local.fence(2, [spare, 2])
    for rank in (0, 2):
        step, moved, copied, read = read_loads(folder, rank)[-1]
        assert (step, read) == (restore.step, 0)
        assert moved >= 2 * copied > 0
    assert not read_loads(folder, 1)  # a new worker has no engine before
    restore = local.slots(2, 3)
    assert restore.step == 7
    local.finish(3, [0, spare], restore)
    assert len(read_loads(folder, 0)) == 1, "a function that is called again has a new engine"
    # Beside training, the interrupt may come before or after the update of step 8 on the others.
    if not pytestconfig.getoption("--nccl-like"):
        assert "it is of step 8, restored is 7" in Path(folder, "kept-1").read_text()
        assert read_loads(folder, 1)[-1][:3] == (7, 0, 0)
    check_results(local)


def test_fence_does_not_wait_for_stopped_worker(start_workers):
    local = start_workers(3, 3, faults=('stop(rank=2, step=4, phase="backward")',))
    local.form(1, [0, 1, 2])
    local.wait_step(0, 1, 3)
    local.wait_fired()
    time.sleep(0.5)  # until the other ranks wait for the stopped one
    started = time.monotonic()
    ends = local.fence(1, [0, 1])
    assert isinstance(ends[0], Stopped), local.texts(0)
    assert time.monotonic() - started < MAX_FENCE_S
    local.finish(2, [1, 0], local.slots(1, 3))
    check_results(local)


@pytest.mark.parametrize(
    ("nccl_like", "command", "present"),
    [
        (None, "fence", [0, 1]),
        (None, "fence", [1]),
        (None, "stop", [0]),
        (NcclLike(), "stop", [0]),
        (NcclLike(abort_s=0.6), "fence", [0, 1]),
    ],
)
def test_wait_for_a_missing_rank_is_ended(start_workers, nccl_like, command, present):
    """A worker joins its process group before it calls the training function. Also by a slow abort
    of every rank at once. The next generation forms in a new process."""
    local = start_workers(3, 3, nccl_like=nccl_like)
    local.form(1, [0, 1, 2], recipients=present)

    def is_joining(message: object) -> bool:
        return isinstance(message, Heartbeat) and message.phase == "join" and message.silent_s > 0.3

    for index in present:
        local.wait(index, is_joining)
    started = time.monotonic()
    for index in present:
        local.workers[index].call(command, 1)
    # The end of the first may close the store that the second uses.
    first, *others = [local.wait_end(index, 1) for index in present]
    assert isinstance(first, Stopped), local.texts(present[0])
    assert all(isinstance(end, Stopped | Crashed) for end in others)
    assert time.monotonic() - started < MAX_FENCE_S
    for index in present:
        unwanted = (Joined, LogLine) if nccl_like else Joined  # of a generation that was lost
        assert not [it for it in local.seen[index] if isinstance(it, unwanted)]
    local.finish(2, [0, 1])
    check_results(local)


def test_growth_and_shrink_lose_no_step(start_workers):
    local = start_workers(3, 3, faults=("slow(rank=0, step=2, seconds=0.2, steps=12)",))
    local.form(1, [0, 1])
    local.wait_step(1, 1, 1)
    steps = {end.memory.step for end in local.drain(1, [0, 1], told=[1])}
    restore = local.slots(1, 2)
    assert {restore.step} == steps, "all ranks must stop after the same step"
    # Nobody can load it: it is in the memory of two ranks, whose shards are cut for two.
    local.vault.close()
    local.vault = Vault("job", NODE, no_other_nodes)
    local.form(2, [0, 1, 2], restore)
    ends = {index: local.wait_end(index, 2) for index in (0, 1, 2)}
    assert "state" in {end.kind for end in ends.values()}
    left = {index: end.memory for index, end in ends.items() if end.memory}
    source = select_recovery_step((), left, None, Excluded(), 0)
    assert source == FromWorkers(restore.step, (0, 1))
    for index in source.workers:
        local.workers[index].call("salvage", local.vault.address(), source.step)
    assert local.slots(1, 2) == restore
    local.form(3, [0, 1, 2], restore)
    local.wait_step(2, 3, 1)
    local.drain(3, [0, 1, 2], told=[2])
    local.finish(4, [2], local.slots(3, 3))
    check_results(local)
    # A rank that the state does not have gets rank 0's value; those that stay keep their own.
    total = sum(range(restore.step + 1))
    seen = [carried(local, it) for it in (0, 1, 2)]
    assert seen == [
        [[3, 0, restore.step, total]],
        [[3, 1, restore.step, total]],
        [[3, 0, restore.step, total]],
    ]


def test_newcomer_has_the_survivors_values_not_its_files(start_workers, tmp_path):
    """Files whose values are the oracle's are read in generation 1 only, each element once; those
    of the repair have others."""
    numel = save_initial_weights(tmp_path / "weights-1")
    save_initial_weights(tmp_path / "weights-2", change=7.0)
    local = start_workers(3, 3, "recovery_jobs:train_pretrained", faults=kill(1, 5, "backward"))
    local.form(1, [0, 1])
    assert local.wait_lost() == 1
    local.wait_step(0, 1, 4)
    local.fence(1, [0])
    local.finish(2, [2, 0], local.slots(1, 2))
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
    local = start_workers(2, 3, "recovery_jobs:train_pretrained", ledger=False)
    local.finish(1, [0, 1], Restore(5, checkpoint=str(tmp_path / "before/global_step5")))
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
    local = start_workers(3, 2, "recovery_jobs:train_late")
    local.form(1, [0, 1, 2])
    local.drain(1, [0, 1, 2], told=[0, 1, 2])
    local.finish(2, [1, 2], local.slots(1, 3))
    check_results(local)


def test_complete_state_is_salvaged_from_survivor_without_replicas(start_workers):
    """The loop ends before `steps`, as with early stopping."""
    last = STEPS - 2
    changes = {"mirror": MirrorPolicy(), "args": {"last_step": last}}
    local = start_workers(4, 0, faults=kill(0, 6, "backward"), **changes)
    local.form(1, [0, 1, 2])
    assert local.wait_lost() == 0
    for index in (1, 2):
        local.wait_step(index, 1, 5)
    memories = [end.memory for end in local.fence(1, [1, 2]).values()]
    assert [(memory.step, memory.whole) for memory in memories] == [(5, True)] * 2
    assert local.vault.inventory() == []
    saved = local.workers[2].call("salvage", local.vault.address(), 5)
    assert (saved.step, saved.world_size) == (5, 1)
    local.finish(2, [1, 3], Restore(5, (SlotRef(1, saved.rank, 5, NODE),)))
    check_results(local, last)
    assert carried(local, 1) == [[2, saved.rank, 5, 15]], "the only rank that was saved"


def is_past_vote(local: LocalWorkers, stage: int, step: int) -> bool:
    """Whether rank 0 waits for its peer to publish weights, or, at stage 3, in the next step."""
    beat = local.workers[0].call("dump_stack").beat
    return beat.step > step if stage == 3 else beat.phase == "publish" and beat.waiting


@pytest.mark.parametrize("stage", [1, 3])
def test_lost_vault_and_interrupted_step_lose_no_finished_step(start_workers, stage):
    """One rank has ended the step in which the other one is interrupted, and the copies are lost
    with their vault: that of the step before is in both ranks' memory."""
    local = start_workers(2, stage, "recovery_jobs:train_torn")
    local.form(1, [0, 1])
    folder = Path(local.setup.output_dir)
    torn = recovery_jobs.TORN_STEP
    deadline_s = time.monotonic() + 200
    while not ((folder / "voted-1").exists() and is_past_vote(local, stage, torn)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    local.vault.close()
    local.vault = Vault("job", NODE, no_other_nodes)
    ends = local.fence(1, [0, 1])
    left = {index: end.memory for index, end in ends.items()}
    assert (left[0].step, left[1].step) == (None if stage < 3 else torn, torn - 1), "it publishes"
    source = select_recovery_step((), left, None, Excluded(), 0)
    assert source == FromWorkers(torn - 1, (0, 1))
    for index in source.workers:
        local.workers[index].call("salvage", local.vault.address(), source.step)
    local.finish(2, [0, 1], local.slots(1, 2))
    check_results(local)


def test_errors_of_the_user_and_damaged_state_are_distinguished(start_workers, tmp_path):
    """The errors are faults that are injected while the worker runs: into the current generation
    and the next."""
    local = start_workers(1, steps=100_000, faults=("raise_error(rank=7, step=1)",))
    local.form(1, [0])
    local.wait_step(0, 1, 3)
    first = 'raise_error(rank=0, step=4, phase="reduce")'
    local.workers[0].call("inject", [parse_fault(first)])
    local.workers[0].call("inject", [])  # an older list that arrives late
    crash = local.wait_end(0, 1)
    assert isinstance(crash, Crashed)
    assert "injected in phase reduce" in crash.error
    assert (crash.kind, crash.memory.step) == ("user", crash.step - 1)
    assert FaultFired(0, crash.step, first) in local.seen[0]
    second = f"raise_error(rank=0, step={crash.step + 5})"
    local.faults = parse_fault(first), parse_fault(second)
    local.form(2, [0], local.slots(1, 1))
    again = local.wait_end(0, 2)
    assert isinstance(again, Crashed)
    assert again.step == crash.step + 5
    assert [fired.fault for fired in FaultRecord(tmp_path).read()] == [first, second]
    local.form(3, [0], Restore(2, checkpoint="/nowhere/step-2"))
    damaged = local.wait_end(0, 3)
    assert isinstance(damaged, Crashed)
    assert damaged.kind == "state", damaged


def test_all_ranks_pin_same_checkpoint_step(start_workers):
    """And the last step can be restored, by ranks in another order."""
    plan = MirrorPolicy(replicas=1, every_steps=1, checkpoint_every_steps=5)
    local = start_workers(2, 2, mirror=plan)
    local.finish(1, [0, 1])
    for index in (0, 1):
        pins = [message for message in local.seen[index] if isinstance(message, Pinned)]
        # Step 10 is due while step 5 is still pinned, and is pinned once that is unpinned.
        assert [message.step for message in pins] == [5]
    pinned = [slot for slot in local.vault.inventory() if slot.pinned]
    assert {(slot.rank, slot.step) for slot in pinned} == {(0, 5), (1, 5)}
    check_results(local)
    local.finish(2, [1, 0], local.slots(1, 2))
    check_results(local)
