"""Mixtures of experts at stage 3: 1,000 steps with other routing on each of 2 ranks.

    torchrun --standalone --nproc-per-node 2 benchmarks/moe_routing.py [--steps N]

Models with random weights: transformers' Mixtral, Qwen2-MoE and Qwen3-MoE, and a classic one with a
module for each expert, of which a rank may use none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import rayzero
from tests.engine.zoo import Mixture

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MOE = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}


def tokens(draw: torch.Generator) -> Tensor:
    return torch.randint(0, 64, (1, 3), generator=draw)


def routed(draw: torch.Generator) -> Tensor:
    """Rows for `Mixture`: an expert, or none (-1), for each."""
    choice = torch.randint(-1, 4, (2, 1), generator=draw).float()
    return torch.cat([choice, torch.randn(2, 4, generator=draw)], 1)


def transformer(config: PretrainedConfig, kind: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: kind(config)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "classic": (Mixture, routed),
    "mixtral": (
        transformer(MixtralConfig(**SIZES, num_local_experts=8), MixtralForCausalLM),
        tokens,
    ),
    "qwen2-moe": (transformer(Qwen2MoeConfig(**SIZES, **MOE), Qwen2MoeForCausalLM), tokens),
    "qwen3-moe": (
        transformer(Qwen3MoeConfig(**SIZES, **MOE, head_dim=8), Qwen3MoeForCausalLM),
        tokens,
    ),
}


def train(name: str, steps: int) -> None:
    build, draw_batch = CASES[name]
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = rayzero.initialize(model=build(), config=config)
    draw = torch.Generator().manual_seed(engine.rank)
    begun = time.monotonic()
    for _ in range(steps):
        batch = draw_batch(draw)
        loss = engine(batch) if name == "classic" else engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
    if engine.rank == 0:
        print(f"{name}: {steps} steps in {time.monotonic() - begun:.1f} s", flush=True)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    for name in CASES:
        train(name, steps)


if __name__ == "__main__":
    main()
