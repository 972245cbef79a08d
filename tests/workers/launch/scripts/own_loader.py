"""A DeepSpeed script with a torch DataLoader and a schedule of its own, as if it ran once: it asks
for nothing that the job has done. One rank is killed once.

Writes what it sees to a folder: each step's samples, its entries, its final weights.
"""

from __future__ import annotations

import argparse
import multiprocessing.process
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from common import Blocks, Iterable, Rows, kill_once, note
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

import rayzero.data

SAMPLES, BATCH, EPOCHS = 24, 4, 4


def read_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """As prefetchers do, which copy the next batch while the current one is trained on."""
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


def evaluate(engine: Any, data: Rows, *, kills: Path | None = None) -> float:
    """Draws random numbers, as each iteration of a DataLoader does."""
    total = torch.zeros(1, dtype=torch.float64)
    engine.eval()
    with torch.no_grad():
        for rows, _ in DataLoader(data, batch_size=len(data)):
            total += engine(rows).sum()
    engine.train()
    if kills is not None:
        kill_once(kills)
    dist.all_reduce(total)
    return total.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill", type=int, nargs=2, default=[-1, -1], help="rank and step")
    parser.add_argument("--kill-after", type=int, default=-1, help="rank 1 evaluates this epoch")
    parser.add_argument(
        "--data", choices=["distributed", "part", "stream", "iterable"], default="distributed"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--pace-s", type=float, default=0.0, help="until a file `fast` is there")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--save", action="store_true", help="after each epoch")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--habit", choices=["", "asks", "ahead", "changes"], default="")
    args = deepspeed.add_config_arguments(parser).parse_args()
    multiprocessing.process.current_process()._config["daemon"] = False  # tests' workers are
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    note(args.out, "entries", time.time())
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(args.dropout), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
        },
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    if args.habit == "asks":
        print(f"at step {engine.global_steps}")
    options: dict[str, Any] = {"num_workers": args.processes}
    if args.processes:
        options |= {"multiprocessing_context": "fork", "persistent_workers": True}
    rows_of_all = Rows(args.samples)
    if args.data == "distributed":
        sampler = DistributedSampler(rows_of_all, ranks, rank, seed=3)
        loader = DataLoader(rows_of_all, sampler=sampler, **options)
    elif args.data == "stream":
        stream = rayzero.data.stream(
            Blocks(args.samples), 3, transform=lambda row: rows_of_all[row["number"]]
        )
        sampler = rayzero.data.StreamSampler(stream, ranks, rank)
        loader = DataLoader(stream, sampler=sampler, **options)
    elif args.data == "iterable":
        sampler = None
        part = Iterable(Subset(rows_of_all, range(rank, args.samples, ranks)))
        loader = DataLoader(part, **options)
    else:
        sampler = None
        part = Subset(rows_of_all, range(rank, args.samples, ranks))
        loader = DataLoader(part, shuffle=True, **options)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        iterator: Iterator[Any] = iter(loader)
        for rows, index in read_ahead(iterator) if args.habit == "ahead" else iterator:
            step = engine.progress.step
            note(args.out, "used", [time.time(), step, index.tolist()])
            if args.pace_s and not (args.out / "fast").exists():
                time.sleep(args.pace_s)
            if args.habit == "changes":
                rows.mul_(2)
            noise = args.dropout * torch.randn_like(rows) / 32
            loss = (engine(rows + noise) - rows.sum()).pow(2).mean()
            note(args.out, "losses", [engine.global_steps, loss.item()])
            if [rank, step] == args.kill:
                kill_once(args.out)
            engine.backward(loss)
            ends_step = engine.is_gradient_accumulation_boundary()
            engine.step()
            if ends_step and engine.was_step_applied():
                schedule.step()
                note(args.out, "steps", [time.time(), engine.progress.step])
                note(args.out, "rates", [engine.progress.step, optimizer.param_groups[0]["lr"]])
            elif ends_step:
                note(args.out, "lost", time.time())
        kills = args.out if rank == 1 and epoch == args.kill_after else None
        value = evaluate(engine, rows_of_all, kills=kills)
        note(args.out, "evaluations", [epoch, value])
        if args.save:
            engine.save_checkpoint(str(args.out / "saved"), tag=f"epoch{epoch}")
            if rank == 0:
                torch.save(engine.module.state_dict(), args.out / f"plain-{epoch}.pt")
    weights = [value.tolist() for value in engine.module_state_dict().values()]
    note(args.out, "weights", weights)


if __name__ == "__main__":
    main()
