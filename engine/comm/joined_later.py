"""A backend over a process group that is still joining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.backend import Backend, Work
from rayzero.engine.comm.joining_group import JoiningGroup

Zeros = Callable[[int, torch.dtype, torch.device], Tensor]


class JoinedLater(Backend):
    """Waits for the group in its first collective, and nowhere else: until then an engine is built,
    and loads its state.

    Args:
        make: the backend over the group. Collective.
        zeros: makes the buffers of that backend.
    """

    def __init__(
        self,
        joining: JoiningGroup,
        make: Callable[[dist.ProcessGroup], Backend],
        zeros: Zeros | None = None,
    ) -> None:
        self.rank = joining.rank
        self.world_size = joining.world_size
        self._joining = joining
        self._make = make
        self._zeros = zeros

    @cached_property
    def _joined(self) -> Backend:
        return self._make(self._joining.get_group())

    @property
    def _is_joined(self) -> bool:
        return "_joined" in vars(self)

    def all_reduce(self, full: Tensor) -> Work:
        return self._joined.all_reduce(full)

    def reduce_scatter(self, full: Tensor, out: Tensor, *, accumulate: bool) -> Work:
        return self._joined.reduce_scatter(full, out, accumulate=accumulate)

    def all_gather(self, full: Tensor, part: Tensor) -> Work:
        return self._joined.all_gather(full, part)

    def all_gather_in_group(self, full: Tensor, part: Tensor, members: range) -> Work:
        return self._joined.all_gather_in_group(full, part, members)

    def all_to_all(self, full: Tensor, received: Tensor) -> Work:
        return self._joined.all_to_all(full, received)

    def gather(self, full: Tensor, part: Tensor, target: int) -> Work:
        return self._joined.gather(full, part, target)

    def all_to_all_v(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        return self._joined.all_to_all_v(received, sent)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._joined.broadcast(tensor, source)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._zeros is not None:
            return self._zeros(numel, dtype, device)
        return super().zeros(numel, dtype, device)

    def progress_pending(self) -> None:
        if self._is_joined:
            self._joined.progress_pending()

    @property
    def staging_bytes(self) -> int:
        return self._joined.staging_bytes if self._is_joined else 0
