"""Runs that trained nothing, or each rank the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.orchestrator.policies.usefulness import (
    EqualLosses,
    LastRun,
    check_trained,
    nothing_left,
)
from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.messages import StepReport
from rayzero.workers.step_rows import combine


def report(rank: int, step: int, **gauges: float) -> StepReport:
    return StepReport(1, rank, step, gauges=gauges)


def progress(*skipped: float) -> JobProgress:
    """Of a job with one worker that has finished these steps."""
    made = JobProgress()
    made.start_generation(1, 1)
    for step, share in enumerate(skipped, 1):
        assert made.add_rows(combine([0], [report(0, step, skipped=share)])) is not None
    return made


def continued(step: int) -> JobProgress:
    made = JobProgress()
    made.start_generation(1, 1, step=step)
    return made


OTHER = LastRun("succeeded", 40, ("engine.optimizer.params.lr: 0.001 -> 0.01",))
FINISHED = "no step was trained: the job had finished its 40 steps before"
DIFFERS = "lr: 0.001 -> 0.01"
PLAIN = {"has_engine": False}  # a loop of plain torch, or one that does nothing


@pytest.mark.parametrize(
    ("made", "target", "options", "said", "fails"),
    [
        (progress(1.0, 1.0), 2, {}, "all 2 steps of this run were skipped", True),
        (progress(1.0, 1.0), None, {}, "all 2 steps of this run were skipped", True),
        (progress(), 40, {}, "returned without one of 40 steps: it has called initialize", True),
        (progress(), None, {}, "returned without a step: it has called initialize", True),
        (progress(1.0, 0.0), 3, {}, "returned before the job's 3 steps: it made 2", False),
        (progress(0.0, 0.0), 1, {}, "returned after the job's 1 steps: it made 2", False),
        (progress(1.0, 0.0), 2, {}, "", False),
        (progress(0.0), None, {}, "", False),
        (continued(0), None, PLAIN, "it has not called initialize", True),
        (continued(40), None, PLAIN, "it has not called initialize", True),
        (progress(), None, PLAIN | {"launched": True}, "Accelerator.prepare", False),
        (continued(40), None, {}, FINISHED, False),
        (continued(40), None, {"last": LastRun("succeeded", 40)}, FINISHED, False),
        (continued(40), None, {"last": OTHER}, FINISHED, True),  # it would train other weights
        (continued(40), None, {"last": OTHER, "launched": True}, FINISHED, False),
        (continued(40), None, {"last": replace(OTHER, state="failed")}, FINISHED, False),
    ],
)
def test_run_without_a_trained_step_fails_and_others_do_not_succeed_in_silence(
    made: JobProgress, target: int | None, options: dict[str, Any], said: str, fails: bool
):
    problem = check_trained(made, target, **{"has_engine": True} | options)
    assert isinstance(problem, JobFailedError) == fails
    assert said in str(problem) if said else problem is None
    assert not fails or problem.fix
    assert "not called" not in said or "engine.step()" in problem.allowed
    if said is FINISHED:
        assert "--restart" in str(problem)
        last = options.get("last")
        assert (DIFFERS in str(problem)) == bool(last and last.differences)


def test_run_without_a_step_left_says_so_before_it_starts():
    found = CheckpointRef(40, "runs/job/step-40")
    assert nothing_left(found, 41) == nothing_left(found, None) == ""
    text = nothing_left(found, 40)
    assert "runs/job/step-40 is of step 40, and steps is 40" in text
    assert "--restart" in text


def warnings(losses: list[list[float]]) -> list[str]:
    found = EqualLosses()
    texts = [
        found.add(combine([rank], [report(rank, step, rank_loss=loss)]), len(of_step))
        for step, of_step in enumerate(losses, 1)
        for rank, loss in enumerate(of_step)
    ]
    return [text for text in texts if text]


def test_ranks_with_the_same_samples_are_found_once():
    (text,) = warnings([[0.5, 0.5], [0.4, 0.4], [0.25, 0.25], [0.2, 0.2]])
    assert "DistributedSampler" in text
    assert "torch.manual_seed(seed + rank)" in text  # where samples differ, and noise does not


@pytest.mark.parametrize(
    "losses",
    [
        [[0.5, 0.5000001], [0.4, 0.4], [0.25, 0.25], [0.2, 0.2]],
        [[0.5], [0.4], [0.25]],
        [[0.5, 0.5], [0.4, 0.4]],
        [[float("nan")] * 2] * 3,
    ],
)
def test_other_losses_are_no_sign(losses: list[list[float]]):
    assert warnings(losses) == []
