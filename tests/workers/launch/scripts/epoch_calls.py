"""A script that needs all ranks after each epoch; rank 1 is killed once, in the second one."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

OUT, CALLS = Path(sys.argv[1]), sys.argv[2]
EPOCHS, STEPS, KILLED_AT = 3, 5, 7

torch.manual_seed(1)
engine, _, loader, _ = deepspeed.initialize(
    model=torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)).double(),
    training_data=[(torch.randn(4).double(), torch.randn(1).double()) for _ in range(STEPS * 2)],
    config={
        "train_batch_size": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    },
)
with (OUT / "entries").open("a") as file:
    file.write(f"{os.getpid()}\n")
for epoch in range(EPOCHS):
    for rows, targets in loader:
        dies = (engine.global_steps, engine.global_rank) == (KILLED_AT, 1)
        if dies and not (OUT / "killed").exists():
            (OUT / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.backward((engine(rows) - targets).pow(2).mean())
        engine.step()
    if CALLS == "evaluate":
        with torch.no_grad():
            engine(torch.ones(1, 4).double())
    elif CALLS == "barrier":
        dist.barrier()
    engine.save_16bit_model(str(OUT), f"half-{epoch}.pt")
    if engine.global_rank == 0:
        torch.save(engine.global_steps, OUT / f"plain-{epoch}.pt")
weights = {name: value.tolist() for name, value in engine.module_state_dict().items()}
if engine.global_rank == 0:
    (OUT / "end.json").write_text(json.dumps([engine.global_steps, weights]))
