"""Where the job stands. The engine owns it; the loader reads it, and writes `weight` alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """The engine's position in the job.

    Attributes:
        step: finished optimizer steps.
        micro_step: finished micro-steps of the step at hand.
        sample_cursor: samples consumed by finished steps, over all ranks and epochs. The engine
            moves it by `global_batch` with every finished step; a loader reads it when an
            iteration begins.
        weight: the gradient weight of the micro-batch at hand. The loader sets it as it hands a
            micro-batch out; the engine multiplies by it in backward, so that the weighted
            gradients of all ranks and micro-steps add up to the mean over the global batch.
        global_batch: samples of a step, over all ranks.
        micro_batch: the most samples that a rank takes at once.
        data_wait_s: seconds that a loader kept its consumer waiting, so far; the loader adds to it.
        skipped_steps: finished steps whose gradient was not finite, and which changed nothing.
    """

    step: int = 0
    micro_step: int = 0
    sample_cursor: int = 0
    weight: float = 1.0
    global_batch: int = 1
    micro_batch: int = 1
    skipped_steps: int = 0
    data_wait_s: float = 0.0
