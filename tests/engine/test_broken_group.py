"""Ranks that are lost at any point of a step, while the others stay in their training loop.

A lost rank leaves its function, as its process would, and its connections close. It comes back as a
newcomer of the same rank. Each rank publishes its part of the state at the end of a step, as a
mirror in a vault. The oracle is plain torch.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _abort_process_group

import rayzero
from rayzero.engine.session import StepRequests, use_session
from rayzero.workers.group_sockets import _open_sockets
from tests.engine.generations import end_together, shared_store
from tests.engine.state.blocks import Block, BlocksSource, StateSession
from tests.support.ranks import run_ranks
from tests.workers.recovery_jobs import Data, engine_config, make_model, oracle

WORLD = 3


class LostError(Exception):
    """The process of a rank ends here."""


@dataclass
class Host:
    """What a worker, its vault and the controller do: generations, faults, published states.

    Args:
        faults: of each generation but the last, (rank, step in it, phase).
    """

    rank: int
    faults: Sequence[tuple[int, int, str]]
    store: dist.Store
    generation: int = -1
    begin: int = 0  # the step that the generation starts from
    sockets: set[str] = field(default_factory=set)  # those of its group

    def leave(self, step: int) -> None:
        """This rank has published `step`, and is in the generation no more."""
        self.store.set(f"left-{self.generation}-{self.rank}", str(step))

    def form(self) -> list[Block]:
        """Forms the next generation, and returns the state that it starts from: the newest step
        that all ranks have published."""
        self.abort()
        if self.generation >= 0:
            keys = [f"left-{self.generation}-{rank}" for rank in range(WORLD)]
            step = min(int(self.store.get(key)) for key in keys)
        else:
            step = 0
        blocks = [self._block(rank, step) for rank in range(WORLD)] if step else []
        self.generation += 1
        self.begin = step
        store = dist.PrefixStore(f"generation-{self.generation}", self.store)
        before = _open_sockets().keys()
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=WORLD)
        dist.barrier()  # all have accepted the connections of the others
        self.sockets = _open_sockets().keys() - before
        return blocks

    def abort(self) -> None:
        """Ends the group and its connections, as a worker's fence does."""
        for inode, descriptor in _open_sockets().items():
            if inode in self.sockets:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)
        if dist.is_initialized():
            _abort_process_group()

    def publish(self, engine: Any, step: int) -> None:
        self.store.set(f"block-{self.rank}-{step}", pickle.dumps(Block.of(engine)))

    def _block(self, rank: int, step: int) -> Block:
        block: Block = pickle.loads(self.store.get(f"block-{rank}-{step}"))
        return block

    def check_fault(self, step: int, phase: str) -> None:
        if self.generation < len(self.faults):
            rank, turn, place = self.faults[self.generation]
            if (rank, place) == (self.rank, phase) and step == self.begin + turn:
                self._await_others()
                raise LostError

    def join(self) -> None:
        """This rank has an engine of the generation."""
        self.store.set(f"joined-{self.generation}-{self.rank}", b"")

    def _await_others(self) -> None:
        """Nobody is lost while there is nothing to recover: not before all have an engine, nor
        before the first published step."""
        keys = [f"joined-{self.generation}-{rank}" for rank in range(WORLD)]
        self.store.wait(keys + [f"block-{rank}-1" for rank in range(WORLD)])


@dataclass
class Session(StateSession):
    """One entry of the training function, through its generations."""

    host: Host = field(default_factory=lambda: pytest.fail("no host"))
    engine: Any = None
    published: int = 0
    reformed: int = 0

    def on_engine_ready(self, engine: Any) -> None:
        self.engine = engine
        self.published = engine.progress.step
        engine.survival.enable(lambda reason: self.host.abort())
        self.host.join()

    def on_phase(self, name: str) -> None:
        step = self.host.begin if self.engine is None else self.engine.progress.step
        self.host.check_fault(step + (name != "publish"), name)  # the update has counted it

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        step = int(metrics["step"])
        self.host.check_fault(step, "before its mirror")
        self.host.publish(self.engine, step)
        self.published = step
        self.host.check_fault(step, "after its mirror")

    def reform(self) -> None:
        self.reformed += 1
        self.host.leave(self.published)
        blocks = self.host.form()
        state = self.engine.state
        keep = state.consistent and self.engine.progress.step == self.host.begin
        self.engine.survival.recut(BlocksSource(blocks), keep=keep)
        self.published = self.engine.progress.step
        self.host.join()


def live_through(
    rank: int,
    world: int,
    config: dict[str, Any],
    faults: Sequence[tuple[int, int, str]],
    steps: int,
    ahead: int,
) -> tuple[dict[str, Tensor], int, int, int]:
    """Trains through all faults: weights, entries of the function, generations of the last one,
    and the number of the last collective."""
    store = shared_store(rank)
    host, entries = Host(rank, faults, store), 0
    while True:
        entries += 1
        session = Session(host.form(), seed=3, host=host)
        try:
            weights = train(session, config, steps, ahead)
            break
        except LostError:
            host.leave(session.published)
    end_together(store, rank, world)
    collectives = session.engine.internals.runtime.collectives
    return weights, entries, session.reformed, collectives.counters.sequence


def read_ahead(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """Reads `count` micro-batches before it yields the first; copies of them, if it is odd."""
    held: deque[Any] = deque()
    for x, y in batches:
        held.append((x.clone(), y.clone()) if count % 2 else (x, y))
        if len(held) > count:
            yield held.popleft()
    yield from held


def train(session: Session, config: dict[str, Any], steps: int, ahead: int) -> dict[str, Tensor]:
    model = make_model(torch.float64)
    with use_session(session):
        engine, _, loader, _ = rayzero.initialize(model=model, training_data=Data(), config=config)
    while engine.progress.step < steps:
        for x, y in read_ahead(loader.until(steps), ahead):
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
    weights: dict[str, Tensor] = engine.state_dict()
    engine.close()
    return weights


PHASES = (
    "data",
    "forward",
    "backward",
    "reduce",
    "update",
    "publish",
    "before its mirror",
    "after its mirror",
)


@pytest.mark.parametrize(
    ("stage", "micro_batch", "ahead"),
    [(0, 1, 5), (1, 4, 3), (2, 1, 0), (3, 4, 0), (3, 1, 2)],
)
def test_survivors_stay_in_their_loop(stage: int, micro_batch: int, ahead: int):
    faults = [(number % 2, 1 + number % 3, phase) for number, phase in enumerate(PHASES, start=1)]
    config = engine_config(stage) | {"train_micro_batch_size_per_gpu": micro_batch}
    steps = 20
    results = run_ranks(WORLD, live_through, config, faults, steps, ahead)
    for name, expected in oracle(steps).items():
        torch.testing.assert_close(results[0][0][name], expected, rtol=1e-9, atol=1e-12)
    assert [entries for _, entries, *_ in results] == [1 + 4, 1 + 4, 1]
    numbers = [number for *_, number in results]
    assert numbers == [numbers[0]] * 3, "of those that stayed, and of new ranks"
    assert results[2][2] == len(faults)
