"""A small decoder transformer: a policy, which predicts tokens, and a scorer, which rates them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from examples.rlhf.task import LENGTH, VOCAB

if TYPE_CHECKING:
    from rayzero import Engine


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model; as it is, it has 0.1 million parameters."""

    vocab: int = VOCAB
    context: int = LENGTH
    layers: int = 2
    width: int = 64
    heads: int = 4


class Cache:
    """The keys and values of the tokens that a model has read: for each layer two tensors
    (B, heads, T, width / heads)."""

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all tokens, these included."""
        if layer in self._layers:
            old_keys, old_values = self._layers[layer]
            keys, values = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
        self._layers[layer] = keys, values
        return keys, values


class Block(nn.Module):
    """Causal attention and a feed-forward network: (B, T, width) to (B, T, width)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        # Behind a cache there is one token, which sees all others.
        y = scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.down(gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x + fed


class Transformer(nn.Module):
    """Blocks between embeddings and a linear head. A folder of it has a config and weights."""

    def __init__(self, config: ModelConfig, outputs: int) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, outputs)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02 if module is self.head else 0.08)

    def compute(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """The head's outputs (B, T, outputs) at tokens (B, T) int64.

        Args:
            cache: of the tokens before these, to which these are added: first a prompt, then one
                token at a time.
        """
        first = 0 if cache is None else cache.length
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        outputs: Tensor = self.head(self.norm(x))
        return outputs

    def save(self, folder: str | Path) -> None:
        """Writes `config.json` and `model.safetensors`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(asdict(self.config)))

    def load(self, folder: str | Path) -> Self:
        """Reads the weights of a folder; the head keeps its own if it has other outputs."""
        weights = load_file(Path(folder) / "model.safetensors")
        if weights["head.weight"].shape != self.head.weight.shape:
            weights |= {f"head.{name}": value for name, value in self.head.state_dict().items()}
        self.load_state_dict(weights)
        return self


class Policy(Transformer):
    """Tokens (B, T) to the logits of the token after each: (B, T, vocab)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.vocab)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        return self.compute(tokens, cache)


class Scorer(Transformer):
    """Tokens (B, T) to one number at each: (B, T). A reward model's score, a critic's value."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.compute(tokens).squeeze(-1)


def save_trained(engine: Engine, folder: str | Path) -> Transformer | None:
    """Writes the folder of an engine's model on rank 0, and returns a copy of it there; None on
    other ranks. Collective."""
    weights = engine.state_dict()
    if not weights:
        return None
    model: Transformer = type(engine.module)(engine.module.config)
    model.load_state_dict(weights)
    model.save(folder)
    return model


def read_config(folder: str | Path) -> ModelConfig:
    """The config of a model's folder."""
    return ModelConfig(**json.loads((Path(folder) / "config.json").read_text()))


def load_policy(folder: str | Path) -> Policy:
    return Policy(read_config(folder)).load(folder)


def load_scorer(folder: str | Path) -> Scorer:
    """A scorer's, or a policy's with a new head."""
    return Scorer(read_config(folder)).load(folder)
