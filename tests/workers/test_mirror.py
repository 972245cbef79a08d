"""When a rank mirrors its state, and into which buffer, with a fake vault."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.layout.state_index import BlockIndex
from rayzero.engine.session import NO_REQUESTS, StepRequests
from rayzero.workers.messages import MirrorPolicy, Pinned
from rayzero.workers.mirror import MIRROR_COST_FRACTION, Mirror, _CostModel
from rayzero.workers.vault.records import Restore, VaultGoneError, VaultMemoryError
from tests.workers.support import ASSIGN

EVERY = MirrorPolicy(replicas=1, every_steps=1)


@dataclass
class Buffer:
    data: memoryview = field(default_factory=lambda: memoryview(bytearray(64)))
    step: int = -1
    pinned: bool = False
    checksum: int | None = None

    def begin(self) -> None:
        assert not self.pinned
        self.step = -1

    def commit(self, step: int, metadata: bytes, pin: bool, checksum: int | None) -> None:
        self.step, self.pinned, self.checksum = step, pin, checksum


@dataclass
class FakeVault:
    buffers: list[Buffer] = field(default_factory=list)
    complete_generations: list[int] = field(default_factory=list)
    error: Exception | None = None
    table: BlockIndex | None = None

    def reserve(self, generation: int, rank: int, world: int, table: BlockIndex) -> Buffer:
        if self.error:
            raise self.error
        if table is not self.table:
            self.table, self.buffers = table, []
        self.buffers.append(Buffer())
        return self.buffers[-1]

    def announce_complete(self, generation: int) -> None:
        self.complete_generations.append(generation)

    @property
    def steps(self) -> list[int]:
        return sorted(buffer.step for buffer in self.buffers)


@dataclass
class State:
    table: BlockIndex = field(default_factory=BlockIndex)
    constants: list[bool] = field(default_factory=list)

    def pack(self) -> State:
        return self

    @property
    def index(self) -> BlockIndex:
        return self.table

    def copy_to(self, memory: memoryview, *, constants: bool) -> None:
        self.constants.append(constants)

    def metadata(self) -> bytes:
        return b"{}"


def make_mirror(
    plan: MirrorPolicy, vault: FakeVault | None, last_step: int | None = None, **assign: Any
):
    posted: list[Pinned] = []
    mirror = Mirror(plan, replace(ASSIGN, **assign), last_step, vault, posted.append)  # type: ignore
    return mirror, posted


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
    mirror._cost_model._mirror_s = 1e9  # no budget is left
    run(mirror, range(1, 9), state)
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


def test_new_table_gets_new_buffers():
    vault, state = FakeVault(), State()
    mirror, _ = make_mirror(EVERY, vault)
    run(mirror, range(1, 3), state)
    before = vault.buffers
    state.table = BlockIndex(nbytes=64)
    run(mirror, range(3, 4), state)
    assert vault.buffers is not before
    assert vault.steps == [3]


@given(mirror_s=st.floats(1e-4, 10), step_s=st.floats(1e-3, 10))
def test_chosen_interval_keeps_cost_near_its_limit(mirror_s: float, step_s: float):
    costs = _CostModel()
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
    assert mirror._cost_model._mirror_s == 0
    run(mirror, range(3, 4), State())
    assert mirror._cost_model._mirror_s == 0, "a new table gets a new buffer"
    state = State()
    run(mirror, range(4, 8), state)
    assert mirror._cost_model._mirror_s > 0


def test_pause_between_steps_has_little_effect_on_step_time():
    costs = _CostModel()
    costs._step_s = 0.1
    costs._last_step_at_s -= 60.0  # such as an evaluation
    costs.step_finished()
    assert costs._step_s < 0.13
