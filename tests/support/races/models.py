"""Small models with the structure of large ones: tied weights, frozen ones, recomputed blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.engine import zoo

WIDTH, VOCAB, SAMPLES = 16, 24, 4


class Stack(nn.Module):
    """Blocks between two layers. `recompute`: blocks run again in backward."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(zoo.ResidualBlock(WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, 4)
        self._recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            # Its check compares devices, of which the virtual one is known to Python only.
            x = (
                checkpoint(block, x, use_reentrant=False, determinism_check="none")
                if self._recompute
                else block(x)
            )
        return self.last(x).float().square().mean()


class Decoder(nn.Module):
    """A language model: embedding, attention, norms, a head; two layers, and parameters of a module
    that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.gains = nn.ParameterList(torch.ones(WIDTH) for _ in self.layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = layer(x) * gain
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.block = zoo.ResidualBlock(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / WIDTH**0.5, -1)
        return self.block(x + weights @ v)


class Branching(nn.Module):
    """Blocks of which every second forward, from the first, skips the last: it is prefetched, and
    not used. Its weights are the last in the order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(zoo.ResidualBlock(WIDTH) for _ in range(4))
        self._forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self._forwards += 1
        for number, block in enumerate(self.blocks):
            if number != 3 or self._forwards % 2 == 0:
                x = block(x)
        return self.last(x).float().square().mean()


class Irregular(nn.Module):
    """The zoo's model: tied weights, a block that is called twice, frozen layers, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = zoo.IrregularModel()

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens[:, :-1], tokens[:, 1:])["loss"]
        return loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "recomputed": lambda: Stack(recompute=True),
    "decoder": Decoder,
    "irregular": Irregular,
    "branching": Branching,
}


def make_batch(model: str, generator: torch.Generator) -> Tensor:
    """A micro-batch in host memory."""
    if model in ("stack", "recomputed", "branching"):
        return torch.randn(SAMPLES, WIDTH, generator=generator)
    vocab = VOCAB if model == "decoder" else zoo.VOCAB
    return torch.randint(0, vocab, (SAMPLES, 6), generator=generator)
