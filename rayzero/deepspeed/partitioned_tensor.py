"""`deepspeed.runtime.utils.PartitionedTensor`: a tensor in parts, one on each rank of a group."""

from __future__ import annotations

from math import prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.deepspeed import comm
from rayzero.deepspeed.runtime_utils import partition_uniform
from rayzero.engine.errors import ConfigError


class PartitionedTensor:
    """This rank's part of a flattened tensor that all ranks of a group have.

    Attributes:
        partition: where the parts begin, and the end.
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.shape), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        own = slice(*self.partition[self.rank : self.rank + 2])
        self.local_data = tensor.detach().reshape(-1)[own].clone()

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None) -> Self:
        """Builds the tensor of this rank's part and of what `to_meta` returned. Raises ConfigError
        for another rank's or another group's."""
        dimensions, *numbers = meta.tolist()
        parts, rank = numbers[dimensions : dimensions + 2]
        made = cls(local_part, group)
        if (parts, rank) != (made.num_parts, made.rank):
            raise ConfigError(
                f"PartitionedTensor.from_meta() got part {rank} of {parts}",
                allowed=f"part {made.rank} of {made.num_parts}: this rank's of this group",
            )
        made.orig_size, made.partition = numbers[:dimensions], numbers[dimensions + 2 :]
        made.orig_device = torch.device(device or local_part.device)
        made.local_data = local_part.detach()
        return made

    def to_meta(self) -> Tensor:
        """Shape, ranks, this rank, and where the parts begin: int64, to be sent with `data()`."""
        shape = [len(self.orig_size), *self.orig_size]
        return torch.tensor(
            [*shape, self.num_parts, self.rank, *self.partition], device=self.orig_device
        )

    def full(self, device: Any = None) -> Tensor:
        """The whole tensor. Collective over the group."""
        flat = self.local_data.new_empty(prod(self.orig_size), device=device or self.orig_device)
        for part in range(self.num_parts):
            held = flat[self.partition[part] : self.partition[part + 1]]
            if part == self.rank:
                held.copy_(self.local_data)
            comm.broadcast(held, group=self.group, group_src=part)
        return flat.view(self.orig_size)

    def data(self) -> Tensor:
        """This rank's part, flat."""
        return self.local_data

    def local_size(self) -> torch.Size:
        return self.local_data.shape

    def full_size(self) -> list[int]:
        return self.orig_size
