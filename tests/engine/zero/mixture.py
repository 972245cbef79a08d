"""A model with a mixture of experts, and its batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STEPS = 12


class Experts(nn.Module):
    """Each sample runs the expert that its first element names; none if that is negative."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList(nn.Linear(4, 4) for _ in range(4)))
        self.name = name

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(getattr(self, self.name)):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.moe = Experts(name)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        x = x + self.dense(x).tanh()
        return x + self.moe(x, choice)


class Mixture(nn.Module):
    def __init__(self, name: str = "experts") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(name) for _ in range(3))

    def forward(self, batch: Tensor) -> Tensor:
        x = batch[:, 1:]
        for number, layer in enumerate(self.layers):
            x = layer(x, (batch[:, 0] + number * (batch[:, 0] >= 0)) % 4 - 5 * (batch[:, 0] < 0))
        return x.square().mean()


def batches(rank: int) -> list[Tensor]:
    """Random routing of its own for each rank; in each third step, rank 1 uses no expert at all."""
    draw = torch.Generator().manual_seed(rank)
    made = []
    for step in range(STEPS):
        choice = torch.randint(0, 4, (3, 1), generator=draw).float()
        if rank == 1 and step % 3 == 0:
            choice.fill_(-1)
        made.append(torch.cat([choice, torch.randn(3, 4, generator=draw)], 1).double())
    return made


def make_mixture(name: str) -> Mixture:
    torch.manual_seed(7)
    return Mixture(name).double()
