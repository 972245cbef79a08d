"""One training, two loops: torch's DistributedDataParallel, and rayzero at stage 0.

    torchrun --nproc-per-node 2 -m examples.ddp.train --with ddp
    torchrun --nproc-per-node 2 -m examples.ddp.train --with rayzero

Both print the loss of every step, and these are the same.
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

CONTEXT, BATCH = 64, 8  # tokens, which are bytes, and samples a step over all ranks
MODEL = GPTConfig(context=CONTEXT, layers=2, width=64, heads=4)
SGD = {"lr": 0.1, "momentum": 0.9}


def batches(steps: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """This rank's samples of each step: (BATCH / ranks, CONTEXT + 1) bytes of a real file."""
    path = Path(sysconfig.get_path("stdlib")) / "argparse.py"
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        samples = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        yield samples.chunk(world_size)[rank]


def with_ddp(steps: int, rank: int, world_size: int) -> list[float]:
    """Plain torch."""
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


def with_rayzero(steps: int, rank: int, world_size: int) -> list[float]:
    """The same. `engine.metrics.loss` is the mean over all ranks without another all-reduce."""
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
    "ddp": with_ddp,
    "rayzero": with_rayzero,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="DistributedDataParallel beside rayzero")
    parser.add_argument("--with", dest="loop", choices=LOOPS, default="rayzero")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: see the top of this file")
    dist.init_process_group("gloo")  # on the CPU, so that it runs everywhere
    rank = dist.get_rank()
    losses = LOOPS[options.loop](options.steps, rank, dist.get_world_size())
    if rank == 0:
        print(json.dumps(losses), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
