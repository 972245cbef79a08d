"""The memory of a rank that trains a large model, at its real size, without the memory.

Llama-3-8B's shapes are trained on the bookkeeping device; its storages, as they come and go, are
compared with the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero.engine.config import parse_config
from rayzero.engine.planning.search import MemoryPlanner
from tests.support.fake_cuda.training import DEVICE, Findings, bookkeeping_device

WIDTH, HIDDEN, KEYS, VOCAB, TOKENS = 4096, 14336, 1024, 128256, 8


class Layer(nn.Module):
    """The matrices of a layer of Llama-3-8B, with one head."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KEYS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        repeats = WIDTH // KEYS
        weights = torch.softmax(self.q(y) @ self.k(y).repeat(1, 1, repeats).transpose(1, 2), -1)
        x = x + self.out(weights @ self.v(y).repeat(1, 1, repeats))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """8.03 G parameters with 32 layers, 1.05 G of them in embedding and head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def measure(layers: int, stage: int, world_size: int) -> dict[str, Any]:
    """Bytes of one rank in bf16 with AdamW: of the device's storages, at rest, at the peak of a
    step, and by what allocated them; and of the plan."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    found = Findings({})
    with bookkeeping_device(found, world_size) as (census, _):
        with DEVICE:
            model = Llama(layers)
        engine = rayzero.initialize(model=model, config=config)[0]
        for _ in range(3):
            census.bytes.peak = census.bytes.now
            tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=DEVICE)
            engine.backward(engine(tokens))
            engine.step()
        resting, peak = census.bytes.now, census.bytes.peak
        grad_slots = census.bytes.made_by("acquire", "zero/gradients.py")
        gather_buffers = census.bytes.made_by("_buffer_for", "zero/gather_buffers.py")
        engine.close()
        del engine, model
    planner = MemoryPlanner(
        lambda: Llama(layers), lambda n: torch.zeros(n, TOKENS, dtype=torch.int64)
    )
    plan = planner.estimate(parse_config(config), world_size)
    return {
        "layers": layers,
        "resting": resting,
        "peak": peak,
        "grad_slots": grad_slots,
        "gather_buffers": gather_buffers,
        "plan": plan.bytes,
        "plan_peak": plan.device_total_bytes,
        "refused": found.refused,
    }
