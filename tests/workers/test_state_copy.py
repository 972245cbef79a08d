"""Mirrors beside training, on a device whose copies complete late and whose memory changes soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Timer
from threading import enumerate as live_threads
from time import monotonic
from typing import Any

import pytest
import torch

from rayzero.engine.session import NO_REQUESTS
from rayzero.engine.state.ranges import pack_block, whole_tensor_range
from rayzero.workers import state_copy
from rayzero.workers.messages import MirrorPolicy, StepReport
from rayzero.workers.mirror import Mirror
from rayzero.workers.state_copy import StateCopier
from rayzero.workers.training_thread import StopFlag
from rayzero.workers.vault import slots
from rayzero.workers.vault.records import Restore
from tests.workers.late_device import LateDevice, LateEvent
from tests.workers.support import ASSIGN, GivenUp, PartsState, give_up
from tests.workers.vault.support import VaultCluster, refs, steps_of

EVERY = MirrorPolicy(replicas=1, every_steps=1)
ELEMENTS = 1000


class State(PartsState):
    """Weights that updates change, a buffer that forward changes."""

    def __init__(self, device: LateDevice, *, collective: bool = False) -> None:
        self.update_is_collective = collective
        self.weights, self.buffer = torch.zeros(ELEMENTS), torch.zeros(8)
        buffer = replace(whole_tensor_range("buffers/b", self.buffer), volatile=True)
        super().__init__(device, whole_tensor_range("weights/w", self.weights), buffer)


class Rig:
    """A worker that trains: step k sets all values to k."""

    def __init__(self, cluster: VaultCluster, device: LateDevice, **state: Any) -> None:
        self.vault, self.client = cluster.vault(), cluster.client()
        self.device, self.state = device, State(device, **state)
        self.interrupt = StopFlag(give_up)
        self.posted: list[Any] = []
        self.mirror = Mirror(EVERY, ASSIGN, None, self.client, self.posted.append, self.interrupt)

    def forward(self, value: float) -> None:
        self.device.compute.queue.append(lambda: self.state.buffer.fill_(value))

    def update(self, value: float) -> None:
        with self.state.updating():
            self.device.compute.queue.append(lambda: self.state.weights.fill_(value))

    def step(self, number: int) -> None:
        """From forward to the report, without waiting for anything."""
        self.forward(number)
        self.mirror.step_requests(number)
        self.update(number)
        self.mirror.step_done(number, NO_REQUESTS, self.state)
        self.mirror.post(StepReport(1, 0, number))

    def stored(self, step: int) -> set[float]:
        """The values in a verified version."""
        source = self.client.open_source(Restore(step, tuple(refs((1, 0, step)))))
        values = torch.empty(self.state.block.index.nbytes // 4)
        source.read(0, 0, values.view(torch.uint8).numpy().data)
        source.close()
        offset = self.state.block.offsets[1] // 4
        return {*values[:ELEMENTS].tolist(), *values[offset : offset + 8].tolist()}

    @property
    def reported(self) -> list[int]:
        return [message.step for message in self.posted]

    @property
    def job(self) -> Any:
        copier = self.mirror._copier
        assert isinstance(copier, StateCopier)
        return copier._job


@pytest.fixture
def cluster() -> Iterator[VaultCluster]:
    cluster = VaultCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def rig(cluster: VaultCluster) -> Iterator[Rig]:
    rig = Rig(cluster, LateDevice())
    yield rig
    rig.interrupt.set()
    rig.device.run()
    rig.mirror.close()


def check_commit_follows_copies(rig: Rig) -> None:
    rig.step(1)
    rig.device.compute.run()
    assert not rig.job.done.wait(0.1)
    assert steps_of(rig.vault) == rig.reported == []
    rig.device.run()
    rig.mirror.settle()
    assert (steps_of(rig.vault), rig.reported) == ([(0, 1)], [1])
    assert rig.stored(1) == {1.0}


def check_update_waits_for_copies(rig: Rig) -> None:
    """Also if nobody has waited for the commit."""
    rig.step(1)
    rig.update(2)
    rig.forward(2)
    rig.device.run()
    rig.mirror.settle()
    assert rig.stored(1) == {1.0}


def check_forward_waits_for_what_it_changes(rig: Rig) -> None:
    rig.step(1)
    rig.forward(2)
    rig.device.run()
    rig.mirror.settle()
    assert rig.stored(1) == {1.0}


def check_aborted_copy_is_garbage(rig: Rig) -> None:
    rig.step(1)
    rig.device.run()
    rig.step(2)
    rig.interrupt.set()
    rig.device.compute.queue.appendleft(lambda: rig.state.weights.fill_(float("nan")))
    rig.device.run()
    with pytest.raises(GivenUp):
        rig.mirror.step_requests(3)
    rig.mirror.close()
    assert (steps_of(rig.vault), rig.reported) == ([(0, 1)], [1])


def ignore_events(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateCopier, "_is_reached", lambda self, event, job: True)


def ignore_interrupt(patch: pytest.MonkeyPatch) -> None:
    def is_reached(self: StateCopier, event: LateEvent, job: Any) -> bool:
        while not event.query():
            pass
        return True

    patch.setattr(StateCopier, "_is_reached", is_reached)
    patch.setattr(StopFlag, "check", lambda self: None)


def update_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_copy._Job, "before_write", lambda self, device: None)


def copy_buffers_last(patch: pytest.MonkeyPatch) -> None:
    init = State.__init__

    def without_mark(self: State, device: LateDevice, **options: Any) -> None:
        init(self, device, **options)
        parts = [replace(part, volatile=False) for part in self.block.ranges]
        self.block = pack_block(parts)

    patch.setattr(State, "__init__", without_mark)


CHECKS: list[tuple[Callable[[Rig], None], Callable[[pytest.MonkeyPatch], None]]] = [
    (check_commit_follows_copies, ignore_events),
    (check_update_waits_for_copies, update_at_once),
    (check_forward_waits_for_what_it_changes, copy_buffers_last),
    (check_aborted_copy_is_garbage, ignore_interrupt),
]


@pytest.mark.parametrize("check", [check for check, _ in CHECKS])
def test_order_of_copies_and_commits(rig: Rig, check: Callable[[Rig], None]):
    check(rig)


@pytest.mark.parametrize(("check", "mutate"), CHECKS)
def test_missing_order_is_detected(
    cluster: VaultCluster,
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[Rig], None],
    mutate: Callable[[pytest.MonkeyPatch], None],
):
    mutate(monkeypatch)
    rig = Rig(cluster, LateDevice())
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(rig)
    rig.device.run()
    rig.mirror.close()


def test_steps_are_mirrored_and_reported_in_order(rig: Rig):
    for number in range(1, 6):
        rig.step(number)
        rig.device.run()
    rig.mirror.settle()
    assert rig.reported == [1, 2, 3, 4, 5]
    assert steps_of(rig.vault) == [(0, 4), (0, 5)]
    assert (rig.stored(4), rig.stored(5)) == ({4.0}, {5.0})
    assert len(rig.device.registered) == 2
    rig.mirror.close()
    rig.client.close()
    assert rig.device.registered == []


def test_chunks_have_the_checksum_of_the_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    for module in (state_copy, slots):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    rig.step(1)
    assert len(rig.job.groups) > 1
    rig.device.run()
    rig.mirror.settle()
    assert rig.stored(1) == {1.0}


def test_state_in_host_memory_is_copied_by_the_thread(cluster: VaultCluster):
    """Offloaded state. An update waits on the host until that copy is made."""
    rig = Rig(cluster, LateDevice("meta"))
    rig.state.weights.fill_(1)
    rig.state.buffer.fill_(1)
    rig.mirror.step_done(1, NO_REQUESTS, rig.state)
    rig.state.before_write()
    rig.state.weights.fill_(2)
    rig.device.run()
    rig.mirror.settle()
    assert rig.stored(1) == {1.0}
    rig.mirror.close()


def test_interrupt_ends_wait_for_copies(rig: Rig):
    rig.step(1)
    Timer(0.05, rig.interrupt.set).start()
    started = monotonic()
    with pytest.raises(GivenUp):
        rig.mirror.step_requests(2)
    assert monotonic() - started < 5
    rig.mirror.close()
    assert steps_of(rig.vault) == rig.reported == []


def test_collective_update_is_inconsistent_until_the_device_has_run_it(cluster: VaultCluster):
    """Memory that an abort may have changed is not salvaged."""
    rig = Rig(cluster, LateDevice(), collective=True)
    rig.step(1)
    assert not rig.state.consistent
    rig.device.run()
    rig.mirror.settle()
    assert rig.state.consistent
    rig.step(2)
    rig.interrupt.set()
    rig.device.run()
    rig.mirror.close()
    assert not rig.state.consistent


def test_error_of_the_device_reaches_the_training_thread(rig: Rig):
    rig.step(1)
    rig.job.groups[-1][1].error = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        rig.mirror.step_requests(2)
    assert steps_of(rig.vault) == rig.reported == []


def test_close_gives_up_copies_that_do_not_end(rig: Rig, caplog: pytest.LogCaptureFixture):
    rig.step(1)
    copier: Any = rig.mirror._copier
    copier._longest_s = 0.0
    rig.mirror.close()
    assert "a mirror was given up" in caplog.text
    assert not any(thread.name == "rayzero-mirror" for thread in live_threads())
    assert rig.mirror._buffers[0].mapping.is_busy()


def test_close_lets_a_finished_step_be_committed(rig: Rig):
    """As after an error of the user's function."""
    rig.step(1)
    Timer(0.05, rig.device.run).start()
    rig.mirror.close()
    assert (steps_of(rig.vault), rig.reported) == ([(0, 1)], [1])
