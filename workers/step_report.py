"""The metrics of a step, from the engine, the user's code and the worker itself, which adds its use
of CPU and GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from time import monotonic, process_time, time
from typing import Any

from rayzero.engine.device import get_device, local_device
from rayzero.engine.errors import EngineError
from rayzero.workers.messages import StepReport
from rayzero.workers.mirror import Mirror
from rayzero.workers.training_thread import GenerationChannel
from rayzero.workers.vault.buffers import resident_bytes

COUNTER_NAMES = frozenset({"tokens"})
"""These metrics are summed over micro-steps and ranks; all others are gauges of the rank."""

_STREAM_PREFIX = "streams/"
_RESERVED_PREFIXES = ("phases/", "bytes/", "collectives/", _STREAM_PREFIX)
"""Prefixes of the engine's metrics."""

_MAX_NAME_CHARACTERS = 128

GPU_INTERVAL_S = 1.0
"""Seconds between two queries of the driver, which itself averages over up to a second."""


def read_gpu() -> float | None:
    """Returns `Device.utilization` of the local device."""
    return get_device(local_device()).utilization()


class UsageMeter:
    """Measures the use of CPU and GPU from one step to the next. Used by the training thread.

    Args:
        clock, cpu: return seconds of wall time, and CPU seconds of all threads of this process.
        gpu: as `read_gpu`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        cpu: Callable[[], float] = process_time,
        gpu: Callable[[], float | None] = read_gpu,
    ) -> None:
        self._clock = clock
        self._cpu = cpu
        self._gpu = gpu
        self._gpu_share: float | None = None
        self._gpu_asked_s: float | None = None
        self.restart()

    def restart(self) -> None:
        """Called when a step begins: the use until now belongs to no step."""
        self._since_s = self._clock()
        self._cpu_since_s = self._cpu()

    def end_step(self) -> dict[str, float]:
        """Returns the gauges of the step that ends here; the next step begins."""
        since_s, cpu_since_s = self._since_s, self._cpu_since_s
        self.restart()
        gauges = {}
        if self._since_s > since_s:
            gauges["cpu_cores"] = (self._cpu_since_s - cpu_since_s) / (self._since_s - since_s)
        if self._gpu_asked_s is None or self._since_s - self._gpu_asked_s >= GPU_INTERVAL_S:
            self._gpu_asked_s = self._since_s
            self._gpu_share = self._gpu()
        if self._gpu_share is not None:
            gauges["gpu_utilization"] = self._gpu_share
        return gauges


class StepReporter:
    """Collects metrics until their step is finished. Used by the training thread."""

    def __init__(self, channel: GenerationChannel) -> None:
        self._channel = channel
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self.start_step = 0
        """Finished steps of the state that this generation trains from."""
        self.last_step = 0
        """The last finished step: `start_step`, until this generation has finished a step."""
        self._skipped_steps = 0.0
        self._usage = UsageMeter()
        self._last_at_s = monotonic()
        self._checked_names: set[str] = set()

    @property
    def has_steps(self) -> bool:
        """Whether this generation has finished a step."""
        return self.last_step > self.start_step

    @property
    def elapsed_s(self) -> float:
        """Seconds since the last step was finished."""
        return monotonic() - self._last_at_s

    def begin_generation(self, channel: GenerationChannel) -> None:
        """Reports to this generation from now on. Drops the metrics of a step that the previous
        generation did not finish."""
        self._channel = channel
        self._counters.clear()
        self._gauges.clear()

    def start_at(self, step: int, skipped_steps: int = 0) -> None:
        """Sets the number of finished steps, and how many of them were skipped."""
        self._skipped_steps = float(skipped_steps)
        self.start_step = self.last_step = step
        self._last_at_s = monotonic()
        self._usage.restart()
        self._channel.progress.begin_step(step + 1)

    def add_user_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Adds metrics reported by the training function.

        Raises:
            EngineError: as for `add`, or a name is invalid.
        """
        for name in metrics:
            if name not in self._checked_names:
                check_name(name)
                self._checked_names.add(name)
        self.add(metrics)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds metrics to the current step; `step` is ignored.

        Raises:
            EngineError: a value is not a number.
        """
        for name, value in metrics.items():
            number = to_number(name, value)
            if name in COUNTER_NAMES or name.startswith(_STREAM_PREFIX):
                self._counters[name] += number
            elif name != "step":
                self._gauges[name] = number

    def add_skipped(self, skipped_steps: float | None) -> None:
        """Adds whether the current step was skipped. `skipped_steps`: how many were skipped until
        now; None: as many as before."""
        total = self._skipped_steps if skipped_steps is None else skipped_steps
        self.add({"skipped": total - self._skipped_steps})
        self._skipped_steps = total

    def build(self, step: int) -> StepReport:
        """Finishes the step and returns its report, to be posted once the step is mirrored.

        Raises:
            EngineError: `step` is not larger than the last one.
        """
        if step <= self.last_step:
            raise EngineError(
                f"ctx.report(step={step}) after step {self.last_step}",
                allowed="each finished step once, in increasing order, from 1",
            )
        now_s = monotonic()
        self._gauges.setdefault("step_s", now_s - self._last_at_s)
        self._gauges |= self._usage.end_step()
        channel = self._channel
        counters = dict(self._counters)
        gauges = dict(self._gauges)
        report = StepReport(channel.generation, channel.rank, step, counters, gauges, at_s=time())
        self._counters.clear()
        self._gauges.clear()
        self.last_step, self._last_at_s = step, now_s
        channel.progress.begin_step(step + 1)
        return report

    def leftover_counters(self) -> dict[str, float]:
        """Returns the counters since the last finished step."""
        return dict(self._counters)


def check_name(name: str) -> None:
    """Raises EngineError if a user's metric may not have that name."""
    if not name or len(name) > _MAX_NAME_CHARACTERS or not name.isprintable():
        allowed = f"1 to {_MAX_NAME_CHARACTERS} printable characters"
        raise EngineError(f"ctx.report with a metric named {name[:80]!r}", allowed=allowed)
    if name.startswith(_RESERVED_PREFIXES):
        allowed = f"names without the engine's prefixes {', '.join(_RESERVED_PREFIXES)}"
        raise EngineError(f"ctx.report with a metric named {name!r}", allowed=allowed)


def to_number(name: str, value: Any) -> float:
    """Converts numbers and tensors of one element. Raises EngineError for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise EngineError(
            f"ctx.report({name}=...) with a {type(value).__name__}: {str(value)[:80]!r}",
            allowed="a number, or a tensor with one element",
        ) from None


def worker_metrics(metrics: Mapping[str, float], mirror: Mirror) -> dict[str, float]:
    """Returns metrics of a finished step in addition to the engine's `metrics`. Takes microseconds.

    phases/mirror: the time of the mirror after the step before, subtracted from phases/other.
    checkpoint_s: the same time, if the mirror was for a checkpoint.
    resident_bytes, device_peak_bytes: of this process.
    """
    other_s = metrics.get("phases/other", 0.0)
    mirror_s = min(mirror.stopped_s, other_s)
    for_checkpoint = mirror.checkpointed_step == metrics["step"] - 1
    gauges = {
        "phases/mirror": mirror_s,
        "phases/other": other_s - mirror_s,
        "checkpoint_s": mirror_s if for_checkpoint else 0.0,
        "resident_bytes": float(resident_bytes()),
    }
    if (peak := get_device(local_device()).peak_bytes()) is not None:
        gauges["device_peak_bytes"] = float(peak)
    return gauges


_OF_EACH = ("loss", "grad_norm", "lr", "loss_scale", "skipped_steps")
"""Metrics of each engine after the first one, reported under its name, as `critic/loss`."""
_SUMMED = ("bytes/", "collectives/")


class MetricsMerger:
    """Merges the metrics of several engines' steps into those of a step of the job: the first
    engine's metrics, loss and rates of each other engine, and times, bytes and traffic of all."""

    def __init__(self) -> None:
        self._last: dict[str, Mapping[str, float]] = {}  # of each engine
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, engine: str, metrics: Mapping[str, float]) -> None:
        """Adds a step of an engine; the first engine's name is empty."""
        self._last[engine] = metrics
        for name, value in metrics.items():
            is_phase = name.startswith("phases/") and name != "phases/other"
            if is_phase or name == "exposed_comm_s" or name.startswith(_STREAM_PREFIX):
                self._sums[name] += value
        for rate in ("flops_per_s", "mfu"):
            if rate in metrics:
                self._sums[rate] += metrics[rate] * metrics["step_s"]
        if not engine and "step_tokens" in metrics:
            self._sums["step_tokens"] += metrics["step_tokens"]

    def take(self, step: int, step_s: float) -> dict[str, float]:
        """Returns the metrics of the job's step that has ended."""
        sums, self._sums = dict(self._sums), defaultdict(float)
        merged = {"step_s": step_s, **self._last.get("", {}), **sums}
        merged |= {"step": step, "step_s": step_s}
        for rate in ("flops_per_s", "mfu"):
            if rate in merged:
                merged[rate] /= step_s
        if "step_tokens" in merged:
            merged["tokens_per_s"] = merged["step_tokens"] / step_s
        in_phases = sum(value for name, value in sums.items() if name.startswith("phases/"))
        merged["phases/other"] = max(0.0, step_s - in_phases)
        for engine, metrics in self._last.items():
            if engine:
                merged |= {
                    f"{engine}/{name}": metrics[name] for name in _OF_EACH if name in metrics
                }
                for name in metrics:
                    if name.startswith(_SUMMED):
                        merged[name] = merged.get(name, 0.0) + metrics[name]
        return merged
