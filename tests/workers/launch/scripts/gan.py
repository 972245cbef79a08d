"""In the shape of DeepSpeedExamples' DCGAN, over a torch DataLoader of its own: it knows nothing of
faults. One rank is killed once, between the critic's step and the generator's, or before both."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from common import Rows, kill_once, note
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

SAMPLES, EPOCHS = 24, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill", nargs=2, default=["-1", ""], help="step and place")
    args = parser.parse_args()
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    note(args.out, "entries", time.time())
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    torch.manual_seed(2 + rank)
    engines = [
        deepspeed.initialize(
            model=model,
            config={
                "train_batch_size": 4,
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
                "zero_optimization": {"stage": stage},
            },
        )[0]
        for model, stage in ((critic, 1), (generator, 2))
    ]
    engine_d, engine_g = engines
    rows_of_all = Rows(SAMPLES)
    sampler = DistributedSampler(rows_of_all, ranks, rank, seed=3)
    loader = DataLoader(rows_of_all, batch_size=2, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for rows, _ in loader:
            count = engine_g.global_steps
            critic.zero_grad()
            engine_d.backward((1 - engine_d(rows)).square().mean())
            fake = engine_g(torch.randn(len(rows), 3).double())
            engine_d.backward(engine_d(fake.detach()).square().mean())
            die(args, rank, count, "critic")
            engine_d.step()
            die(args, rank, count, "between")
            generator.zero_grad()
            engine_g.backward((1 - engine_d(fake)).square().mean())
            die(args, rank, count, "generator")
            engine_g.step()
    for engine in engines:
        note(args.out, "weights", [it.tolist() for it in engine.module_state_dict().values()])


def die(args: argparse.Namespace, rank: int, step: int, place: str) -> None:
    if rank == 1 and [str(step), place] == args.kill:
        kill_once(args.out)


if __name__ == "__main__":
    main()
