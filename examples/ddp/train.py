"""The same training with torch's DistributedDataParallel and with rayzero at stage 0.

    torchrun --nproc-per-node 2 -m examples.ddp.train --with ddp
    torchrun --nproc-per-node 2 -m examples.ddp.train --with rayzero

Both print the loss of every step; the losses are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import rayzero
from examples.gpt.model import GPT, GPTConfig

CONTEXT, BATCH = 64, 8  # tokens (bytes) per sample, and samples per step over all ranks
MODEL = GPTConfig(context=CONTEXT, layers=2, width=64, heads=4)
SGD = {"lr": 0.1, "momentum": 0.9}


def batches(steps: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """Yield this rank's samples of each step: (BATCH / ranks, CONTEXT + 1) bytes of a real file."""
    path = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        samples = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        yield samples.chunk(world_size)[rank]


def train_ddp(steps: int, rank: int, world_size: int) -> list[float]:
    """Train with plain torch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(MODEL))
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    losses = []
    for batch in batches(steps, rank, world_size):
        optimizer.zero_grad()
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses


def train_rayzero(steps: int, rank: int, world_size: int) -> list[float]:
    """Train with rayzero. `engine.metrics.loss` is the mean over ranks, without an all-reduce."""
    torch.manual_seed(0)
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 0,  # 1.0 by default, as in DeepSpeed
        "optimizer": {"type": "SGD", "params": SGD},
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = rayzero.initialize(model=GPT(MODEL), config=config)
    losses = []
    for batch in batches(steps, rank, world_size):
        loss = engine(batch[:, :-1], batch[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(engine.metrics.loss)
    return losses


LOOPS: dict[str, Callable[[int, int, int], list[float]]] = {
    "ddp": train_ddp,
    "rayzero": train_rayzero,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="compare DistributedDataParallel and rayzero")
    parser.add_argument("--with", dest="loop", choices=LOOPS, default="rayzero")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this script with torchrun, as documented in the file")
    dist.init_process_group("gloo")  # CPU only
    rank = dist.get_rank()
    losses = LOOPS[options.loop](options.steps, rank, dist.get_world_size())
    if rank == 0:
        print(json.dumps(losses), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
