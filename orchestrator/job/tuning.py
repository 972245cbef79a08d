"""`rayzero launch --autotuning`: short runs of a script with each setting that may be best."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rayzero.engine.config.autotuning import AutotuningConfig
from rayzero.engine.config.parse import merge_config
from rayzero.engine.errors import ConfigError, RayzeroError, first_line
from rayzero.engine.validation import validate_document
from rayzero.orchestrator.cluster.connect import ClusterConnection
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import NullObserver
from rayzero.orchestrator.policies.tuning import Candidate, ScriptFacts, TryResult, Tuner
from rayzero.orchestrator.spec import JobSpec
from rayzero.orchestrator.spec_sections import LaunchSpec

MICRO_BATCH = "train_micro_batch_size_per_gpu"
_BATCH_FLAGS = (f"--{MICRO_BATCH}", "--per_device_train_batch_size")  # ours, Trainer's
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|MemoryError|OOM|low memory",
    re.IGNORECASE,
)
_MAX_NAME = 48  # how much of the name, at most 63 characters, is that of the job to tune


@dataclass(frozen=True)
class Tuned:
    """The results of tuning.

    Args:
        results: the result of each try, in order.
        best: the best result; None if no try succeeded.
        spec: the job, with the best settings.
        config: the script's config, with the best settings.
    """

    settings: AutotuningConfig
    results: Sequence[TryResult]
    best: TryResult | None
    spec: JobSpec
    config: dict[str, Any]


class ScriptTuner:
    """Tries settings for a job that launches a script. Each try is a job of its own in `exps_dir`,
    with the largest number of workers.

    Args:
        cluster: stays connected.
        show: called with a line for each try.
    """

    def __init__(
        self, spec: JobSpec, cluster: ClusterConnection, show: Callable[[str], None]
    ) -> None:
        if spec.launch is None:
            raise ConfigError("there is no script to tune", fix="run `rayzero launch SCRIPT`")
        self._spec = spec
        self._launch = spec.launch
        self._cluster = replace(cluster, owned=False)  # or the handle of a try would close it
        self._show = show

    def tune(self) -> Tuned:
        """Runs all tries. Raises ConfigError or JobFailedError if the script fails before it builds
        an engine, or its batches do not follow the settings; JobStoppedError if a try was stopped.
        """
        # The script's own `exps_dir` is not known until the script has reported its config.
        folder = AutotuningConfig().exps_dir
        probed = self._run("plan", folder, self._launch, timed_steps=[])
        document = self._value(probed, "document", "builds no engine")
        section = document.get("autotuning") or {}
        settings = validate_document(AutotuningConfig, section, "autotuning")
        flag = find_batch_flag(self._launch.args, settings)
        tuner = Tuner(settings, script_facts(probed, flag))
        while (candidate := tuner.next()) is not None:
            launch = apply(candidate, self._launch, document, flag)
            result = self._try(candidate, launch, settings)
            tuner.record(result)
            speed = f"{result.samples_per_s:.4g} samples/s, {result.step_s or 0.0:.3g} s a step"
            self._show(f"{candidate.name}: {result.failure or speed}")
        if (best := tuner.best) is None:
            return Tuned(settings, tuner.results, None, self._spec, document)
        launch = apply(best.candidate, self._launch, document, flag)
        sizes = {"train_batch_size": None, MICRO_BATCH: best.candidate.micro_batch}
        changes = {**launch.overrides, **(sizes if flag else {}), "autotuning": None}
        spec = self._spec.model_copy(update={"launch": launch})
        return Tuned(settings, tuner.results, best, spec, merge_config(document, changes))

    def _try(
        self, candidate: Candidate, launch: LaunchSpec, settings: AutotuningConfig
    ) -> TryResult:
        path = Path(settings.exps_dir, f"{self._name(candidate.name)}.json")
        if not settings.overwrite and path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            return TryResult(**saved | {"candidate": candidate})
        steps = [settings.start_profile_step, settings.end_profile_step]
        try:
            metrics = self._run(candidate.name, settings.exps_dir, launch, timed_steps=steps)
            step_s = self._value(metrics, "step_s", f"ends before step {steps[1]}")
            rest = ("global_batch", "flops_per_s", "peak_bytes", "input_shape")
            result = TryResult(candidate, step_s, *(metrics[key] for key in rest))
        except JobStoppedError:
            raise
        except RayzeroError as error:
            out_of_memory = _OUT_OF_MEMORY.search(str(error)) is not None
            failure = "out of memory" if out_of_memory else first_line(error)
            result = TryResult(candidate, failure=failure, out_of_memory=out_of_memory)
        path.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        return result

    def _run(
        self, name: str, folder: str, launch: LaunchSpec, *, timed_steps: list[int]
    ) -> dict[str, Any]:
        """Runs the script with these settings, and returns the summary of its job."""
        workers, spec = self._spec.workers, self._spec
        changes: dict[str, dict[str, Any]] = {
            "workers": {"min": workers.most, "max": None, "spares": 0},
            "checkpoint": {"path": folder, "every_steps": None, "resume": "auto"},
            "recovery": {"max_faults": 0},  # a repair would distort the measurement
            "metrics": {"port": None},
        }
        sections = {
            key: getattr(spec, key).model_copy(update=change) for key, change in changes.items()
        }
        tried = launch.model_copy(update={"timed_steps": timed_steps})
        own = {"name": self._name(name), "launch": tried, "faults": [], "ledger": False}
        # An earlier tuning may have left this folder.
        shutil.rmtree(Path(folder, self._name(name)), ignore_errors=True)
        job = Job.from_spec(spec.model_copy(update={**sections, **own}))
        handle = job.submit_to(self._cluster, NullObserver())
        try:
            return handle.result().metrics
        finally:
            handle.end()

    def _name(self, name: str) -> str:
        return f"{self._spec.name[:_MAX_NAME]}-{name}"

    def _value(self, metrics: dict[str, Any], key: str, otherwise: str) -> Any:
        if key in metrics:
            return metrics[key]
        raise ConfigError(
            f"{self._launch.script or self._launch.module} {otherwise}",
            allowed="a script that trains through deepspeed.initialize, Accelerate or Trainer",
            fix="change autotuning.end_profile_step in its config, or the script",
        )


def script_facts(probed: dict[str, Any], flag: str | None) -> ScriptFacts:
    """Returns what is known of a script from `probed`, the summary of a run that ended when its
    engine was built. `flag` is the result of `find_batch_flag`."""
    document, world_size = probed["document"], probed["world_size"]
    named = (document.get("zero_optimization") or {}).get("stage", "all")
    wanted = range(4) if named == "all" else named if isinstance(named, list) else [named]
    sizes = {
        int(stage): nbytes
        for stage, nbytes in probed["stage_bytes"].items()
        if int(stage) in wanted
    }
    total, steps = document.get("train_batch_size"), document.get("gradient_accumulation_steps")
    if flag is None and isinstance(total, int):
        return ScriptFacts(sizes, probed["device_bytes"], world_size, total)
    micro_steps = steps if isinstance(steps, int) else 1
    return ScriptFacts(sizes, probed["device_bytes"], world_size * micro_steps)


def find_batch_flag(args: Sequence[str], settings: AutotuningConfig) -> str | None:
    """Returns the script's argument for the micro-batch; None if the script takes the micro-batch
    from its config."""
    named = (settings.arg_mappings or {}).get(MICRO_BATCH)
    given = {arg.partition("=")[0] for arg in args}
    return named or next((flag for flag in _BATCH_FLAGS if flag in given), None)


def apply(
    candidate: Candidate, launch: LaunchSpec, document: dict[str, Any], flag: str | None
) -> LaunchSpec:
    """Returns the settings with which the script is launched for a candidate."""
    changes: dict[str, Any] = {
        "zero_optimization": {"stage": candidate.stage},
        "autotuning": {"enabled": False},
    }
    args, size = launch.args, candidate.micro_batch
    if flag is None:
        # A global batch that the config gives is kept. Otherwise it follows from the micro-batch.
        kept = isinstance(document.get("train_batch_size"), int)
        derived = "gradient_accumulation_steps" if kept else "train_batch_size"
        changes |= {MICRO_BATCH: size, derived: None}
    elif flag in args:
        position = args.index(flag)
        args = [*args[: position + 1], str(size), *args[position + 2 :]]
    else:
        args = [*(arg for arg in args if not arg.startswith(f"{flag}=")), f"{flag}={size}"]
    overrides = launch.overrides | changes
    return launch.model_copy(update={"args": args, "overrides": overrides})
