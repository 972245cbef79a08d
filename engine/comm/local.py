"""The backend of one rank: there is nobody to exchange with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayzero.engine.comm.collectives import Done, Pending


class LocalBackend:
    """One rank, no process group: every collective is already done."""

    rank = 0
    world_size = 1
    staging_bytes = 0

    def all_reduce(self, full: Tensor) -> Pending:
        return Done()

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Pending:
        if accumulate:
            out.add_(full)
        elif out.data_ptr() != full.data_ptr():
            out.copy_(full)
        return Done()

    def all_gather(self, full: Tensor, part: Tensor) -> Pending:
        if full.data_ptr() != part.data_ptr():
            full.copy_(part)
        return Done()

    def all_gather_among(self, full: Tensor, part: Tensor, members: range) -> Pending:
        return self.all_gather(full, part)

    def all_to_all(self, full: Tensor, received: Tensor) -> Pending:
        received.copy_(full)
        return Done()

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def settle(self) -> None:
        return

    def gather(self, full: Tensor, part: Tensor, target: int) -> Pending:
        full.copy_(part)
        return Done()

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Pending:
        received[0].copy_(sent[0])
        return Done()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        return
