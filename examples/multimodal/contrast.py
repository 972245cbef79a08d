"""The contrastive loss over the embeddings of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, pad


def contrastive_loss(images: Tensor, captions: Tensor, scale: Tensor) -> Tensor:
    """Mean over this rank's pairs; each is told from all other pairs of the global batch.

    The engine averages the losses of all ranks by their number of pairs, so together they are the
    loss of the global batch, with any number of ranks.

    Args:
        images, captions: unit vectors of this rank's pairs, (pairs, width).
        scale: a positive scalar.
    """
    every, first = gather_rows(torch.cat([images, captions], dim=1))
    every_image, every_caption = every.chunk(2, dim=1)
    targets = first + torch.arange(len(images), device=images.device)
    to_captions = cross_entropy(scale * images @ every_caption.T, targets)
    to_images = cross_entropy(scale * captions @ every_image.T, targets)
    return (to_captions + to_images) / 2


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """All ranks' rows in rank order, with gradients, and where this rank's begin. Collective.

    Args:
        rows: (count, width); the count may differ between ranks.
    """
    if not dist.is_initialized():  # a single process
        return rows, 0
    rank, world_size = dist.get_rank(), dist.get_world_size()
    counts = torch.zeros(world_size, dtype=torch.long, device=rows.device)
    counts[rank] = len(rows)
    dist.all_reduce(counts)
    sizes = counts.tolist()
    padded = pad(rows, (0, 0, 0, max(sizes) - len(rows)))
    parts = _Gather.apply(padded).split(max(sizes))
    every = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return every, sum(sizes[:rank])


class _Gather(torch.autograd.Function):
    """All ranks' tensors behind each other. Its gradient is the sum of all ranks' gradients, since
    each rank's loss depends on each rank's tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.count = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[dist.get_rank() * ctx.count :][: ctx.count]
