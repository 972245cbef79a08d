"""When a rank mirrors its state, and into which slot of a vault."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.session import NO_REQUESTS, StepRequests
from rayzero.workers.messages import Mirrored, MirrorPolicy
from rayzero.workers.mirror import Mirror
from rayzero.workers.state_copy import MIRROR_COST_FRACTION, CopyCost
from rayzero.workers.training_thread import StopFlag
from rayzero.workers.vault.records import Restore, VaultMemoryError
from tests.workers.mirror_rig import EVERY, Rig, host_state
from tests.workers.support import ASSIGN, GivenUp, give_up
from tests.workers.vault.support import VaultCluster, refs, steps_of

EVERY_3 = replace(EVERY, every_steps=3)
MakeRig = Callable[..., Rig]


@pytest.fixture
def make(cluster: VaultCluster) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(*args: Any, collective: bool = False, **options: Any) -> Rig:
        rigs.append(Rig(cluster, host_state(collective=collective), *args, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.mirror.close()


def cost(rig: Rig) -> CopyCost:
    return rig.mirror._copier.cost


def held(rig: Rig) -> list[int]:
    return [step for _, step in steps_of(rig.vault)]


def pins(rig: Rig) -> list[int]:
    return [pinned.step for pinned in rig.posted]


def memory_used(rig: Rig) -> int:
    usage = rig.vault.usage()
    return usage["slots"] + usage["spare"]


AT_RESTORED = {"generation": 2, "restore": Restore(10)}


@pytest.mark.parametrize(
    ("policy", "last", "assign", "steps", "pinned", "mirrored"),
    [
        (EVERY_3, None, AT_RESTORED, (11, 12), [], []),
        (EVERY_3, None, AT_RESTORED, (11, 17), [], [13, 16]),
        (MirrorPolicy(checkpoint_every_steps=4), None, {}, (1, 3), [], []),
        (MirrorPolicy(checkpoint_every_steps=4), None, {}, (1, 5), [4], [4]),
        (replace(EVERY, checkpoint_every_steps=100), 5, {}, (1, 5), [5], [4, 5]),
        (EVERY, None, {"replica_nodes": ("b",)}, (1, 8), [], [1, 2, 7, 8]),
    ],
    ids=["before", "interval", "no checkpoint", "checkpoint", "last step", "other nodes"],
)
def test_steps_that_are_mirrored_and_pinned(
    make: MakeRig, policy, last, assign, steps, pinned, mirrored
):
    """At an interval from the restored step on; without replicas for checkpoints only; pinned for
    other nodes while slots are free."""
    rig = make(policy, last, **assign)
    rig.steps(*steps)
    assert (pins(rig), held(rig)) == (pinned, mirrored)


def test_drain_is_mirrored(make: MakeRig):
    rig = make(MirrorPolicy())
    rig.steps(1, 2)
    rig.step(3, StepRequests(drain=True))
    assert held(rig) == [3]


def test_older_generations_are_dropped_at_second_mirrored_step(make: MakeRig):
    make().steps(9, 10)
    rig = make(generation=2, restore=Restore(10, tuple(refs((1, 0, 10)))))
    rig.step(11)
    assert held(rig) == [10, 11]
    rig.step(12)
    assert held(rig) == [11, 12]


def test_no_more_memory_than_two_slots_is_used_through_generations(make: MakeRig):
    """The vault learns what each of the first votes shows before the next slot is reserved."""
    rig = make()
    rig.steps(6, 7)
    used = memory_used(rig)
    rig.mirror.close()
    rig = make(generation=2, restore=Restore(7, tuple(refs((1, 0, 7)))))
    for step in range(8, 13):
        rig.step(step)
        assert memory_used(rig) == used
        assert held(rig) == [step - 1, step]


def test_checkpoint_waits_for_free_slot(make: MakeRig):
    rig = make(replace(EVERY, checkpoint_every_steps=3), 11)
    rig.steps(1, 7)
    assert pins(rig) == [3], "step 6 waits for a free slot"
    rig.vault.unpin(1, 3)
    rig.steps(8, 11)
    assert pins(rig) == [3, 8]
    rig.vault.unpin(1, 8)
    rig.step(12)
    assert pins(rig) == [3, 8, 12]


@pytest.mark.parametrize(("checkpoints", "mirrored"), [(100, [6, 8]), (None, [3, 6])])
def test_last_step_that_nobody_knew_of_is_mirrored_when_the_function_has_returned(
    make: MakeRig, checkpoints: int | None, mirrored: list[int]
):
    """For a checkpoint. In the older of two slots: a rank that ends before has the newer one's
    step."""
    rig = make(replace(EVERY_3, checkpoint_every_steps=checkpoints))
    rig.steps(1, 8)
    assert held(rig) == [3, 6]
    for _ in range(2):
        rig.mirror.finish(8, rig.state)
        assert held(rig) == mirrored


def test_all_ranks_must_be_ready_for_pin(make: MakeRig):
    rig = make(replica_nodes=("b",))
    assert rig.mirror.step_requests(1).pin
    rig.steps(1, 2, NO_REQUESTS)  # but the other ranks were not
    assert not any(entry.pinned for entry in rig.vault._registry._entries)


def test_lost_vault_does_not_stop_training(make: MakeRig, caplog: pytest.LogCaptureFixture):
    rig = make()
    rig.vault.close()
    rig.steps(1, 3)
    assert "continues without a replica" in caplog.text
    assert not rig.mirror.step_requests(4).pin


def test_insufficient_memory_fails_only_first_mirror(
    cluster: VaultCluster, make: MakeRig, caplog: pytest.LogCaptureFixture
):
    cluster.vault(available=lambda: 0)
    with pytest.raises(VaultMemoryError):
        make().step(1)
    make(restore=Restore(4)).steps(5, 6)
    assert "continues without a replica" in caplog.text


def test_state_of_another_size_gets_new_slots_one_by_one(make: MakeRig):
    """A state that grows leaves no slots behind, and always one complete version."""
    rig, checked = make(), list[int]()

    def check_newest_stays(step: int) -> None:
        assert step - 1 in held(rig)
        checked.append(step)

    for step in range(1, 20):
        if step % 5 == 0:
            rig.state.resize(1000 * step)
        if step > 1:
            rig.state.on_copy = lambda step=step: check_newest_stays(step)
        rig.step(step)
        assert held(rig) == [step - 1, step][-min(step, 2) :]
        assert len(rig.vault._registry._entries) == min(step, 2)
    assert checked == [*range(2, 20)]
    assert rig.vault.usage()["spare"] == 0


@pytest.mark.parametrize("collective", [False, True])
def test_aborted_collective_update_is_neither_committed_nor_reported(
    make: MakeRig, collective: bool
):
    """An abort during the copy: only an update that holds exchanges may have been changed by it."""
    rig = make(collective=collective)
    rig.step(1)
    rig.state.on_pack = rig.interrupt.set
    if not collective:
        rig.step(2)
        assert held(rig) == [1, 2]
        return
    with pytest.raises(GivenUp):
        rig.step(2)
    assert held(rig) == [1]
    assert rig.posted == []


@pytest.mark.parametrize("collective", [False, True])
def test_step_without_mirror_is_looked_at_too(collective: bool):
    stop, state = StopFlag(give_up), host_state(collective=collective)
    mirror = Mirror(MirrorPolicy(), ASSIGN, None, None, lambda message: None, stop)
    with state.updating():
        pass
    stop.set()
    if collective:
        with pytest.raises(GivenUp):
            mirror.step_done(1, NO_REQUESTS, state)
    else:
        mirror.step_done(1, NO_REQUESTS, state)
    assert state.consistent == (not collective)
    mirror.close()


@given(mirror_s=st.floats(1e-4, 10), step_s=st.floats(1e-3, 10))
def test_chosen_interval_keeps_cost_near_its_limit(mirror_s: float, step_s: float):
    costs = CopyCost()
    costs._step_s = step_s
    costs.mirror_finished(mirror_s)
    assert mirror_s / costs.interval_steps <= 1.25 * MIRROR_COST_FRACTION * step_s * (1 + 1e-9)
    assert (
        costs.interval_steps == 1
        or mirror_s / (costs.interval_steps - 1) > MIRROR_COST_FRACTION * step_s * 0.5
    )


def test_cost_counts_packing_and_not_the_first_write_into_a_new_slot(make: MakeRig):
    rig = make()
    rig.steps(1, 2)  # two new slots
    assert cost(rig)._mirror_s == 0
    rig.state.resize(5000)
    rig.step(3)
    assert cost(rig)._mirror_s == 0, "a state of another size gets a new slot"
    rig.state.on_pack = lambda: time.sleep(0.02)
    rig.steps(4, 5)
    assert cost(rig)._mirror_s >= 0.02


def test_pause_between_steps_has_little_effect_on_step_time():
    costs = CopyCost()
    costs._step_s = 0.1
    costs._last_step_at_s -= 60.0  # such as an evaluation
    costs.step_finished(mirrored=False)
    assert costs._step_s < 0.13


def test_interval_of_mirrors_beside_training_follows_the_slowdown():
    costs = CopyCost(beside=True)

    def steps(*took_s: tuple[float, bool | None]) -> float:
        for seconds, mirrored in took_s:
            costs._last_step_at_s -= seconds
            costs.step_finished(mirrored)
        return costs.interval_steps

    assert steps((60.0, False), (60.0, None)) == 2.0, "start and first slots: not measured"
    assert steps(*[(1.0, True)] * 3) == 2.0, "nothing to compare with yet"
    assert steps((1.0, False), (1.0, True)) == 1.0, "however long the copies take"
    assert steps(*[(1.5, True), (1.0, False)] * 30) == 10.0  # 0.5 s of 10 s
    assert steps(*[(1.0, True)] * 200) == 2.0, "the step without a mirror is out of date"


VERSIONS = replace(EVERY, every_steps=None, version_every_steps=2)


@pytest.mark.parametrize(
    ("restore", "lacks"),
    [
        (None, True),
        (Restore(10, checkpoint="/runs/step-10"), True),
        (Restore(10, tuple(refs((1, 0, 10)))), False),
    ],
)
def test_what_a_generation_begins_with_is_a_version(
    make: MakeRig, restore: Restore | None, lacks: bool
):
    rig = make(VERSIONS, generation=2, restore=restore)
    state: Any = rig.state
    state.step = rig.mirror.newest_step
    assert rig.mirror.lacks_version == lacks
    rig.mirror.begin(state)
    rig.mirror.settle()
    assert rig.posted == [Mirrored(2, 0, state.step)]
    assert not rig.mirror.lacks_version
    assert held(rig) == [state.step]
    rig.mirror.go_back(4)  # the function has loaded an older checkpoint of its own
    assert rig.mirror.lacks_version


def test_what_a_generation_begins_with_frees_no_older_version(make: MakeRig):
    """Whether the other ranks have loaded it is not known before the first vote."""
    older = make()
    older.steps(1, 3)
    rig = make(VERSIONS, generation=2, restore=Restore(10, checkpoint="/runs/step-10"))
    state: Any = rig.state
    state.step = 10
    rig.mirror.begin(state)
    rig.mirror.settle()
    assert held(rig) == [2, 3, 10]
    rig.steps(11, 12, replace(NO_REQUESTS, mirror_interval=1.0))
    assert held(rig) == [11, 12]


def test_without_readers_no_version_is_made(make: MakeRig):
    rig = make(EVERY)
    assert not rig.mirror.lacks_version
    state: Any = rig.state
    state.step = 0
    rig.mirror.begin(state)  # before the job's first step, for a repair
    rig.mirror.settle()
    assert rig.posted == []
    rig.mirror.go_back(0)
    assert not rig.mirror.lacks_version


@pytest.mark.parametrize(("every", "asked"), [(None, 2.0), (1, 1.0), (5, 2.0)])
def test_versions_limit_the_interval_however_much_mirrors_cost(
    make: MakeRig, every: int | None, asked: float
):
    rig = make(replace(VERSIONS, every_steps=every))
    rig.step(1)
    cost(rig)._mirror_s, cost(rig)._step_s = 10.0, 0.01
    assert rig.mirror.step_requests(2).mirror_interval == asked
    rig.steps(2, 9)
    assert rig.mirror.interval_steps <= 3
    assert rig.mirror.newest_step >= 8
