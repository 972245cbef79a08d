"""A training function that trains on rollouts, and what generators make of its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.builder import make_loader
from rayzero.engine.data.consumption import LogSource
from rayzero.engine.data.sampling import SampleOrder
from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.rollouts.buffer_client import RolloutLog
from tests.workers.recovery_jobs import SAMPLES, Data, make_model

GROUP, PROMPTS = 3, list(range(7))
LIMIT_S = 120.0


def train(ctx: Any) -> None:
    engine, *_ = ctx.initialize(model=make_model(torch.float64))
    log = RolloutLog(
        PROMPTS, ctx.seed, GROUP, lambda: (ctx.generation, read_address(ctx.output_dir)), LIMIT_S
    )
    source = LogSource(log, engine.progress, engine.state.register)
    for x, y in make_loader(engine.internals, source, None).until(ctx.steps):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    weights = engine.state_dict()
    if ctx.is_main:
        torch.save(weights, ctx.output_dir / "weights.pt")


def write_address(folder: Path, address: BufferAddress) -> None:
    temporary = folder / "buffer.new"
    temporary.write_text(json.dumps([address.host, address.port, address.secret.hex()]))
    temporary.replace(folder / "buffer.json")


def read_address(folder: Path) -> BufferAddress:
    host, port, secret = json.loads((folder / "buffer.json").read_text())
    return BufferAddress(host, port, bytes.fromhex(secret))


def make_sample(prompt: int, member: int) -> tuple[Tensor, Tensor]:
    return Data()[prompt * GROUP + member]


def plain_torch(steps: list[list[int]], seed: int) -> dict[str, Tensor]:
    """The weights after these steps, of the samples' numbers."""
    model = make_model(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order = SampleOrder(len(PROMPTS), seed)
    for numbers in steps:
        assert len(numbers) == SAMPLES
        samples = [
            make_sample(int(order.indices(number // GROUP, 1)[0]), number % GROUP)
            for number in numbers
        ]
        optimizer.zero_grad()
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
