"""A compact GPT in plain torch, independent of rayzero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. `vocab` is 256 because tokens are bytes."""

    vocab: int = 256
    context: int = 256  # tokens per training sample
    layers: int = 4
    width: int = 256
    heads: int = 4
    tie: bool = True  # share the weights of the embedding and the head


class Linear(nn.Linear):
    """A linear layer with GPT-2's initial weights.

    Initialized in `reset_parameters`, so that layers of a model on the meta device can be
    materialized individually.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True, std: float = INIT_STD) -> None:
        self.std = std  # must precede the base constructor, which calls `reset_parameters`
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with GPT-2's initial weights."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


def rotations(length: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions (Su et al. 2021): cosines and sines, (T, size / 2) each.

    Without learned weights, so short runs converge faster than with learned positions.
    """
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=like.device) / size)
    angles = torch.outer(torch.arange(length, device=like.device), frequencies)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions: (B, T, width) to (B, T, width)."""

    def __init__(self, config: GPTConfig, residual_std: float) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = width // self.heads
        qkv = self.qkv(x).view(batch, length, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        cos, sin = rotations(length, size, x)
        left, right = qkv[:2].chunk(2, dim=-1)
        q, k = torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
        y = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # Two residual additions per block; scaled so that variance does not grow with depth.
        residual_std = INIT_STD / (2 * config.layers) ** 0.5
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config, residual_std)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = Linear(config.width, 4 * config.width)
        self.down = Linear(4 * config.width, config.width, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder-only transformer over tokens."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % (2 * config.heads):
            raise ValueError(f"width {config.width} does not divide by twice the heads")
        self.config = config
        self.token = Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, config.vocab, bias=False)
        if config.tie:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss in nats per token if `targets` is given, else the logits.

        Args:
            tokens: (B, T) int64; the logits are (B, T, vocab).
            targets: (B, T) int64, the token that follows each of `tokens`.
        """
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def num_parameters(self) -> int:
        """Number of trainable parameters; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())
