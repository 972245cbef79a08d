"""A training function on a stream of a file that another one of the same size replaces."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import rayzero.data
from rayzero.workers.context import Context

REPLACED_AFTER = 3  # steps


def write(path: Path, first: int) -> None:
    """Not in place: who reads has the old file, or the new one."""
    table = pa.table({"x": [float(first + number) for number in range(400)]})
    new = path.with_suffix(".new")
    pq.write_table(table, new, row_group_size=8, compression="none", use_dictionary=False)
    os.replace(new, path)


def train(ctx: Context) -> dict[str, Any]:
    path = Path(ctx.args["file"])
    stream = rayzero.data.stream(
        rayzero.data.blocks(path), 2, transform=lambda row: torch.tensor([row["x"]])
    )
    model = torch.nn.Linear(1, 1)
    engine, _, loader, _ = ctx.initialize(model=model, training_data=stream)
    for x in loader.until(ctx.steps):
        engine.backward(engine(x).square().mean() * 1e-9)
        engine.step()
        if ctx.is_main and engine.global_steps == REPLACED_AFTER and ctx.generation == 1:
            write(path, 1)
    return {}
