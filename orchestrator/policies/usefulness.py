"""Signs that a run trained nothing, or not what its user meant, though no rank failed. Pure."""

from __future__ import annotations

from collections import defaultdict
from math import isfinite

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.progress import JobProgress
from rayzero.workers.messages import StepReport

CHECKED_STEPS = 3
"""First steps of a run in which the losses of the ranks are compared."""


class EqualLosses:
    """Finds ranks that train on the same samples: their losses are equal to the last bit.

    An engine reports its rank's own loss (`rank_loss`) in the first steps after its start only.
    """

    def __init__(self) -> None:
        self._losses: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._equal_steps = 0
        self._is_over = False

    def add_report(self, report: StepReport, world_size: int) -> str:
        """The warning that this report leads to; empty without one. At most one in a job."""
        loss = report.gauges.get("rank_loss")
        if self._is_over or loss is None or world_size == 1:
            return ""
        of_step = self._losses[report.step]
        of_step[report.rank] = loss
        if len(of_step) < world_size:
            return ""
        self._equal_steps += 1
        self._is_over = len(set(of_step.values())) > 1 or not isfinite(loss)
        if self._is_over or self._equal_steps < CHECKED_STEPS:
            return ""
        self._is_over = True
        return (
            f"all {world_size} ranks had the same loss to the last bit in {CHECKED_STEPS} steps: "
            "they probably train on the same samples. Give `training_data=` to initialize, or your "
            "own DataLoader a torch.utils.data.DistributedSampler"
        )


NO_STEP_OF_SCRIPT = (
    "the script ended without a step: rayzero trains what `initialize`, Trainer.train or "
    "Accelerator.prepare of a model over a DeepSpeed config (--stage N gives one) hands out"
)


def check_trained(
    progress: JobProgress, target: int | None, *, launched: bool = False
) -> RayzeroError | str | None:
    """What is wrong with a run whose training function has returned on every rank.

    Args:
        target: the job's `steps`.
        launched: the function runs a script.

    Returns:
        The error that it ends with, the text of a warning, or None.
    """
    done = progress.steps
    if progress.steps_executed and progress.steps_skipped == progress.steps_executed:
        return JobFailedError(
            f"all {progress.steps_executed} steps of this run were skipped, since their gradients "
            "were not finite: nothing was trained",
            fix="the learning rate, gradient_clipping, bf16 instead of fp16, or the data: a loss "
            "that is nan from the first step on comes from the model or from its inputs",
        )
    if done == 0 and target is not None:
        return JobFailedError(
            f"the training function returned without one of {target} steps",
            allowed="engine.step() of an engine of rayzero.initialize (or deepspeed.initialize), "
            "or ctx.report(step=...)",
            fix="the training function",
        )
    if target is not None and done != target:
        what = "before" if done < target else "after"
        return f"the training function returned {what} the job's {target} steps: it made {done}"
    if done:
        return None
    return NO_STEP_OF_SCRIPT if launched else "the training function returned without a step"
