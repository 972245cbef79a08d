"""Ranks that exchange over gloo, with shared memory and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayzero.engine.comm.collectives import Collectives
from rayzero.engine.comm.shared_memory import SharedMemoryBackend, make_gloo_backend

CPU = torch.device("cpu")


with_and_without_sharing = pytest.mark.parametrize(
    "share", [True, False], ids=["shared", "messages"]
)


def connect_gloo(share: bool) -> Collectives:
    """Collectives over shared memory, as on a single host, or messages, as between hosts."""
    group = dist.group.WORLD
    assert group is not None
    backend = make_gloo_backend(group, share_memory=share)
    assert isinstance(backend, SharedMemoryBackend) == share
    return Collectives(backend)


@contextmanager
def group(backend: str | None) -> Iterator[None]:
    """A process group of one rank in this process."""
    store: Any = dist.HashStore()
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
