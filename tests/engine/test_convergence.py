"""Compressed training converges nearly as well as uncompressed, on real text."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from examples.gpt.model import GPT, GPTConfig
from tests.support.ranks import run_ranks

STEPS, LAST, BATCH, CONTEXT = 120, 20, 8, 64
SHAPE = GPTConfig(context=CONTEXT, layers=2, width=64, heads=2)

# name: (stage, config, allowed relative increase of the loss)
CASES: dict[str, tuple[int, dict[str, Any], float]] = {
    "fp16": (2, {"rayzero": {"compression": {"gradients": "fp16"}}}, 0.01),
    "bf16": (2, {"communication_data_type": "bf16"}, 0.01),
    "int8": (1, {"zero_optimization": {"stage": 1, "zero_quantized_gradients": True}}, 0.02),
    "int8 weights": (3, {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, 0.02),
    # Signs of gradients suit SGD more than Adam, whose variances they disturb; hence 1-bit Adam.
    "sign": (0, {"rayzero": {"compression": {"gradients": "sign"}}}, 0.18),
    "sign, sharded": (2, {"rayzero": {"compression": {"gradients": "sign"}}}, 0.12),
    "1-bit Adam": (
        0,
        {
            "optimizer": {
                "type": "OneBitAdam",
                "params": {"lr": 2e-3, "betas": [0.9, 0.97], "freeze_step": 60},
            },
            "gradient_clipping": 0.0,
        },
        0.05,
    ),
    "lowrank": (2, {"rayzero": {"compression": {"gradients": "lowrank", "rank": 4}}}, 0.05),
}


def load_text() -> Tensor:
    """Sources of Python's standard library, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(rank: int, world: int, stage: int, change: dict[str, Any]) -> float:
    """Train; return the mean loss of the last steps."""
    torch.manual_seed(0)
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
    } | change
    engine, *_ = rayzero.initialize(model=GPT(SHAPE), config=config)
    tokens, losses = load_text(), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
        part = batch.chunk(world)[rank]
        engine.backward(engine(part[:, :-1], targets=part[:, 1:]))
        engine.step()
        losses.append(engine.metrics.loss or 0.0)
    return sum(losses[-LAST:]) / LAST


@cache
def uncompressed_loss() -> float:
    return run_ranks(2, train, 2, {}, timeout_s=300)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compressed_training_converges(name: str) -> None:
    stage, change, tolerance = CASES[name]
    expected = uncompressed_loss()
    assert expected < 3.2  # initially 5.5 nats
    loss = run_ranks(2, train, stage, change, timeout_s=300)[0]
    print(f"\n{name}: {loss:.4f}, uncompressed {expected:.4f}")
    assert loss < expected * (1 + tolerance)
