"""A sequence of process groups that the ranks of a test form."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from tests.engine.state.blocks import Block as StateBlock


@dataclass
class Generations:
    """One process's part in a sequence of process groups. Rank r is a member of those with more
    than r ranks: it leaves, and comes back as a new process would.

    Args:
        sizes: the ranks of each generation.
        how: survivors re-cut their engine, with their own memory as the first source or without;
            or build a new one.
    """

    rank: int
    sizes: Sequence[int]
    how: Literal["own", "source", "rebuild"]
    store: dist.Store
    number: int = -1
    kept_bytes: list[int] = field(default_factory=list)

    def form(self) -> bool:
        """Forms the next group. False if this rank is not in it."""
        self.number += 1
        if dist.is_initialized():
            # A socket that is closed before its peer has read from it resets the connection.
            ended = [f"ended-{self.number}-{rank}" for rank in range(dist.get_world_size())]
            self.store.set(ended[self.rank], "")
            self.store.wait(ended)
            dist.destroy_process_group()
        if self.rank >= self.sizes[self.number]:
            return False
        store = dist.PrefixStore(f"generation-{self.number}", self.store)
        size = self.sizes[self.number]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size)
        return True

    @property
    def is_last(self) -> bool:
        return self.number == len(self.sizes) - 1

    def publish(self, engine: Any) -> None:
        self.store.set(f"block-{self.number}-{self.rank}", pickle.dumps(StateBlock.of(engine)))

    def blocks(self) -> list[StateBlock]:
        """The state that the previous generation has left, of all its ranks."""
        before = self.number - 1
        keys = [
            f"block-{before}-{rank}" for rank in range(self.sizes[before] if before >= 0 else 0)
        ]
        return [pickle.loads(self.store.get(key)) for key in keys]


def end_together(store: dist.Store, rank: int, world: int) -> None:
    """No rank's connections end before all have ended."""
    store.set(f"end-{rank}", b"1")
    store.wait([f"end-{it}" for it in range(world)])


def shared_store(rank: int) -> dist.Store:
    """A store that outlives the groups of its ranks. Collective."""
    port = torch.zeros(1, dtype=torch.int64)
    own = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if not rank else None
    )
    if own is not None:
        port[0] = own.port
    dist.broadcast(port, 0)
    return own or dist.TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=120))
