"""What scripts do at the end of an epoch: tell its loss, write its weights. It is drained once, in
the middle of its third epoch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import deepspeed
import torch

OUT = Path(sys.argv[1])
EPOCHS, STEPS, DRAINED_AT = 4, 5, 12

torch.manual_seed(1)
engine, _, loader, _ = deepspeed.initialize(
    model=torch.nn.Linear(4, 1),
    training_data=[(torch.randn(4), torch.randn(1)) for _ in range(STEPS * 2)],
    config={"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}},
)
for epoch in range(EPOCHS):
    total, count = 0.0, 0
    for rows, targets in loader:
        while engine.global_steps == DRAINED_AT and not (OUT / "drained").exists():
            time.sleep(0.02)
        loss = (engine(rows) - targets).pow(2).mean()
        engine.backward(loss)
        engine.step()
        total, count = total + loss.item(), count + 1
    told = {}
    try:
        told["last"] = loss.item()
        told["mean"] = total / count
    except (NameError, ZeroDivisionError) as error:  # it would end the job
        told["error"] = str(error)
    with (OUT / "told").open("a") as file:
        file.write(json.dumps([epoch, told]) + "\n")
    engine.save_16bit_model(OUT, f"half-{epoch}.pt")
    torch.save(engine.module.state_dict(), OUT / f"plain-{epoch}.pt")
