"""Weights and counters are DeepSpeed 0.19.8's after each batch of a loop, or the loop is refused.

`deepspeed_loops.json` is DeepSpeed's record. Where its stages differ among themselves, the oracle
is the stage that does as plain torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.micro_steps.loops import LOOPS, RANKS, Row
from tests.engine.micro_steps.training import run_stages
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

DEEPSPEED_DIFFERS = {
    "step_at_the_boundary_only": [1, 2],  # of several backwards at the boundary the last counts
    "own_backward_at_the_boundary_only": [0, 1, 2],
    "two_losses_of_a_batch": [1, 2],
    "two_losses_without_accumulation": [1, 2],
    "two_losses_of_one_forward": [1, 2, 3],
    "coalesced_within_accumulation": [0, 1, 2],
    "own_backward": [0],  # refused
    "scaled_own_backward": [0],
    "unmanaged_own_backward": [0],
    "zero_grad_before_each_backward": [0, 1],  # forgets earlier micro-steps
    "optimizer_zero_grad_before_each_backward": [0, 1, 3],
    "zero_grad_between_two_backwards": [3],  # forgets nothing
    "step_without_backward": [1, 2, 3],
    "step_twice": [1, 2, 3],
    "step_the_optimizer": [1, 2, 3],
    "freeze_on_the_way": [0],  # no momentum: torch's optimizer sees no gradient
    "freeze_and_unfreeze": [0],
    "halve_gradients_in_grad": [0, 1],  # `grad` is there
    "halve_gradients_by_accumulation_hooks": [0, 1],  # of the sum of a step, not of a backward
    "clamp_weights": [1, 2, 3],  # the next step restores them from main weights
    "coalesced": [0],  # refused
    "coalesced_and_declared": [0],
    "coalesced_losses_of_a_batch": [0],
}
"""Stages of DeepSpeed whose weights are not the oracle's, or that raise where it does not."""

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


@pytest.mark.parametrize("name", LOOPS)
def test_deepspeed_differs_among_its_stages_where_it_is_said(name: str) -> None:
    recorded, oracle = RECORDED[name], ORACLE.get(name, 0)
    stages = [
        stage
        for stage in range(4)
        if "no_sync" not in name and not same(recorded[STAGES[stage]], recorded[STAGES[oracle]])
    ]
    assert stages == DEEPSPEED_DIFFERS.get(name, [])


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["error"]) == bool(other["error"]) and equal_rows(one["rows"], other["rows"])


def equal_rows(rows: list[Row], others: list[Row]) -> bool:
    """Weights to rounding of fp32, the rest exactly."""
    return len(rows) == len(others) and all(
        row[:-1] == other[:-1] and row[-1] == pytest.approx(other[-1], abs=1e-5)
        for row, other in zip(rows, others, strict=True)
    )


@pytest.mark.parametrize("source", ["own batches", "batches of the loader"])
@pytest.mark.parametrize("name", LOOPS)
def test_loop(name: str, source: str) -> None:
    from_loader = source != "own batches"
    stages = [1, 3] if from_loader else [0, 1, 2, 3]
    refused = (from_loader and REFUSED_OF_LOADER.get(name)) or REFUSED.get(name)
    for result in run_ranks(RANKS, run_stages, name, stages, from_loader):
        for stage in stages:
            got = result[STAGES[stage]]
            if "no_sync" in name and stage > 1:
                assert "no_sync() was called at stage" in got["error"]
            elif refused:
                assert got["error"].startswith(f"EngineError: {refused}"), got["error"]
            else:
                assert got["error"] == ""
                assert equal_rows(got["rows"], oracle_rows(name)), (stage, got["rows"])


def test_frozen_parameters_with_the_gradients_of_torch() -> None:
    """What is frozen on the way stays as it is: DeepSpeed's stage 0 is plain torch."""
    for name in ("freeze_on_the_way", "freeze_and_unfreeze"):
        options = {"rayzero": {"unused_gradients": "none"}}
        for result in run_ranks(RANKS, run_stages, name, [0, 3], False, options):
            for got in result.values():
                assert equal_rows(got["rows"], RECORDED[name]["stage 0"]["rows"]), got


def oracle_rows(name: str) -> list[Row]:
    rows: list[Row] = RECORDED[name][STAGES[ORACLE.get(name, 0)]]["rows"]
    if name == "unmanaged_own_backward":  # DeepSpeed leaves out samples of the loss's own backward
        return [[row[0], row[1], 8 * row[0], *row[3:]] for row in rows]
    return rows
