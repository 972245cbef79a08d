"""Mirrors beside training, on a device whose copies complete late and whose memory changes soon.

That each wait is needed is tested in tests/engine/races."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from threading import Timer
from threading import enumerate as live_threads
from time import monotonic
from typing import Any

import pytest
import torch

from rayzero.engine.device import Device
from rayzero.engine.session import NO_REQUESTS, StepRequests
from rayzero.workers import state_copy
from rayzero.workers.vault import slots
from rayzero.workers.vault.records import SlotDamagedError
from tests.workers.late_device import LateDevice
from tests.workers.mirror_rig import Rig, State
from tests.workers.support import GivenUp
from tests.workers.vault.support import VaultCluster, damage, refs, steps_of

PIN = StepRequests(pin=True)
FROZEN = 200_000
FROZEN_BYTES = 4 * FROZEN
DEVICES: list[Callable[[], Any]] = [lambda: Device(torch.device("cpu")), LateDevice]


@pytest.fixture
def rig(cluster: VaultCluster) -> Iterator[Rig]:
    rig = Rig(cluster, State(LateDevice()))
    yield rig
    rig.interrupt.set()
    rig.device.run()
    rig.mirror.close()


@pytest.fixture(params=DEVICES, ids=["cpu", "late"])
def frozen_rig(cluster: VaultCluster, request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(cluster, State(request.param(), frozen=FROZEN))
    yield rig
    rig.mirror.close()


def reported(rig: Rig) -> list[int]:
    return [message.step for message in rig.posted]


def job_of(rig: Rig) -> Any:
    return rig.mirror._copier._job


def test_commit_follows_copies(rig: Rig) -> None:
    rig.begin(1)
    rig.device.compute.run()
    assert not job_of(rig).done.wait(0.1)
    assert steps_of(rig.vault) == reported(rig) == []
    rig.device.run()
    rig.mirror.settle()
    assert (steps_of(rig.vault), reported(rig)) == ([(0, 1)], [1])
    assert rig.stored(1) == {1.0}


def test_update_waits_for_copies(rig: Rig) -> None:
    """Also if nobody has waited for the commit."""
    rig.begin(1)
    rig.update(2)
    rig.forward(2)
    rig.device.run()
    rig.mirror.settle()
    assert rig.stored(1) == {1.0}


def test_forward_waits_for_what_it_changes(rig: Rig) -> None:
    rig.begin(1)
    rig.forward(2)
    rig.device.run()
    rig.mirror.settle()
    assert rig.stored(1) == {1.0}


def test_aborted_copy_is_garbage(rig: Rig) -> None:
    rig.begin(1)
    rig.device.run()
    rig.begin(2)
    rig.interrupt.set()
    rig.device.compute.queue.appendleft(lambda: rig.state.weights.fill_(float("nan")))
    rig.device.run()
    with pytest.raises(GivenUp):
        rig.mirror.step_requests(3)
    rig.mirror.close()
    assert (steps_of(rig.vault), reported(rig)) == ([(0, 1)], [1])


def test_steps_are_mirrored_and_reported_in_order(rig: Rig):
    for number in range(1, 6):
        rig.begin(number)
        rig.device.run()
    rig.mirror.settle()
    assert reported(rig) == [1, 2, 3, 4, 5]
    assert steps_of(rig.vault) == [(0, 4), (0, 5)]
    assert (rig.stored(4), rig.stored(5)) == ({4.0}, {5.0})
    assert len(rig.device.registered) == 2
    rig.mirror.close()
    rig.client.close()
    assert rig.device.registered == []


def test_chunks_have_the_checksum_of_the_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    for module in (state_copy, slots):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    rig.begin(1)
    assert len(job_of(rig).groups) > 1
    rig.device.run()
    rig.mirror.settle()
    assert rig.stored(1) == {1.0}


def test_state_in_host_memory_is_copied_by_the_thread(cluster: VaultCluster):
    """Offloaded state. An update waits on the host until that copy is made."""
    rig = Rig(cluster, State(LateDevice("meta")))
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
    rig.begin(1)
    Timer(0.05, rig.interrupt.set).start()
    started = monotonic()
    with pytest.raises(GivenUp):
        rig.mirror.step_requests(2)
    assert monotonic() - started < 60
    rig.mirror.close()
    assert steps_of(rig.vault) == reported(rig) == []


def test_collective_update_is_inconsistent_until_the_device_has_run_it(cluster: VaultCluster):
    """Memory that an abort may have changed is not salvaged."""
    rig = Rig(cluster, State(LateDevice(), collective=True))
    rig.begin(1)
    assert not rig.state.consistent
    rig.device.run()
    rig.mirror.settle()
    assert rig.state.consistent
    rig.begin(2)
    rig.interrupt.set()
    rig.device.run()
    rig.mirror.close()
    assert not rig.state.consistent


def test_error_of_the_device_reaches_the_training_thread(rig: Rig):
    rig.begin(1)
    job_of(rig).groups[-1][1].error = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        rig.mirror.step_requests(2)
    assert steps_of(rig.vault) == reported(rig) == []


def test_close_gives_up_copies_that_do_not_end(rig: Rig, caplog: pytest.LogCaptureFixture):
    rig.begin(1)
    copier: Any = rig.mirror._copier
    copier._longest_s = 0.0
    rig.mirror.close()
    assert "a mirror was given up" in caplog.text
    assert not any(thread.name == "rayzero-mirror" for thread in live_threads())
    assert rig.mirror._buffers[0].mapping.is_busy()


def test_close_lets_a_finished_step_be_committed(rig: Rig):
    """As after an error of the user's function."""
    rig.begin(1)
    Timer(0.05, rig.device.run).start()
    rig.mirror.close()
    assert (steps_of(rig.vault), reported(rig)) == ([(0, 1)], [1])


def test_constants_are_hashed_only_when_they_are_written(frozen_rig, monkeypatch):
    """As frozen weights, which training never changes."""
    hashed: list[int] = []

    def digest(data: Any) -> int:
        hashed.append(len(data))
        return original(data)

    original = slots.xxh3_64_intdigest
    for module in (slots, state_copy):
        monkeypatch.setattr(module, "xxh3_64_intdigest", digest)
        monkeypatch.setattr(module, "CHUNK_BYTES", 256_000)
    for step in range(1, 9):
        if step == 6:
            frozen_rig.change_constants()
        hashed.clear()
        frozen_rig.step(step)
        assert (sum(hashed) > FROZEN_BYTES) == (step in (1, 2, 6, 7)), "two slots, each once"
        assert frozen_rig.stored(step) == {float(step)}


def test_constants_are_verified(frozen_rig):
    for step in (1, 2, 3):
        frozen_rig.step(step)
    [ref] = refs((1, 0, 3))
    damage(frozen_rig.vault, ref, lambda image: image.header.data_offset + FROZEN_BYTES // 2)
    with pytest.raises(SlotDamagedError):
        frozen_rig.stored(3)


def test_constants_are_sent_to_another_node_once(frozen_rig):
    other = frozen_rig.cluster.vault("b")
    frozen_rig.step(1, PIN)
    assert other.replicate(refs((1, 0, 1))) > FROZEN_BYTES
    frozen_rig.step(2, PIN)
    assert other.replicate(refs((1, 0, 2))) < FROZEN_BYTES
    assert frozen_rig.stored(2, "b") == {2.0}
    frozen_rig.vault.unpin(1, 2)
    frozen_rig.change_constants()
    frozen_rig.step(3, PIN)
    assert other.replicate(refs((1, 0, 3))) > FROZEN_BYTES, "changed constants are sent"
    with other._registry.open_pinned(refs((1, 0, 3), node="b")[0]) as fd:
        os.pwrite(fd, b"damaged", slots.PAGE_BYTES * 100)
    frozen_rig.step(4, PIN)
    assert other.replicate(refs((1, 0, 4))) > FROZEN_BYTES, "damaged ones are not copied"
    assert frozen_rig.stored(4, "b") == {4.0}
