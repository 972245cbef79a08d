"""Signs that a run trained nothing, or not what its user meant, though no rank failed. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import isfinite

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.policies.recovery import CheckpointRef
from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.step_rows import StepRows

CHECKED_STEPS = 3
"""First steps of a run in which the losses of the ranks are compared."""


@dataclass(frozen=True)
class LastRun:
    """The last run of a job's name, which has ended.

    Args:
        differences: keys of the job file in which this job differs from the last run, and which
            determine what is trained: `key: old -> new`.
    """

    state: str
    step: int
    differences: tuple[str, ...] = ()

    @property
    def has_succeeded(self) -> bool:
        return self.state == State.SUCCEEDED


class EqualLosses:
    """Finds ranks that train on the same samples, or on the same random numbers: their losses are
    equal to the last bit.

    An engine reports its rank's own loss (`rank_loss`) in the first steps after its start only.
    """

    def __init__(self) -> None:
        self._losses: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._equal_steps = 0
        self._is_over = False

    def add(self, rows: StepRows, world_size: int) -> str:
        """Returns a warning if equal losses are found, else an empty text; at most one in a job."""
        if self._is_over or "rank_loss" not in rows.positions or world_size == 1:
            return ""
        of_step = self._losses[rows.step]
        of_step |= zip(rows.ranks, rows.column("rank_loss"), strict=True)
        if len(of_step) < world_size:
            return ""
        self._equal_steps += 1
        losses = set(of_step.values())
        self._is_over = len(losses) > 1 or not all(map(isfinite, losses))
        if self._is_over or self._equal_steps < CHECKED_STEPS:
            return ""
        self._is_over = True
        return (
            f"all {world_size} ranks had the same loss to the last bit in {CHECKED_STEPS} steps: "
            "they probably train on the same samples, or on the same random numbers. Give "
            "`training_data=` to initialize, or your own DataLoader a "
            "torch.utils.data.DistributedSampler; where inputs are drawn, such as a GAN's noise, "
            "each rank needs a seed of its own: torch.manual_seed(seed + rank)"
        )


NO_STEP_OF_SCRIPT = (
    "the script ended without a step: rayzero trains the engine of `initialize`, and the models of "
    "Trainer.train and Accelerator.prepare; a loop of plain torch trains on each rank alone"
)


HOW_TO_TRAIN = (
    "engine.backward(loss) and engine.step() of the engine of ctx.initialize(model=..., "
    "training_data=...); ctx.report(step=n) where there is no engine, as in an evaluation"
)


def nothing_left(found: CheckpointRef, target: int | None) -> str:
    """Returns the warning before a run that starts from a checkpoint of its last step; else an
    empty text."""
    if target is None or found.step < target:
        return ""
    return (
        f"no step is left to train: the checkpoint {found.folder} is of step {found.step}, and "
        f"steps is {target}; the training function runs once more, without a step. To train: more "
        "steps, --restart (restart=True), or another name"
    )


def check_trained(
    progress: JobProgress,
    target: int | None,
    *,
    has_engine: bool,
    launched: bool = False,
    last: LastRun | None = None,
) -> RayzeroError | str | None:
    """Checks that a run whose training function has returned on every rank has trained.

    Args:
        target: the job's `steps`.
        has_engine: the function has called `initialize`, on every rank.
        launched: the function runs a script.
        last: the run whose checkpoint this one may continue from.

    Returns:
        The error that the run ends with, the text of a warning, or None.
    """
    done = progress.steps
    if progress.steps_executed and progress.steps_skipped == progress.steps_executed:
        return JobFailedError(
            f"all {progress.steps_executed} steps of this run were skipped, since their gradients "
            "were not finite: nothing was trained",
            fix="change the learning rate, gradient_clipping, the data, or bf16 for fp16: a loss "
            "that is nan from the first step on comes from the model or from its inputs",
        )
    if not progress.steps_executed and not (done and has_engine):
        if launched and target is None:
            return NO_STEP_OF_SCRIPT
        step = "a step" if target is None else f"one of {target} steps"
        why = "it has called initialize" if has_engine else "it has not called initialize"
        return JobFailedError(
            f"the training function returned without {step}: {why}",
            allowed=HOW_TO_TRAIN,
            fix="correct the training function",
        )
    if target is not None and done < target:
        return f"the training function returned before the job's {target} steps: it made {done}"
    if not progress.steps_executed:
        return _nothing_trained(done, launched=launched, last=last)
    if target is not None and done > target:
        return f"the training function returned after the job's {target} steps: it made {done}"
    return None


def _nothing_trained(
    done: int, *, launched: bool, last: LastRun | None
) -> RayzeroError | str | None:
    """Returns the error or the warning for a run that continued from `done` steps and trained none.
    It is an error if the job differs from a successful last run, because the differences had no
    effect; but not for a script, which may have been started to evaluate."""
    seen = f"no step was trained: the job had finished its {done} steps before"
    instead = "more steps or epochs, --restart (restart=True), or another name"
    differences = () if last is None else last.differences
    listed = "".join(f"\n    {line}" for line in differences)
    if differences and not launched and last is not None and last.has_succeeded:
        return JobFailedError(
            f"{seen}, and this job differs from its last run:{listed}",
            allowed="the same job, or one with steps left",
            fix=f"{instead}; checkpoint.resume: PATH of its checkpoint, to run without a step",
        )
    return (
        f"{seen}{', and differs from its last run:' if listed else ''}{listed}; to train: {instead}"
    )
