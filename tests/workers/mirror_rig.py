"""A rank's training state without an engine, and its mirror into a real vault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from rayzero.engine.device import Device
from rayzero.engine.session import NO_REQUESTS, StepRequests
from rayzero.engine.state.ranges import pack_block, whole_tensor_range
from rayzero.engine.state.training import TrainingState
from rayzero.workers.messages import MirrorPolicy, StepReport
from rayzero.workers.mirror import Mirror
from rayzero.workers.training_thread import StopFlag
from rayzero.workers.vault.records import Restore
from tests.workers.late_device import LateDevice
from tests.workers.support import ASSIGN, give_up
from tests.workers.vault.support import VaultCluster, refs

EVERY = MirrorPolicy(replicas=1, every_steps=1)


class State(TrainingState):
    """Weights that updates change, a buffer that forward changes, `frozen` weights that nothing
    changes.

    Attributes:
        on_pack, on_copy: called before a copy into a slot, and when it has been made.
    """

    constants_version = 0
    update_is_collective = False

    def __init__(self, device: Any, *, collective: bool = False, frozen: int = 8) -> None:
        self.update_is_collective = collective
        self.device, self.copied_by, self._is_updating = device, None, False
        self._runtime: Any = SimpleNamespace(wait_state=lambda: None)
        self.on_pack: Callable[[], object] = lambda: None
        self.on_copy: Callable[[], object] = lambda: None
        self.buffer, self.frozen = torch.zeros(8), torch.rand(frozen)
        self.resize(1000)

    def resize(self, elements: int) -> None:
        """Of the weights: the state gets another index."""
        self.weights = torch.zeros(elements)
        buffer = replace(whole_tensor_range("buffers/b", self.buffer), volatile=True)
        constant = replace(whole_tensor_range("weights/frozen", self.frozen), constant=True)
        changing = whole_tensor_range("optimizer.m/w", self.weights)  # the last part of a block
        self.block = pack_block([changing, buffer, constant])

    def pack(self, *, whole: bool = False) -> Any:
        self.on_pack()
        return self.block

    def capture_metadata(self) -> Callable[[], bytes]:
        def encode() -> bytes:
            self.on_copy()
            return b"{}"

        return encode


class Rig:
    """A worker that trains: step k sets all values to k.

    Args:
        assign: changes of its assignment.
    """

    def __init__(
        self,
        cluster: VaultCluster,
        state: State,
        policy: MirrorPolicy = EVERY,
        last_step: int | None = None,
        node: str = "a",
        **assign: Any,
    ) -> None:
        self.cluster = cluster
        self.vault = cluster.vault(node)
        self.client = cluster.client(node, assign.get("rank", 0))
        self.state = state
        self.device = state.device
        self.interrupt = StopFlag(give_up)
        self.posted: list[Any] = []
        assignment = replace(ASSIGN, **assign)
        self.mirror = Mirror(
            policy, assignment, last_step, self.client, self.posted.append, self.interrupt
        )

    def forward(self, value: float) -> None:
        self.device.compute.queue.append(lambda: self.state.buffer.fill_(value))

    def update(self, value: float) -> None:
        with self.state.updating():
            self.device.compute.queue.append(lambda: self.state.weights.fill_(value))

    def begin(self, number: int) -> None:
        """A step on a late device, from forward to the report, without waiting for anything."""
        self.forward(number)
        self.mirror.step_requests(number)
        self.update(number)
        self.mirror.step_done(number, NO_REQUESTS, self.state)
        self.mirror.post(StepReport(1, 0, number))

    def step(self, number: int, requests: StepRequests | None = None) -> None:
        """A step on any device, until its mirror is complete.

        Args:
            requests: what the ranks agree on; what this one wants, if None.
        """
        own = self.mirror.step_requests(number)
        for values in (self.state.weights, self.state.buffer):
            values.fill_(number)
        self.mirror.step_done(number, own if requests is None else requests, self.state)
        if isinstance(self.device, LateDevice):
            self.device.run()
        self.mirror.settle()

    def steps(self, first: int, last: int, requests: StepRequests | None = None) -> None:
        for number in range(first, last + 1):
            self.step(number, requests)

    def change_constants(self) -> None:
        self.state.frozen.mul_(2)
        self.state.constants_version += 1

    def stored(self, step: int, node: str = "a") -> set[float]:
        """The values in a verified version; its constants are the state's."""
        client = self.cluster.client(node)
        source = client.open_source(Restore(step, tuple(refs((1, 0, step), node=node))))
        data = bytearray(self.state.block.index.nbytes)
        source.read(0, 0, memoryview(data))
        source.close()
        targets = self.state.block.targets(memoryview(data), constants=True)
        frozen, *others = [values for _, values, _ in targets]
        assert torch.equal(frozen, self.state.frozen)
        return {value for values in others for value in values.tolist()}


def host_state(**options: Any) -> State:
    return State(Device(torch.device("cpu")), **options)
