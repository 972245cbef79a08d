"""A GAN with Accelerate, as its users write one: it knows nothing of faults. One rank is killed
once, between the critic's step and the generator's, or before both. By itself it is plain torch's.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin
from common import Rows, kill_once, note
from torch import nn
from torch.utils.data import DataLoader

SAMPLES, EPOCHS, BATCH = 24, 2, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill", nargs=2, default=["-1", ""], help="step and place")
    parser.add_argument("--each", action="store_true", help="a call of prepare for each model")
    parser.add_argument("--config", action="store_true", help="brings a DeepSpeed config")
    parser.add_argument("--alone", action="store_true", help="without rayzero")
    args = parser.parse_args()
    note(args.out, "entries", time.time())
    accelerator = Accelerator(
        cpu=args.alone,
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=1) if args.config else None,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    of_critic = torch.optim.Adam(critic.parameters(), 0.01)
    of_generator = torch.optim.Adam(generator.parameters(), 0.01)
    ranks = 1 if args.alone else 2  # Accelerate steps a schedule once for each
    schedule = torch.optim.lr_scheduler.LambdaLR(
        of_generator, lambda step: 1 / (1 + 0.1 * (step // ranks))
    )
    loader = DataLoader(Rows(SAMPLES), batch_size=BATCH // ranks, shuffle=True)
    if args.each:
        critic, of_critic, loader = accelerator.prepare(critic, of_critic, loader)
        generator, of_generator = accelerator.prepare(generator, of_generator)
    else:
        of_generator, critic, loader, generator, of_critic, schedule = accelerator.prepare(
            of_generator, critic, loader, generator, of_critic, schedule
        )
    count = getattr(generator, "global_steps", 0)
    for _ in range(EPOCHS):
        for rows, _ in loader:
            count = getattr(generator, "global_steps", count)
            of_critic.zero_grad()
            accelerator.backward((1 - critic(rows)).square().mean())
            fake = generator(rows[:, :3].sin())
            accelerator.backward(critic(fake.detach()).square().mean())
            die(args, count, "critic")
            accelerator.clip_grad_norm_(critic.parameters(), 0.1)
            of_critic.step()
            die(args, count, "between")
            of_generator.zero_grad()
            accelerator.backward((1 - critic(fake)).square().mean())
            die(args, count, "generator")
            of_generator.step()
            if not args.each:
                schedule.step()
            count += 1
    for model in (critic, generator):
        own = accelerator.unwrap_model(model).state_dict()
        note(args.out, "weights", [it.tolist() for it in own.values()])


def die(args: argparse.Namespace, step: int, place: str) -> None:
    if os.environ["RANK"] == "1" and [str(step), place] == args.kill:
        kill_once(args.out)


if __name__ == "__main__":
    main()
