"""A backend over a process group that is still joining."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.backend import Backend
from rayzero.engine.comm.joining_group import JoiningGroup

Zeros = Callable[[int, torch.dtype, torch.device], Tensor]


def _collective(name: str) -> Any:
    """The method `name` of the backend over the group."""
    return lambda self, *args, **options: getattr(self._joined, name)(*args, **options)


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

    all_reduce = _collective("all_reduce")
    reduce_scatter = _collective("reduce_scatter")
    all_gather = _collective("all_gather")
    all_gather_in_group = _collective("all_gather_in_group")
    all_to_all = _collective("all_to_all")
    all_to_all_v = _collective("all_to_all_v")
    gather = _collective("gather")
    broadcast = _collective("broadcast")

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        make = self._zeros or super().zeros
        return make(numel, dtype, device)

    def progress_pending(self) -> None:
        if self._is_joined:
            self._joined.progress_pending()

    def abandon(self) -> None:
        if self._is_joined:
            self._joined.abandon()

    @property
    def staging_bytes(self) -> int:
        return self._joined.staging_bytes if self._is_joined else 0
