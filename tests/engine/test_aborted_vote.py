"""A group that is aborted while the host reads the vote: the garbage is not believed.

On NCCL a collective's wait returns at once, and only `Device.to_host` waits. An abort ends it early
with an undefined result; the worker has set its interrupt before.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine import builder
from rayzero.engine.comm.backend import Work, copy_or_add_, rank_chunk
from rayzero.engine.comm.collectives import Collectives, run_on_all_ranks
from rayzero.engine.comm.process_group import SingleRankBackend
from rayzero.engine.device import Device, replace_device
from rayzero.engine.errors import CollectiveError
from rayzero.engine.session import StepRequests, use_session
from tests.engine import zoo
from tests.engine.state.blocks import StateSession

CPU = torch.device("cpu")


class EqualPeer(SingleRankBackend):
    """Two ranks, of which the other one always has this one's values."""

    world_size = 2

    def all_reduce(self, full: Tensor) -> Work:
        full.mul_(2)
        return Work()

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Work:
        copy_or_add_(out, 2 * rank_chunk(full, 0, 2), add=accumulate)
        return Work()

    def all_gather(self, full: Tensor, part: Tensor) -> Work:
        full.copy_(part.clone().repeat(2))
        return Work()

    def gather(self, full: Tensor, part: Tensor, target: int) -> Work:
        return self.all_gather(full, part)


class EqualMessages(EqualPeer):
    """The peer sends what this rank sends."""

    def all_reduce(self, full: Tensor) -> Work:
        full[1], full[2] = full[0], 2.0
        return Work()

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        if source == 0:
            self.sent = tensor
        tensor.copy_(self.sent)
        return Work()


class AbortedRead(Device):
    """Its next read is ended by an abort, if `garbage` is given: the result is then undefined."""

    garbage: float | None = None

    def __init__(self, session: StoppedSession | None = None) -> None:
        super().__init__(CPU)
        self.session = session

    def to_host(self, tensor: Tensor) -> Tensor:
        if self.garbage is None:
            return super().to_host(tensor)
        if self.session is not None:
            self.session.interrupted = True  # before the abort
        return torch.full_like(tensor, self.garbage)


class Stopped(BaseException):
    """The worker's interrupt."""


class StoppedSession(StateSession):
    def __init__(self) -> None:
        super().__init__(engine_config=None, seed=0)
        self.interrupted = False
        self.waiting = False
        self.finished: list[float] = []

    def on_phase(self, name: str) -> None:
        self.check()

    def on_collective_wait(self, collective: int, entered: bool) -> None:
        self.waiting = entered
        self.check()

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        self.finished.append(metrics["step"])
        self.check()

    def check(self) -> None:
        if self.interrupted:
            raise Stopped


@pytest.fixture(autouse=True)
def equal_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "connect_collectives", lambda: Collectives(EqualPeer()))


def build_engine(stage: int) -> rayzero.Engine:
    config = {
        "train_batch_size": 12,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 150},
    }
    return rayzero.initialize(model=zoo.make_model(), optimizer=zoo.sgd, config=config)[0]


def train_step(engine: rayzero.Engine) -> None:
    (batch,) = zoo.batches(1, 6)
    engine.backward(engine(batch[:, :-1], targets=batch[:, 1:])["loss"])
    engine.step()


@pytest.mark.parametrize(("stage", "garbage"), [(0, math.nan), (0, 1.0), (3, 2.0), (3, math.inf)])
def test_aborted_vote_is_not_believed(stage: int, garbage: float) -> None:
    session = StoppedSession()
    device = AbortedRead(session)
    with replace_device(device), use_session(session):
        engine = build_engine(stage)
        train_step(engine)
        before = [value.clone() for value in engine.state_dict().values()]
        device.garbage = garbage
        with pytest.raises(Stopped):
            train_step(engine)
        device.garbage, session.interrupted = None, False
        assert session.finished == [1]
        assert (engine.progress.step, engine.progress.skipped_steps) == (1, 0)
        assert engine._step.state.consistent
        assert all(map(torch.equal, before, engine.state_dict().values()))


@pytest.mark.parametrize("garbage", [math.nan, 1.0, 0.0])
def test_vote_counts_its_ranks(garbage: float) -> None:
    """Without a worker nothing has set an interrupt."""
    device = AbortedRead()
    with replace_device(device):
        engine = build_engine(0)
        device.garbage = garbage
        with pytest.raises(CollectiveError, match=r"vote was aborted on rank 0 .* of 2 ranks"):
            train_step(engine)
        assert engine.progress.step == 0
        device.garbage = None
        train_step(engine)  # the step can be done again
        assert engine.progress.step == 1


def test_host_read_counts_as_waiting_for_other_ranks() -> None:
    """A rank that waits for the GPU is not taken for one that hangs by itself."""
    session = StoppedSession()
    waiting: list[bool] = []

    class Watched(Device):
        def to_host(self, tensor: Tensor) -> Tensor:
            waiting.append(session.waiting)
            return super().to_host(tensor)

    with replace_device(Watched(CPU)), use_session(session):
        train_step(build_engine(0))
        # The vote's; and, in a job's first steps, this rank's own loss, which is there by then.
        assert waiting == [True, False]
        waiting.clear()
        collectives = Collectives(EqualMessages())
        collectives.wait_observer = session.on_collective_wait
        assert run_on_all_ranks(collectives, lambda: {"a": 1}) == [{"a": 1}] * 2
    assert waiting == [True] * 3  # the lengths, and two ranks' messages
    assert not session.waiting
