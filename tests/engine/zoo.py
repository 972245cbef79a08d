"""Models with irregular structure, and reference training loops in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH = 13, 10


@dataclass
class Hidden:
    """A dataclass passed between blocks: hooks must find the tensors in it."""

    x: Tensor
    extra: dict[str, Tensor]


class IrregularBlock(nn.Module):
    """Shapes without common divisors, a scalar parameter, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, hidden: Hidden) -> Hidden:
        x = self.norm(hidden.x + self.shift.to(hidden.x.dtype))  # buffers keep their dtype
        x = hidden.x + self.gain * self.down(torch.tanh(self.up(x))) + 0.1 * self.frozen(x)
        return Hidden(x, {"detached": x.detach()})


class PairBlock(nn.Module):
    """Takes a dataclass and returns a tuple; its parameter has a prime dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, 11) / 4)

    def forward(self, hidden: Hidden) -> tuple[Tensor, Tensor]:
        return torch.tanh(hidden.x @ self.mix) @ self.mix.t() + hidden.x, hidden.x


class ResidualBlock(nn.Module):
    """Two linear layers around a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class IrregularModel(nn.Module):
    """Tied embedding and head; a block and a root module that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            [IrregularBlock(), IrregularBlock(), PairBlock(), IrregularBlock()]
        )
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> dict[str, Any]:
        hidden = Hidden(self.embed(tokens), {})
        hidden = self.blocks[0](hidden)
        hidden = self.blocks[1](hidden)
        hidden = self.blocks[0](hidden)
        x, skipped = self.blocks[2](hidden)
        hidden = self.blocks[3](Hidden(self.twice(x), {}))
        logits = self.head(self.twice(hidden.x) + skipped)
        if targets is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, -2), targets.flatten())}


class Tied(nn.Module):
    """A tied embedding, and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8, padding_idx=1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x)).square().mean()


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


class MixtureLayer(nn.Module):
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
        self.layers = nn.ModuleList(MixtureLayer(name) for _ in range(3))

    def forward(self, batch: Tensor) -> Tensor:
        x = batch[:, 1:]
        for number, layer in enumerate(self.layers):
            x = layer(x, (batch[:, 0] + number * (batch[:, 0] >= 0)) % 4 - 5 * (batch[:, 0] < 0))
        return x.square().mean()


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> IrregularModel:
    torch.manual_seed(seed)
    return IrregularModel().to(dtype)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices; none and a lower learning rate for vectors."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def batches(steps: int, samples: int, seed: int = 7) -> Iterator[Tensor]:
    """Global batches of (samples, 6) tokens; inputs are [:, :-1] and targets [:, 1:]."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(0, VOCAB, (samples, 6), generator=generator)


Optimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def train(engine: Any, data: Iterable[Tensor], micro_steps: int = 1) -> list[Any]:
    """Trains on this rank's part of each batch, a step each. Returns the losses."""
    losses = []
    for batch in data:
        for part in batch.chunk(engine.world_size)[engine.rank].chunk(micro_steps):
            engine.backward(engine(part[:, :-1], targets=part[:, 1:])["loss"])
            engine.step()
        losses.append(engine.metrics.loss)
    return losses


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-1, momentum=0.9)


def train_reference(
    model: nn.Module, make_optimizer: Optimizer, data: list[Tensor], clip: float = 0.0
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process with plain PyTorch, a whole global batch at once."""
    dtype = next(model.parameters()).dtype
    return train_mixed_reference(model, make_optimizer, data, clip, dtype=dtype)


def train_mixed_reference(
    model: nn.Module,
    make_optimizer: Optimizer,
    data: list[Tensor],
    clip: float = 0.0,
    parts: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    make_groups: Callable[[nn.Module], list[dict[str, Any]]] = two_groups,
) -> tuple[list[float], dict[str, Tensor]]:
    """Like `train_reference`, in 16 bits with main weights and gradients of the model's dtype.

    A batch is accumulated over `parts`: 16-bit gradients depend on how many samples are summed
    at once, and AdamW turns the sign of a tiny gradient into a whole step. The loss is multiplied
    by `scale` for backward.
    """
    low = copy.deepcopy(model).to(dtype)
    pairs = list(zip(low.parameters(), model.parameters(), strict=True))
    optimizer = make_optimizer(make_groups(model))
    losses = []
    for batch in data:
        optimizer.zero_grad()
        mean = 0.0
        for part in batch.chunk(parts):
            low.zero_grad()
            loss = low(part[:, :-1], part[:, 1:])["loss"]
            (loss * scale).backward()
            mean += loss.item() / parts
            for param, main in pairs:
                if param.grad is not None:
                    grad = param.grad.to(main.dtype) / (parts * scale)
                    main.grad = grad if main.grad is None else main.grad + grad
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        with torch.no_grad():
            for param, main in pairs:
                param.copy_(main)
        losses.append(mean)
    return losses, low.state_dict()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    scale = expected.double().abs().max().item() or 1.0
    return (actual.double() - expected.double()).abs().max().item() / scale


def relative_l2_error(actual: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference, relative to that of `expected`; for 16-bit weights.

    Their single elements are not comparable: where a gradient is zero up to rounding, its sign is
    noise.
    """
    return (
        (actual.double() - expected.double()).norm() / (expected.double().norm() + 1e-300)
    ).item()
