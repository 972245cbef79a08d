"""Weights and counters are DeepSpeed 0.19.8's after each batch of a loop, or the loop is refused.

`deepspeed_loops.json` is DeepSpeed's record. Where its stages differ among themselves, the oracle
is the stage that does as plain torch.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

import rayzero
from rayzero.deepspeed import zero
from tests.engine.micro_steps.loops import (
    LOOPS,
    MICRO_BATCHES,
    RANKS,
    Row,
    Run,
    make_config,
    make_data,
    make_model,
    own_batches,
)
from tests.support.ranks import run_ranks

RECORDED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("deepspeed_loops.json").read_text()
)
STAGES = [f"stage {stage}" for stage in range(4)]

ORACLE = {
    "own_backward": 1,
    "scaled_own_backward": 1,
    "own_backward_at_the_boundary_only": 3,
    "zero_grad_before_each_backward": 2,
    "optimizer_zero_grad_before_each_backward": 2,
    "unmanaged_own_backward": 1,
    "coalesced": 1,
    "coalesced_within_accumulation": 3,
    "coalesced_and_declared": 1,
    "coalesced_losses_of_a_batch": 1,
    "step_inside_coalesce": 1,
    "coalesce_inside_coalesce": 1,
    "coalesce_inside_no_sync": 1,
    "coalesce_unmanaged": 1,
    "freeze_on_the_way": 1,
    "freeze_and_unfreeze": 1,
    "halve_gradients_in_grad": 2,
    "halve_gradients_by_accumulation_hooks": 2,
}
"""The stage of DeepSpeed that is the oracle; 0 elsewhere."""

_BEFORE_STEP = "backward() of micro-batch 2 of step 1 came before the step() of micro-batch 1"
_NOT_LAST = "a step ended with micro-batch 1 of step 2, which is not the last one of step 1"
_NO_BACKWARD = "step() was called without a backward() before it"
_NO_SYNC = "no_sync() was entered inside no_sync()"
_COALESCE = "coalesce_grad_reduction() was called where it does not hold a whole step"

REFUSED = {  # {loop: the error}
    "step_without_backward": _NO_BACKWARD,
    "step_twice": _NO_BACKWARD,
    "step_the_optimizer": "optimizer.step() was called on the engine's optimizer",
    "step_inside_no_sync": _NO_BACKWARD,
    "step_inside_coalesce": _NO_BACKWARD,
    "coalesce_inside_coalesce": _NO_SYNC,
    "coalesce_inside_no_sync": _NO_SYNC,
    "coalesced_within_accumulation": _COALESCE,
    "coalesce_unmanaged": _COALESCE,
    "halve_gradients_by_accumulation_hooks": "register_post_accumulate_grad_hook was called on",
}
REFUSED_OF_LOADER = {  # batches of the loader: a step has those of the config
    "step_at_the_boundary_only": _BEFORE_STEP,
    "own_backward_at_the_boundary_only": _BEFORE_STEP,
    "step_if_the_engine_says_boundary": _BEFORE_STEP,
    "a_backward_without_step": "backward() of micro-batch 2 of step 2 came before the step() of",
    "no_sync_without_accumulation": _NOT_LAST,
    "no_sync_within_accumulation": "a step ended with micro-batch 2 of step 2",
    "declare_another_accumulation": "a step ended with micro-batch 2 of step 2",
    "zero_grad_between_two_backwards": "backward() of micro-batch 1 of step 2 came before the",
    "step_the_optimizer": _BEFORE_STEP,
    "unmanaged": "a step ended with micro-batch 1 of step 1",
    "unmanaged_without_accumulation": "a step ended with micro-batch 1 of step 3",
    "coalesced": _NOT_LAST,
}


def equal_rows(rows: list[Row], others: list[Row]) -> bool:
    """Weights to rounding of fp32, the rest exactly."""
    return len(rows) == len(others) and all(
        row[:-1] == other[:-1] and row[-1] == pytest.approx(other[-1], abs=1e-5)
        for row, other in zip(rows, others, strict=True)
    )


def run_loops(
    rank: int, world: int, names: list[str], stages: list[int], from_loader: bool, options: Any
) -> dict[tuple[str, int], dict[str, Any]]:
    """{(loop, stage): its error, and its rows}. `options` are added to the config."""
    outcomes = {}
    for name in names:
        loop, more = LOOPS[name]
        for stage in stages:
            config = make_config(stage, 2) | more | options
            accumulation = config["gradient_accumulation_steps"]
            model = make_model()
            engine, _, loader, _ = rayzero.initialize(
                model=model,
                model_parameters=model.parameters(),
                config=config,
                training_data=TensorDataset(*make_data()) if from_loader else None,
            )
            batches: Any = own_batches(rank, accumulation)
            if loader is not None:
                batches = loader.steps(MICRO_BATCHES // accumulation)
            run = Run(engine, batches, zero.GatheredParameters)
            error = run.train(loop)
            engine.close()
            outcomes[name, stage] = {"error": error, "rows": run.rows}
    return outcomes


STAGES_OF = {"own batches": [0, 1, 2, 3], "batches of the loader": [1]}
"""A loader does not know the stage; beyond the first, `no_sync` is refused."""


@cache
def outcomes(source: str) -> list[Any]:
    """Of all loops, by rank."""
    stages, from_loader = STAGES_OF[source], source != "own batches"
    return run_ranks(RANKS, run_loops, list(LOOPS), stages, from_loader, {}, timeout_s=600)


@pytest.mark.parametrize("source", STAGES_OF)
@pytest.mark.parametrize("name", LOOPS)
def test_loop(name: str, source: str) -> None:
    from_loader = source != "own batches"
    refused = (from_loader and REFUSED_OF_LOADER.get(name)) or REFUSED.get(name)
    for result in outcomes(source):
        for stage in STAGES_OF[source]:
            got = result[name, stage]
            if "no_sync" in name and stage > 1:
                assert "no_sync() was called at stage" in got["error"]
            elif refused:
                assert got["error"].startswith(f"EngineError: {refused}"), got["error"]
            else:
                assert got["error"] == ""
                assert equal_rows(got["rows"], oracle_rows(name)), (stage, got["rows"])


def test_frozen_parameters_with_the_gradients_of_torch() -> None:
    """What is frozen on the way stays as it is: DeepSpeed's stage 0 is plain torch."""
    options = {"rayzero": {"unused_gradients": "none"}}
    names = ["freeze_on_the_way", "freeze_and_unfreeze"]
    for result in run_ranks(RANKS, run_loops, names, [0, 3], False, options):
        for (name, _), got in result.items():
            assert equal_rows(got["rows"], RECORDED[name]["stage 0"]["rows"]), got


def oracle_rows(name: str) -> list[Row]:
    rows: list[Row] = RECORDED[name][STAGES[ORACLE.get(name, 0)]]["rows"]
    if name == "unmanaged_own_backward":  # DeepSpeed leaves out samples of the loss's own backward
        return [[row[0], row[1], 8 * row[0], *row[3:]] for row in rows]
    return rows
