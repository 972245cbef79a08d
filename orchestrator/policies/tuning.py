"""Chooses the stage and micro-batch that `rayzero launch --autotuning` tries next, and the best
try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from rayzero.engine.config.autotuning import AutotuningConfig
from rayzero.engine.errors import ConfigError
from rayzero.engine.planning import USABLE_FRACTION


@dataclass(frozen=True, order=True)
class Candidate:
    """The values that a try changes in the config."""

    stage: int
    micro_batch: int

    @property
    def name(self) -> str:
        return f"z{self.stage}-mbs{self.micro_batch}"


@dataclass(frozen=True)
class TryResult:
    """The result of a try.

    Args:
        step_s: the mean over the timed steps; None if it failed.
        global_batch: samples of a step over all ranks.
        flops_per_s, peak_bytes: of a rank; None if not known, as on a CPU.
        input_shape: of the first tensor that the model got.
        failure: why the try has no numbers.
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


@dataclass(frozen=True)
class ScriptFacts:
    """The facts that the script's run up to its engine has reported.

    Args:
        stage_bytes: what a rank holds between two steps, by each stage to try.
        device_bytes: of a rank's device; None on a CPU.
        unit_batch: samples of a step, over all ranks, for a micro-batch of one.
        global_batch: the config's; None if it follows from the micro-batch.
    """

    stage_bytes: Mapping[int, int]
    device_bytes: int | None
    unit_batch: int
    global_batch: int | None = None


class Tuner:
    """Chooses the tries, one after another. Stages are tried in the order of their communication,
    which is the order of their speed if all fit. A stage's micro-batches grow by doubling."""

    def __init__(self, settings: AutotuningConfig, facts: ScriptFacts) -> None:
        self._settings = settings
        self._facts = facts
        self._random = Random(0)
        self.results: list[TryResult] = []

    def next(self) -> Candidate | None:
        """Returns the next try; None if there is none, or the last ones were not better."""
        settings, best = self._settings, self.best
        since = 0 if best is None else len(self.results) - 1 - self.results.index(best)
        if len(self.results) >= settings.tuner_num_trials or since >= settings.tuner_early_stopping:
            return None
        tried = {result.candidate for result in self.results}
        stages = sorted(self._facts.stage_bytes)
        left = [
            candidate
            for stage in stages
            for candidate in self._of_stage(stage)
            if candidate not in tried
        ]
        if left and settings.tuner_type == "random":
            return self._random.choice(left)
        return left[0] if left else None

    def record(self, result: TryResult) -> None:
        """Adds the result of a try. Raises ConfigError if the script's batches do not follow the
        config's micro-batch, or the metric is not known."""
        if self._settings.metric == "flops" and result.step_s and result.flops_per_s is None:
            raise ConfigError(
                "autotuning.metric is flops, which are not counted: the device's peak is not known",
                allowed="throughput, latency",
                fix="autotuning.metric, or rayzero.peak_flops",
            )
        for other in self.results:
            sizes = {result.candidate.micro_batch, other.candidate.micro_batch}
            if len(sizes) > 1 and result.input_shape and result.input_shape == other.input_shape:
                raise ConfigError(
                    f"with micro-batches of {min(sizes)} and of {max(sizes)} samples the model got "
                    f"inputs of the same shape, {list(result.input_shape)}",
                    allowed="a script whose batches follow the config: training_data=, or "
                    "engine.train_micro_batch_size_per_gpu()",
                    fix="autotuning.arg_mappings: the script's argument for the batch size",
                )
        self.results.append(result)

    @property
    def best(self) -> TryResult | None:
        done = [result for result in self.results if result.step_s is not None]
        return max(done, key=self._score, default=None)

    def _score(self, result: TryResult) -> float:
        if self._settings.metric == "latency":
            return -(result.step_s or 0.0)
        if self._settings.metric == "throughput":
            return result.samples_per_s
        return result.flops_per_s or 0.0

    def _of_stage(self, stage: int) -> list[Candidate]:
        """Returns the micro-batches of a stage that fit, as far as is known by now."""
        settings, facts = self._settings, self._facts
        too_large = {result.candidate for result in self.results if result.out_of_memory}
        limit, sample_bytes = facts.device_bytes, self._sample_bytes()
        sizes, size = list[int](), settings.min_train_micro_batch_size_per_gpu
        while size <= settings.max_train_micro_batch_size_per_gpu:
            needed = facts.stage_bytes[stage] + (sample_bytes or 0.0) * size
            if Candidate(stage, size) in too_large:
                break
            if limit and needed > USABLE_FRACTION * limit:
                break
            batch = size * facts.unit_batch
            total = facts.global_batch or batch
            in_limits = total <= (settings.max_train_batch_size or total)
            if settings.min_train_batch_size <= total and in_limits and batch <= total:
                sizes.append(size)
            size *= 2
        count = settings.num_tuning_micro_batch_sizes
        chosen = sizes[:count] if sample_bytes is None else sizes[-count:]
        return [Candidate(stage, size) for size in chosen]

    def _sample_bytes(self) -> float | None:
        """Returns the bytes of a sample's activations, from the measured peaks; None before the
        first."""
        held = self._facts.stage_bytes
        measured = [
            (result.peak_bytes - held[result.candidate.stage]) / result.candidate.micro_batch
            for result in self.results
            if result.peak_bytes is not None and result.candidate.stage in held
        ]
        return max(0.0, min(measured)) if measured and self._facts.device_bytes else None
