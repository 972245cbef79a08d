"""Reference for the tutorial script: plain torch on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def train(
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer], clip: float = 0.0
) -> list[float]:
    """Losses of two epochs of two steps over 24 samples."""
    torch.manual_seed(0)
    embed = nn.Embedding(17, 8)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    head = nn.Linear(8, 17)
    model = nn.ModuleList([embed, layers, head])
    optimizer = make_optimizer(model.parameters())
    tokens: Any = torch.randint(0, 17, (24, 6), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):
        for batch in tokens.split(12):
            optimizer.zero_grad()
            x = embed(batch[:, :-1])
            for layer in layers:
                x = x + torch.tanh(layer(x))
            loss = F.cross_entropy(head(x).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
    return losses
