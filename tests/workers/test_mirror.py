"""When a rank mirrors its state, and into which buffer, with a fake vault."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.device import Device
from rayzero.engine.layout.state_index import BlockIndex
from rayzero.engine.session import NO_REQUESTS, StepRequests
from rayzero.workers.messages import MirrorPolicy, Pinned
from rayzero.workers.mirror import Mirror
from rayzero.workers.state_copy import MIRROR_COST_FRACTION, CopyCost
from rayzero.workers.training_thread import StopFlag
from rayzero.workers.vault.records import Restore, SlotRef, VaultGoneError, VaultMemoryError
from tests.workers.support import ASSIGN, GivenUp, give_up

EVERY = MirrorPolicy(replicas=1, every_steps=1)
EVERY_3 = replace(EVERY, every_steps=3)


@dataclass
class Buffer:
    data: memoryview = field(default_factory=lambda: memoryview(bytearray(64)))
    step: int = -1
    pinned: bool = False
    checksum: int | None = None
    constants_version: int = -1
    constants_checksum: int = 0
    constant_bytes: int = 0
    index: BlockIndex | None = None
    mapping: SimpleNamespace = field(default_factory=SimpleNamespace)

    def begin(self) -> None:
        assert not self.pinned
        self.step = -1

    def commit(self, step: int, metadata: bytes, pin: bool, checksum: int | None) -> None:
        self.step, self.pinned, self.checksum = step, pin, checksum


@dataclass
class FakeVault:
    buffers: list[Buffer] = field(default_factory=list)
    complete_generations: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    error: Exception | None = None

    def reserve(self, generation: int, rank: int, world: int, table: BlockIndex) -> Buffer:
        if self.error:
            raise self.error
        self.buffers = [buffer for buffer in self.buffers if buffer.step >= 0]
        self.buffers.append(Buffer(index=table))
        self.calls.append("reserve")
        return self.buffers[-1]

    def announce_loaded(self, generation: int, step: int) -> None:
        self.calls.append(f"loaded {step}")

    def announce_complete(self, generation: int) -> None:
        self.calls.append("complete")
        self.complete_generations.append(generation)

    def release_spares(self, used: list[Buffer]) -> None:
        self.calls.append(f"spares but {len(used)}")

    @property
    def steps(self) -> list[int]:
        return sorted(buffer.step for buffer in self.buffers)


@dataclass
class State:
    table: BlockIndex = field(default_factory=BlockIndex)
    constants: list[bool] = field(default_factory=list)
    device: Device = field(default_factory=lambda: Device(torch.device("cpu")))
    update_is_collective: bool = False
    on_copy: Callable[[], None] = lambda: None
    on_pack: Callable[[], None] = lambda: None
    confirmed: int = 0
    constants_version: int = 0

    def pack(self) -> State:
        self.on_pack()
        return self

    @property
    def index(self) -> BlockIndex:
        return self.table

    def targets(self, memory: memoryview, *, constants: bool) -> list[Any]:
        self.constants.append(constants)
        self.on_copy()
        return []

    def confirm(self) -> None:
        self.confirmed += 1

    def capture_metadata(self) -> Callable[[], bytes]:
        return lambda: b"{}"


def make_mirror(
    plan: MirrorPolicy, vault: FakeVault | None, last_step: int | None = None, **assign: Any
):
    posted: list[Pinned] = []
    stop = StopFlag(give_up)
    mirror = Mirror(plan, replace(ASSIGN, **assign), last_step, vault, posted.append, stop)  # type: ignore
    return mirror, posted


def cost(mirror: Mirror) -> CopyCost:
    return mirror._copier.cost


def run(mirror: Mirror, steps: range, state: State, agree: Any = None) -> None:
    for step in steps:
        agreed = agree(mirror, step) if agree else NO_REQUESTS
        mirror.step_done(step, agreed, state)  # type: ignore[arg-type]


def test_buffers_alternate_and_constants_are_written_once_per_buffer():
    vault, state = FakeVault(), State()
    mirror, posted = make_mirror(EVERY, vault)
    run(mirror, range(1, 6), state)
    assert vault.steps == [4, 5]
    assert state.constants == [True, True, False, False, False]
    assert posted == []


def test_constants_that_were_changed_are_written_to_every_buffer_again():
    vault, state = FakeVault(), State()
    mirror, _ = make_mirror(EVERY, vault)
    run(mirror, range(1, 4), state)
    state.constants_version += 1  # a script wrote a frozen weight
    run(mirror, range(4, 8), state)
    assert state.constants == [True, True, False, True, True, False, False]


def test_older_generations_are_dropped_at_second_mirrored_step():
    vault, state = FakeVault(), State()
    mirror, _ = make_mirror(EVERY, vault, generation=7, restore=Restore(10))
    run(mirror, range(11, 12), state)
    assert vault.complete_generations == []
    run(mirror, range(12, 15), state)
    assert vault.complete_generations == [7]


def test_fixed_interval_counts_from_restored_step():
    vault, state = FakeVault(), State()
    mirror, _ = make_mirror(MirrorPolicy(replicas=1, every_steps=3), vault, restore=Restore(10))
    requests = StepRequests(mirror_interval=3.0)
    run(mirror, range(11, 13), state, lambda *_: requests)
    assert vault.steps == []
    run(mirror, range(13, 18), state, lambda *_: requests)
    assert vault.steps == [13, 16]


def test_without_replicas_only_checkpoints_and_drains_are_mirrored():
    vault, state = FakeVault(), State()
    mirror, posted = make_mirror(MirrorPolicy(checkpoint_every_steps=4), vault)
    run(mirror, range(1, 4), state, lambda mirror, step: replace(mirror.step_requests(step)))
    assert vault.steps == []
    run(mirror, range(4, 6), state, lambda mirror, step: mirror.step_requests(step))
    assert vault.steps == [4]
    assert [(pinned.step, pinned.checkpoint) for pinned in posted] == [(4, True)]
    run(mirror, range(6, 7), state, lambda *_: StepRequests(drain=True))
    assert vault.steps == [4, 6]


def test_checkpoint_waits_for_free_buffer():
    vault, state = FakeVault(), State()
    mirror, posted = make_mirror(replace(EVERY, checkpoint_every_steps=3), vault, last_step=11)
    agree = lambda mirror, step: mirror.step_requests(step)  # noqa: E731
    run(mirror, range(1, 8), state, agree)
    assert [pinned.step for pinned in posted] == [3], "step 6 waits for a free buffer"
    for buffer in vault.buffers:
        buffer.pinned = False
    run(mirror, range(8, 12), state, agree)
    assert [pinned.step for pinned in posted] == [3, 8]
    for buffer in vault.buffers:
        buffer.pinned = False
    run(mirror, range(12, 13), state, agree)
    assert [pinned.step for pinned in posted] == [3, 8, 12]


def test_last_step_gets_checkpoint():
    vault, state = FakeVault(), State()
    mirror, posted = make_mirror(replace(EVERY, checkpoint_every_steps=100), vault, last_step=5)
    run(mirror, range(1, 6), state, lambda mirror, step: mirror.step_requests(step))
    assert [(pinned.step, pinned.checkpoint) for pinned in posted] == [(5, True)]


def test_last_step_that_nobody_knew_of_is_mirrored_when_the_function_has_returned():
    """In the older of two buffers: a rank that ends before has the newer one's step."""
    vault, state = FakeVault(), State()
    mirror, _ = make_mirror(replace(EVERY_3, checkpoint_every_steps=100), vault)
    run(mirror, range(1, 9), state, lambda mirror, step: mirror.step_requests(step))
    assert vault.steps == [3, 6]
    mirror.finish(8, state)  # type: ignore[arg-type]
    mirror.finish(8, state)  # type: ignore[arg-type]
    assert vault.steps == [6, 8]
    assert (len(state.constants), mirror.newest_step) == (3, 8)


def test_last_step_of_a_job_without_checkpoints_is_not_mirrored():
    vault, state = FakeVault(), State()
    mirror, _ = make_mirror(EVERY_3, vault)
    run(mirror, range(1, 9), state, lambda mirror, step: mirror.step_requests(step))
    mirror.finish(8, state)  # type: ignore[arg-type]
    assert vault.steps == [3, 6]


def test_steps_are_pinned_for_remote_replicas_while_buffers_are_free():
    vault, state = FakeVault(), State()
    mirror, posted = make_mirror(EVERY, vault, remote=True)
    run(mirror, range(1, 9), state, lambda mirror, step: mirror.step_requests(step))
    assert [pinned.step for pinned in posted] == [1, 2]
    assert vault.steps == [1, 2, 7, 8]
    assert not any(pinned.checkpoint for pinned in posted)
    assert all(buffer.checksum is not None for buffer in vault.buffers if buffer.pinned)


def test_every_mirror_has_a_checksum_however_long_it_takes():
    vault, state = FakeVault(), State()
    mirror, _ = make_mirror(EVERY, vault)
    run(mirror, range(1, 2), state)
    cost(mirror)._mirror_s = 1e9  # no budget is left
    run(mirror, range(2, 9), state)
    assert vault.steps == [7, 8]
    assert all(buffer.checksum is not None for buffer in vault.buffers)


def test_all_ranks_must_be_ready_for_pin():
    vault, state = FakeVault(), State()
    mirror, posted = make_mirror(EVERY, vault, remote=True)
    assert mirror.step_requests(1).pin
    run(mirror, range(1, 3), state)  # but the other ranks were not
    assert posted == []


def test_lost_vault_does_not_stop_training(caplog):
    vault, state = FakeVault(error=VaultGoneError("the vault is gone")), State()
    mirror, _ = make_mirror(EVERY, vault)
    run(mirror, range(1, 4), state)
    assert "continues without a replica" in caplog.text
    assert not mirror.step_requests(4).pin


def test_insufficient_memory_fails_only_first_mirror(caplog):
    error = VaultMemoryError("too little memory")
    mirror, _ = make_mirror(EVERY, FakeVault(error=error))
    with pytest.raises(VaultMemoryError):
        run(mirror, range(1, 2), State())
    mirror, _ = make_mirror(EVERY, FakeVault(error=error), restore=Restore(4))
    run(mirror, range(5, 7), State())
    assert "continues without a replica" in caplog.text


def test_new_table_gets_new_buffers_one_by_one():
    """A state that grows leaves no buffers behind, and always one complete version."""
    vault, state = FakeVault(), State()
    mirror, _ = make_mirror(EVERY, vault)
    for step in range(1, 20):
        if step % 5 == 0:
            state.table = BlockIndex(nbytes=64 + step)
        held = vault.steps
        state.on_copy = lambda held=held: check_newest_stays(held, vault)
        run(mirror, range(step, step + 1), state)
        assert vault.steps == [step - 1, step][-min(step, 2) :]
        assert len(mirror._buffers) == len(vault.buffers)
    assert all(buffer.index == state.table for buffer in vault.buffers)
    assert vault.calls.count("reserve") == 2 * 4
    assert vault.calls.count("spares but 2") == 1 + 2 * 3


def check_newest_stays(held: list[int], vault: FakeVault) -> None:
    assert not held or held[-1] in vault.steps


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


def test_first_write_into_new_buffer_does_not_count():
    mirror, _ = make_mirror(EVERY, FakeVault())
    run(mirror, range(1, 3), State())  # two new buffers
    assert cost(mirror)._mirror_s == 0
    run(mirror, range(3, 4), State(BlockIndex(nbytes=8)))
    assert cost(mirror)._mirror_s == 0, "a new table gets a new buffer"
    state = State()
    run(mirror, range(4, 8), state)
    assert cost(mirror)._mirror_s > 0


def test_packing_the_state_counts():
    state = State(on_pack=lambda: time.sleep(0.02))
    mirror, _ = make_mirror(EVERY, FakeVault())
    run(mirror, range(1, 4), state)
    assert cost(mirror)._mirror_s >= 0.02


def test_pause_between_steps_has_little_effect_on_step_time():
    costs = CopyCost()
    costs._step_s = 0.1
    costs._last_step_at_s -= 60.0  # such as an evaluation
    costs.step_finished(mirrored=False)
    assert costs._step_s < 0.13


def test_slots_are_reserved_where_memory_is_free_already():
    """The vault learns what each of the first votes shows before the next buffer is reserved."""
    vault, state = FakeVault(), State()
    slots = (SlotRef(1, 0, 7, "a"),)
    mirror, _ = make_mirror(EVERY, vault, generation=2, restore=Restore(7, slots))
    run(mirror, range(8, 13), state)
    assert vault.calls == ["loaded 7", "reserve", "complete", "reserve", "spares but 2"]


@pytest.mark.parametrize("collective", [False, True])
def test_aborted_collective_update_is_neither_committed_nor_reported(collective: bool):
    """An abort during the copy: only an update that holds exchanges may have been changed by it."""
    vault, state = FakeVault(), State(update_is_collective=collective)
    mirror, posted = make_mirror(EVERY, vault)
    run(mirror, range(1, 2), state)
    state.on_copy = mirror._copier.interrupt.set
    if not collective:
        run(mirror, range(2, 3), state)
        assert vault.steps == [1, 2]
        return
    with pytest.raises(GivenUp):
        run(mirror, range(2, 3), state)
    assert vault.steps == [-1, 1]
    assert state.confirmed == 1
    assert posted == []


@pytest.mark.parametrize("collective", [False, True])
def test_step_without_mirror_is_looked_at_too(collective: bool):
    mirror, _ = make_mirror(MirrorPolicy(), None)
    mirror._copier.interrupt.set()
    state = State(update_is_collective=collective)
    if collective:
        with pytest.raises(GivenUp):
            run(mirror, range(1, 2), state)
    else:
        run(mirror, range(1, 2), state)
    assert state.confirmed == (not collective)


def steps_of_cost(costs: CopyCost, *took_s: tuple[float, bool | None]) -> None:
    for seconds, mirrored in took_s:
        costs._last_step_at_s -= seconds
        costs.step_finished(mirrored)


def test_interval_of_mirrors_beside_training_follows_the_slowdown():
    costs = CopyCost(beside=True)
    steps_of_cost(costs, (60.0, False), (60.0, None))  # start and first slots: not measured
    assert costs.interval_steps == 2.0
    steps_of_cost(costs, *[(1.0, True)] * 3)
    assert costs.interval_steps == 2.0, "nothing to compare with yet"
    steps_of_cost(costs, (1.0, False), (1.0, True))
    assert costs.interval_steps == 1.0, "however long the copies take"
    steps_of_cost(costs, *[(1.5, True), (1.0, False)] * 30)
    assert costs.interval_steps == 10.0  # 0.5 s of 10 s
    steps_of_cost(costs, *[(1.0, True)] * 200)
    assert costs.interval_steps == 2.0, "the step without a mirror is out of date"
