"""Accelerate over a DeepSpeed config, or without one, with a loop of its own; one of its ranks is
killed once. Without one it also runs by itself, under torchrun.

Writes each sample that it trains on, its steps and its final weights to a folder.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin, ProjectConfiguration
from common import Blocks, Iterable, Rows, kill_once, note
from torch import nn
from torch.utils.data import DataLoader

import rayzero.data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--save-at", type=int, default=-1, help="the step of a checkpoint")
    parser.add_argument("--kill-save", action="store_true", help="within that")
    parser.add_argument("--numbered", action="store_true", help="Accelerate names checkpoints")
    parser.add_argument("--resume", type=Path, help="a checkpoint of --save-at")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="no config, no accumulate; clips")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--generator", action="store_true", help="orders the samples")
    parser.add_argument("--data", choices=["", "stream", "iterable"], default="")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--pace-s", type=float, default=0.0)
    args = parser.parse_args()
    note(args.out, "entries", time.time())
    steps = 2 // int(os.environ["WORLD_SIZE"])  # of the first entry
    plugin = None
    if not args.plain:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as `accelerate launch --use_deepspeed`
        PartialState(cpu=True)
        plugin = DeepSpeedPlugin(zero_stage=args.stage, gradient_accumulation_steps=steps)
    numbered = ProjectConfiguration(str(args.out), automatic_checkpoint_naming=args.numbered)
    accelerator = Accelerator(
        cpu="TORCHELASTIC_RUN_ID" in os.environ,  # torchrun's
        project_config=numbered,
        deepspeed_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=not args.generator),
        gradient_accumulation_steps=steps,
    )
    torch.manual_seed(int(os.environ["RANK"]) if args.generator else 1)
    layers = [nn.Linear(4, args.width), nn.Tanh(), nn.Linear(args.width, 1)]
    if args.dropout:
        layers.append(nn.Dropout(args.dropout))
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + 0.1 * (step // 2))
    )
    rows_of_all = Rows(args.samples)
    data = rayzero.data.stream(
        Blocks(args.samples), 3, transform=lambda row: rows_of_all[row["number"]]
    )
    if args.data == "stream":
        loader = DataLoader(data, batch_size=2, sampler=rayzero.data.StreamSampler(data))
    elif args.data == "iterable":
        loader = DataLoader(Iterable(rows_of_all), batch_size=2)
    else:
        loader = DataLoader(rows_of_all, batch_size=2, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    begun, skipped = 0, 0
    if args.resume is not None:  # as accelerate's complete_nlp_example.py
        accelerator.load_state(args.resume)
        finished = int(args.resume.name.removeprefix("step_")) * steps
        begun, skipped = divmod(finished, len(loader))
    for epoch in range(begun, args.epochs):
        rest = accelerator.skip_first_batches(loader, skipped) if epoch == begun else loader
        if args.data:
            rest.set_epoch(epoch)
        for rows, indices in rest:
            kills = os.environ["RANK"] == "1" and not (args.out / "killed").exists()
            if kills and args.kill_at == getattr(model, "global_steps", None):
                kill_once(args.out)
            time.sleep(0 if (args.out / "fast").exists() else args.pace_s)
            step = getattr(model, "global_steps", 0)
            note(args.out, "used", [time.time(), step, indices.tolist()])
            with nullcontext() if args.plain else accelerator.accumulate(model):
                accelerator.backward(model(rows).pow(2).mean())
                norm = None
                if args.plain and accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            ends_step = accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped
            if accelerator.sync_gradients and not ends_step:
                note(args.out, "lost", time.time())
            if norm is not None and ends_step:
                note(args.out, "norms", float(norm))
            if ends_step and hasattr(model, "global_steps"):
                note(args.out, "steps", [time.time(), model.global_steps])
                note(args.out, "rates", schedule.get_last_lr())
                if model.global_steps == args.save_at:
                    if kills and args.kill_save:
                        model.save_checkpoint = lambda *_, **__: kill_once(args.out)
                    accelerator.save_state(str(args.out / f"step_{args.save_at}"))
        if args.dropout:  # draws random numbers, which a new worker does in finished epochs, too
            with torch.no_grad():
                sum(model(rows).sum() for rows, _ in DataLoader(rows_of_all, batch_size=8))
        accelerator.save_state(None if args.numbered else str(args.out / f"epoch-{epoch}"))
    note(args.out, "weights", [value.tolist() for value in model.module.state_dict().values()])


if __name__ == "__main__":
    main()
