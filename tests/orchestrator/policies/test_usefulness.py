"""Runs that trained nothing, or each rank the same."""

from __future__ import annotations

import pytest

from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.policies.usefulness import EqualLosses, check_trained
from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.messages import StepReport


def report(rank: int, step: int, **gauges: float) -> StepReport:
    return StepReport(1, rank, step, gauges=gauges)


def progress(*skipped: float) -> JobProgress:
    """Of a job with one worker that has finished these steps."""
    made = JobProgress()
    made.start_generation(1, 1)
    for step, share in enumerate(skipped, 1):
        assert made.add_report(report(0, step, skipped=share)) is not None
    return made


@pytest.mark.parametrize(
    ("skipped", "target", "said"),
    [
        ((1.0, 1.0), 2, "all 2 steps of this run were skipped"),
        ((1.0, 1.0), None, "all 2 steps of this run were skipped"),
        ((), 40, "returned without one of 40 steps"),
    ],
)
def test_run_without_a_trained_step_fails(
    skipped: tuple[float, ...], target: int | None, said: str
):
    problem = check_trained(progress(*skipped), target)
    assert isinstance(problem, JobFailedError)
    assert said in problem.seen
    assert problem.fix


@pytest.mark.parametrize(
    ("skipped", "target", "said"),
    [
        ((1.0, 0.0), 3, "returned before the job's 3 steps: it made 2"),
        ((0.0, 0.0), 1, "returned after the job's 1 steps: it made 2"),
        ((), None, "without a step"),
        ((1.0, 0.0), 2, None),
        ((0.0,), None, None),
    ],
)
def test_other_runs_succeed_but_not_in_silence(
    skipped: tuple[float, ...], target: int | None, said: str | None
):
    problem = check_trained(progress(*skipped), target)
    assert problem is None if said is None else said in str(problem)
    assert not isinstance(problem, JobFailedError)


def test_resumed_run_that_had_all_its_steps_is_no_problem():
    resumed = JobProgress()
    resumed.start_generation(1, 1, step=40)
    assert check_trained(resumed, 40) is None


def test_script_without_a_step_is_told_what_makes_one():
    assert "Accelerator.prepare" in str(check_trained(progress(), None, launched=True))


def warnings(losses: list[list[float]]) -> list[str]:
    found = EqualLosses()
    texts = [
        found.add_report(report(rank, step, rank_loss=loss), len(of_step))
        for step, of_step in enumerate(losses, 1)
        for rank, loss in enumerate(of_step)
    ]
    return [text for text in texts if text]


def test_ranks_with_the_same_samples_are_found_once():
    (text,) = warnings([[0.5, 0.5], [0.4, 0.4], [0.25, 0.25], [0.2, 0.2]])
    assert "DistributedSampler" in text


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
