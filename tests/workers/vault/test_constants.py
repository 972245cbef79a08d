"""What training never changes, such as frozen weights, is not copied, hashed or sent again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayzero.engine.device import Device
from rayzero.engine.session import NO_REQUESTS, StepRequests
from rayzero.engine.state.ranges import whole_tensor_range
from rayzero.workers import state_copy
from rayzero.workers.messages import MirrorPolicy
from rayzero.workers.mirror import Mirror
from rayzero.workers.training_thread import StopFlag
from rayzero.workers.vault import slots
from rayzero.workers.vault.images import MappedSlotReader
from rayzero.workers.vault.records import Restore, SlotDamagedError
from tests.workers.late_device import LateDevice
from tests.workers.support import ASSIGN, PartsState, give_up
from tests.workers.vault.support import VaultCluster, refs

FROZEN, TRAINED = 200_000, 100  # elements
FROZEN_BYTES = 4 * FROZEN
PIN = StepRequests(pin=True)
DEVICES: list[Callable[[], Any]] = [lambda: Device(torch.device("cpu")), LateDevice]


class State(PartsState):
    """A frozen weight, and one that updates change."""

    def __init__(self, device: Any) -> None:
        self.frozen, self.weights = torch.rand(FROZEN), torch.zeros(TRAINED)
        frozen = replace(whole_tensor_range("weights/f", self.frozen), constant=True)
        super().__init__(device, whole_tensor_range("weights/w", self.weights), frozen)


class Rig:
    def __init__(self, cluster: VaultCluster, device: Any) -> None:
        self.cluster, self.device, self.state = cluster, device, State(device)
        policy = MirrorPolicy(replicas=1, every_steps=1)
        stop = StopFlag(give_up)
        self.client = cluster.client()
        self.mirror = Mirror(policy, ASSIGN, None, self.client, lambda message: None, stop)

    def step(self, number: int, requests: StepRequests = NO_REQUESTS) -> None:
        self.mirror.step_requests(number)
        self.state.weights.fill_(number)
        self.mirror.step_done(number, requests, self.state)
        if isinstance(self.device, LateDevice):
            self.device.run()
        self.mirror.settle()

    def check(self, step: int, node: str = "a") -> None:
        """Reads a version, which is verified."""
        client = self.cluster.client(node)
        source = client.open_source(Restore(step, tuple(refs((1, 0, step), node=node))))
        values = torch.empty(self.state.block.index.nbytes // 4)
        source.read(0, 0, values.view(torch.uint8).numpy().data)
        source.close()
        offset = self.state.block.offsets[1] // 4
        assert torch.equal(values[:FROZEN], self.state.frozen)
        assert torch.equal(values[offset : offset + TRAINED], torch.full((TRAINED,), float(step)))


@pytest.fixture
def cluster() -> Iterator[VaultCluster]:
    cluster = VaultCluster()
    yield cluster
    cluster.close()


@pytest.fixture(params=DEVICES, ids=["cpu", "late"])
def rig(cluster: VaultCluster, request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(cluster, request.param())
    yield rig
    rig.mirror.close()


def test_are_hashed_only_when_they_are_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def digest(data: Any) -> int:
        hashed.append(len(data))
        return original(data)

    original = slots.xxh3_64_intdigest
    for module in (slots, state_copy):
        monkeypatch.setattr(module, "xxh3_64_intdigest", digest)
        monkeypatch.setattr(module, "CHUNK_BYTES", 256_000)
    for step in range(1, 6):
        hashed.clear()
        rig.step(step)
        assert (sum(hashed) > FROZEN_BYTES) == (step <= 2), "two slots, each once"
        rig.check(step)
    rig.state.frozen.mul_(2)
    rig.state.constants_version += 1
    for step in range(6, 9):
        hashed.clear()
        rig.step(step)
        assert (sum(hashed) > FROZEN_BYTES) == (step <= 7)
        rig.check(step)


def test_are_verified(rig: Rig) -> None:
    rig.step(1)
    rig.step(2)
    rig.step(3)
    ref = refs((1, 0, 3))[0]
    with rig.cluster.vault()._registry.open_pinned(ref) as fd:
        image = MappedSlotReader(ref, fd)
        image.verify()
        offset = image.header.data_offset + FROZEN_BYTES // 2
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)
        with pytest.raises(SlotDamagedError):
            image.verify()
        image.close()


def test_are_sent_to_another_node_once(rig: Rig) -> None:
    other = rig.cluster.vault("b")
    rig.step(1, PIN)
    assert other.replicate(refs((1, 0, 1))) > FROZEN_BYTES
    rig.step(2, PIN)
    assert other.replicate(refs((1, 0, 2))) < FROZEN_BYTES
    rig.check(2, "b")
    rig.cluster.vault().unpin(1, 2)
    rig.state.frozen.mul_(2)
    rig.state.constants_version += 1
    rig.step(3, PIN)
    assert other.replicate(refs((1, 0, 3))) > FROZEN_BYTES, "changed constants are sent"
    with other._registry.open_pinned(refs((1, 0, 3))[0]._replace(node_id="b")) as fd:
        os.pwrite(fd, b"damaged", slots.PAGE_BYTES * 100)
    rig.step(4, PIN)
    assert other.replicate(refs((1, 0, 4))) > FROZEN_BYTES, "damaged ones are not copied"
    rig.check(4, "b")
