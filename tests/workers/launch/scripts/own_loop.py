"""A DeepSpeed script with `training_data=`, or with a loop and checkpoints of its own; one of its
ranks is killed once.

Writes what it sees to a folder: each step's samples, its process-wide state, its final weights.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from common import Rows, kill_once, note
from torch import nn
from torch.utils.data import default_collate

SAMPLES, BATCH, EPOCHS = 24, 4, 3


class OwnRows(Rows):
    """A class of `__main__`."""


def own_batches(engine: Any, schedule: Any, folder: Path) -> Iterator[list[torch.Tensor]]:
    """This rank's, from the place that its own checkpoint tells; so is the schedule's."""
    client_state = {"batch": 0}
    if (folder / "saved").exists():
        _, client_state = engine.load_checkpoint(str(folder / "saved"))
        schedule.load_state_dict(client_state["schedule"])
    note(folder, "loaded", [client_state["batch"], engine.global_steps])
    each = BATCH // dist.get_world_size()
    for batch in range(client_state["batch"], EPOCHS * SAMPLES // BATCH):
        first = (batch * BATCH + dist.get_rank() * each) % SAMPLES
        yield default_collate([OwnRows(SAMPLES)[first + offset] for offset in range(each)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--stage", type=int, default=2)
    calls = ["none", "evaluate", "barrier"]
    parser.add_argument(
        "--calls", choices=calls, help="of all ranks, after each epoch; saves files"
    )
    args = deepspeed.add_config_arguments(parser).parse_args()
    if args.exit:
        sys.exit(args.exit)
    dist.init_process_group("gloo")
    logging.getLogger("script").addHandler(logging.NullHandler())
    atexit.register(note, args.out, "exits", "atexit")
    folder = os.getcwd()
    os.chdir("/")
    note(
        args.out,
        "entries",
        {
            "name": __name__,
            "file": __file__,
            "path": sys.path[0],
            "argv": sys.argv[1:3],
            "handlers": len(logging.getLogger("script").handlers),
            "folder": folder,
            "left": os.environ.get("LEFT_BY_SCRIPT"),
            "pickled": type(pickle.loads(pickle.dumps(OwnRows(SAMPLES)))) is OwnRows,
            "random": torch.rand(()).item(),
        },
    )
    os.environ["LEFT_BY_SCRIPT"] = "1"
    torch.manual_seed(1)
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args,
        model=nn.Linear(4, 1).double(),
        training_data=OwnRows(SAMPLES),
        config={
            "train_batch_size": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": args.stage},
        },
    )
    epochs = [loader] * EPOCHS
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if args.save_every:
        epochs = [own_batches(engine, schedule, args.out)]
    for number, epoch in enumerate(epochs):
        for rows, indices in epoch:
            if (engine.global_steps, engine.global_rank) == (args.kill_at, 1):
                kill_once(args.out)
            engine.backward(engine(rows).pow(2).mean())
            engine.step()
            if engine.was_step_applied():
                note(args.out, "steps", [engine.global_steps, indices.tolist()])
            if args.save_every:
                note(args.out, "rates", [engine.global_steps, *engine.get_lr()])
            schedule.step()
            if args.save_every and engine.global_steps % args.save_every == 0:
                state = {"batch": engine.global_steps, "schedule": schedule.state_dict()}
                engine.save_checkpoint(str(args.out / "saved"), client_state=state)
        if args.calls == "evaluate":
            with torch.no_grad():
                engine(torch.ones(1, 4).double())
        elif args.calls == "barrier":
            dist.barrier()
        if args.calls:
            engine.save_16bit_model(str(args.out), f"half-{number}.pt")
            if engine.global_rank == 0:
                torch.save(engine.global_steps, args.out / f"plain-{number}.pt")
    weights = [value.tolist() for value in engine.module_state_dict().values()]
    note(args.out, "weights", weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
