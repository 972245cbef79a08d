"""Which stage and micro-batch `rayzero launch --autotuning` tries next, and which was best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from rayzero.engine.config.autotuning import AutotuningConfig
from rayzero.engine.errors import ConfigError

USABLE_FRACTION = 0.9
"""Of a device's memory; the rest is left to its context, NCCL and the allocator."""


@dataclass(frozen=True, order=True)
class Candidate:
    """What a try changes in the config."""

    stage: int
    micro_batch: int

    @property
    def name(self) -> str:
        return f"z{self.stage}-mbs{self.micro_batch}"


@dataclass(frozen=True)
class TryResult:
    """How a try ended.

    Args:
        step_s: seconds of a step, the mean over the timed ones; None if it failed.
        global_batch: samples of a step over all ranks.
        flops_per_s: of a rank; None if not known.
        peak_bytes: of a rank's device; None on a CPU.
        input_shape: of the first tensor that the model got.
        failure: why it has no numbers.
    """

    candidate: Candidate
    step_s: float | None = None
    global_batch: int = 0
    flops_per_s: float | None = None
    peak_bytes: int | None = None
    input_shape: tuple[int, ...] = ()
    failure: str = ""
    out_of_memory: bool = False

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.step_s if self.step_s else 0.0

    def score(self, metric: str) -> float | None:
        """Higher is better; None if it failed. Raises ConfigError if flops are not known."""
        if self.step_s is None:
            return None
        if metric == "flops" and self.flops_per_s is None:
            raise ConfigError(
                "autotuning.metric is flops, but the device's peak is not known, so that none are "
                "counted",
                allowed="throughput, latency",
                fix="autotuning.metric, or rayzero.peak_flops",
            )
        by_metric = {"flops": self.flops_per_s, "latency": -self.step_s}
        return by_metric.get(metric, self.samples_per_s)


@dataclass(frozen=True)
class ScriptFacts:
    """What the script's own run has told, up to where it builds its engine.

    Args:
        stage_bytes: what a rank holds between two steps, by each stage that the config allows.
        device_bytes: of a rank's device; None on a CPU.
        steps_batch: samples of a step for a micro-batch of one, over all ranks.
        global_batch: that of the config; None if it follows from the micro-batch.
    """

    stage_bytes: Mapping[int, int]
    device_bytes: int | None
    steps_batch: int
    global_batch: int | None = None


class Tuner:
    """Chooses the tries, one after another. Stages are in the order of their communication, which
    is that of their speed where all fit; a stage's micro-batches grow by doubling."""

    def __init__(self, settings: AutotuningConfig, facts: ScriptFacts) -> None:
        self._settings = settings
        self._facts = facts
        self._random = Random(0)
        self.results: list[TryResult] = []

    def next(self) -> Candidate | None:
        """The next try; None if there is none, or the last ones were not better."""
        limit = self._settings.tuner_num_trials
        if len(self.results) >= limit or self._tries_since_best() >= (
            self._settings.tuner_early_stopping
        ):
            return None
        tried = {result.candidate for result in self.results}
        left = [it for stage in self._stages() for it in self._of_stage(stage) if it not in tried]
        if not left:
            return None
        return self._random.choice(left) if self._settings.tuner_type == "random" else left[0]

    def record(self, result: TryResult) -> None:
        """Adds the result of a try. Raises ConfigError if the script's batches do not follow the
        config's micro-batch, or the metric is not known."""
        result.score(self._settings.metric)
        for other in self.results:
            sizes = {result.candidate.micro_batch, other.candidate.micro_batch}
            if len(sizes) > 1 and result.input_shape and result.input_shape == other.input_shape:
                low, high = sorted(sizes)
                raise ConfigError(
                    f"with micro-batches of {low} and of {high} samples the model got inputs of "
                    f"the same shape, {list(result.input_shape)}",
                    allowed="a script whose batches follow the config: training_data=, or "
                    "engine.train_micro_batch_size_per_gpu()",
                    fix="autotuning.arg_mappings: the script's argument for the batch size",
                )
        self.results.append(result)

    @property
    def best(self) -> TryResult | None:
        scored = [it for it in self.results if it.score(self._settings.metric) is not None]
        return max(scored, key=lambda it: it.score(self._settings.metric) or 0.0, default=None)

    def _tries_since_best(self) -> int:
        best = self.best
        return 0 if best is None else len(self.results) - 1 - self.results.index(best)

    def _stages(self) -> Sequence[int]:
        return [stage for stage in sorted(self._facts.stage_bytes) if self._fits(stage, 0)]

    def _of_stage(self, stage: int) -> list[Candidate]:
        """The micro-batches of a stage that fit, as far as is known by now."""
        settings, facts = self._settings, self._facts
        too_large = min(
            (
                it.candidate.micro_batch
                for it in self.results
                if it.out_of_memory and it.candidate.stage == stage
            ),
            default=None,
        )
        sizes, size = list[int](), settings.min_train_micro_batch_size_per_gpu
        while size <= settings.max_train_micro_batch_size_per_gpu:
            per_step = facts.global_batch or size * facts.steps_batch
            most = settings.max_train_batch_size or per_step
            allowed = settings.min_train_batch_size <= per_step <= most
            # A micro-batch beyond a given global batch is that batch.
            first_beyond = size * facts.steps_batch <= (facts.global_batch or per_step)
            if (too_large is not None and size >= too_large) or not self._fits(stage, size):
                break
            if allowed and first_beyond:
                sizes.append(size)
            size *= 2
        count = settings.num_tuning_micro_batch_sizes
        known = self._sample_bytes() is not None
        return [Candidate(stage, it) for it in (sizes[-count:] if known else sizes[:count])]

    def _fits(self, stage: int, micro_batch: int) -> bool:
        limit, each = self._facts.device_bytes, self._sample_bytes() or 0.0
        needed = self._facts.stage_bytes[stage] + each * micro_batch
        return limit is None or needed <= USABLE_FRACTION * limit

    def _sample_bytes(self) -> float | None:
        """A sample's activations, by the measured peaks; None before the first."""
        measured = [
            (it.peak_bytes - self._facts.stage_bytes[it.candidate.stage]) / it.candidate.micro_batch
            for it in self.results
            if it.peak_bytes is not None and it.candidate.stage in self._facts.stage_bytes
        ]
        return max(0.0, min(measured)) if measured and self._facts.device_bytes else None
