"""Generate `released.zip`: a checkpoint of format version 1, written by commit b971622.

    PYTHONPATH=CHECKOUT torchrun --nproc-per-node 2 tests/engine/checkpoint/make_released.py FOLDER

Two gloo ranks, stage 2, fp16 with a dynamic loss scale, sign compression with error feedback,
AdamW, a warm-up schedule. `expected.json` beside the checkpoint holds the full weights and the
engine's step, loss scale and learning rate. Add a new archive for a new format version; never
replace an existing one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rayzero

STEPS, SAMPLES, WIDTH = 3, 4, 6
CONFIG: dict[str, Any] = {
    "train_batch_size": SAMPLES,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 0.05}},
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2},
    "zero_optimization": {"stage": 2},
    "rayzero": {"compression": {"gradients": "sign", "block_size": 32}},
}
CLIENT_STATE = {"epoch": 3, "best": 0.5, "path": Path("data"), "pair": (1, "two")}


class Model(nn.Module):
    """A tied weight, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("shift", torch.full((WIDTH,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)) + self.frozen(x) + self.shift.to(x.dtype))
        return self.last(x).float().square().mean()


def batch(step: int, rank: int, world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    samples = torch.randn(SAMPLES, WIDTH, generator=generator)
    return samples.chunk(world_size)[rank].half()


def main(folder: Path) -> None:
    engine, *_ = rayzero.initialize(model=Model(), config=CONFIG)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(STEPS):
        engine.backward(engine(batch(step, rank, world_size)))
        engine.step()
    engine.save_checkpoint(str(folder), "released", client_state=CLIENT_STATE)
    weights = engine.state_dict()
    if rank == 0:
        expected = {
            "step": engine.global_steps,
            "loss_scale": engine.cur_scale,
            "lr": engine.get_lr(),
            "weights": {name: value.tolist() for name, value in weights.items()},
        }
        (folder / "expected.json").write_text(json.dumps(expected))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
