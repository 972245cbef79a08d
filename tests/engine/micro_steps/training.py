"""The loops on rayzero's engine."""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset

import rayzero
from rayzero.deepspeed import zero
from tests.engine.micro_steps.loops import (
    LOOPS,
    MICRO_BATCHES,
    Run,
    make_config,
    make_data,
    make_model,
    own_batches,
)


def run_stages(
    rank: int,
    world: int,
    name: str,
    stages: list[int],
    from_loader: bool,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """{stage: its error, and its rows}, as `record_deepspeed` writes them. `options` are added to
    the config."""
    more = options or {}
    return {f"stage {stage}": _train(rank, name, stage, from_loader, more) for stage in stages}


def _train(
    rank: int, name: str, stage: int, from_loader: bool, options: dict[str, Any]
) -> dict[str, Any]:
    loop, more = LOOPS[name]
    config = make_config(stage, 2) | more | options
    accumulation = config["gradient_accumulation_steps"]
    model = make_model()
    engine, _, loader, _ = rayzero.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        training_data=TensorDataset(*make_data()) if from_loader else None,
    )
    if loader is None:
        batches: Any = own_batches(rank, accumulation)
    else:
        batches = loader.steps(MICRO_BATCHES // accumulation)
    run = Run(engine, batches, zero.GatheredParameters)
    error = run.train(loop)
    engine.close()
    return {"error": error, "rows": run.rows}
