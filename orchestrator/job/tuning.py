"""`rayzero launch --autotuning`: short runs of a script with each setting that may be best."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rayzero.engine.config.autotuning import AutotuningConfig
from rayzero.engine.config.parse import merge_config
from rayzero.engine.errors import ConfigError, RayzeroError, first_line
from rayzero.engine.validation import validate_document
from rayzero.orchestrator.errors import JobStoppedError
from rayzero.orchestrator.job.api import Job
from rayzero.orchestrator.job_events import NullObserver
from rayzero.orchestrator.policies.tuning import Candidate, ScriptFacts, TryResult, Tuner
from rayzero.orchestrator.spec import JobSpec
from rayzero.orchestrator.spec_sections import LaunchSpec, MetricsSpec

MICRO_BATCH = "train_micro_batch_size_per_gpu"
_BATCH_FLAGS = (f"--{MICRO_BATCH}", "--per_device_train_batch_size")  # ours, Trainer's
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|can't allocate memory|MemoryError|OOM|low memory",
    re.IGNORECASE,
)
_MAX_NAME = 48  # of a job's 63 characters, for the script's part


@dataclass(frozen=True)
class Tuned:
    """What tuning has found.

    Args:
        results: of every try, in order.
        best: None if none succeeded.
        spec: the job with the best settings.
        config: the script's config with them.
    """

    settings: AutotuningConfig
    results: Sequence[TryResult]
    best: TryResult | None
    spec: JobSpec
    config: dict[str, Any]


class ScriptTuner:
    """Runs the tries of one job, each as a job of its own in `exps_dir`.

    Args:
        spec: a job that launches a script; tries have its largest number of workers.
        address: of the Ray cluster; by default each try has a local one of its own.
        show: called with a line for each try.
    """

    def __init__(self, spec: JobSpec, address: str | None, show: Callable[[str], None]) -> None:
        self._spec = spec
        self._address = address
        self._show = show

    def tune(self) -> Tuned:
        """Raises ConfigError or JobFailedError if the script fails before it builds an engine, or
        its batches do not follow the settings; JobStoppedError if a try was stopped."""
        # Until the script has told its config, results go where that says by default.
        probing = self._launch().model_copy(update={"timed_steps": []})
        probed = self._run("plan", AutotuningConfig().exps_dir, probing)
        document = self._value(probed, "document", "builds no engine")
        settings = validate_document(
            AutotuningConfig, document.get("autotuning") or {}, "autotuning"
        )
        flag = find_batch_flag(self._launch().args, settings)
        tuner = Tuner(settings, script_facts(probed, flag))
        while (candidate := tuner.next()) is not None:
            launch = apply(candidate, self._launch(), document, flag)
            result = self._try(candidate, launch, settings)
            tuner.record(result)
            self._show(f"{candidate.name}: {describe(result)}")
        best = tuner.best
        spec, config = self._spec, document
        if best is not None:
            launch = apply(best.candidate, self._launch(), document, flag)
            spec = spec.model_copy(update={"launch": launch})
            sizes = {"train_batch_size": None, MICRO_BATCH: best.candidate.micro_batch}
            config = merge_config(document, launch.overrides | (sizes if flag else {}))
            config.pop("autotuning", None)
        return Tuned(settings, tuner.results, best, spec, config)

    def _launch(self) -> LaunchSpec:
        if self._spec.launch is None:
            raise ConfigError("there is no script to tune", fix="`rayzero launch SCRIPT`")
        return self._spec.launch

    def _try(
        self, candidate: Candidate, launch: LaunchSpec, settings: AutotuningConfig
    ) -> TryResult:
        path = Path(settings.exps_dir, f"{self._name(candidate.name)}.json")
        if not settings.overwrite and path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            return TryResult(**saved | {"candidate": Candidate(**saved["candidate"])})
        steps = [settings.start_profile_step, settings.end_profile_step]
        timed = launch.model_copy(update={"timed_steps": steps})
        try:
            metrics = self._run(candidate.name, settings.exps_dir, timed)
            result = TryResult(
                candidate,
                self._value(metrics, "step_s", f"ends before step {steps[1]}"),
                *(metrics["global_batch"], metrics["flops_per_s"], metrics["peak_bytes"]),
                tuple(metrics["input_shape"]),
            )
        except JobStoppedError:
            raise
        except RayzeroError as error:
            full = _OUT_OF_MEMORY.search(str(error)) is not None
            failure = "out of memory" if full else first_line(error)
            result = TryResult(candidate, failure=failure, out_of_memory=full)
        path.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        return result

    def _run(self, name: str, folder: str, launch: LaunchSpec) -> dict[str, Any]:
        """A try's summary."""
        spec = self._spec
        job = spec.model_copy(
            update={
                "name": self._name(name),
                "launch": launch,
                "workers": spec.workers.model_copy(
                    update={"min": spec.workers.most, "max": None, "spares": 0}
                ),
                "checkpoint": spec.checkpoint.model_copy(
                    update={"path": folder, "every_steps": None, "resume": "auto"}
                ),
                # A fault would be in the measurement.
                "recovery": spec.recovery.model_copy(update={"max_faults": 0}),
                "metrics": MetricsSpec(),
                "faults": [],
                "ledger": False,
            }
        )
        shutil.rmtree(Path(folder, job.name), ignore_errors=True)  # of an earlier tuning
        return Job.from_spec(job).run(self._address, NullObserver()).metrics

    def _name(self, name: str) -> str:
        return f"{self._spec.name[:_MAX_NAME]}-{name}"

    def _value(self, metrics: dict[str, Any], key: str, otherwise: str) -> Any:
        if key in metrics:
            return metrics[key]
        launch = self._launch()
        raise ConfigError(
            f"{launch.script or launch.module} {otherwise}",
            allowed="a script that trains through deepspeed.initialize, Accelerate or Trainer",
            fix="autotuning.end_profile_step in its config, or the script",
        )


def script_facts(probed: dict[str, Any], flag: str | None) -> ScriptFacts:
    """The facts of the script's run up to its engine; `flag` as `find_batch_flag` returns it."""
    document, world_size = probed["document"], probed["world_size"]
    stage = (document.get("zero_optimization") or {}).get("stage", "all")
    wanted = {0, 1, 2, 3} if stage == "all" else set(stage if isinstance(stage, list) else [stage])
    sizes = {int(key): value for key, value in probed["stage_bytes"].items()}
    total, steps = document.get("train_batch_size"), document.get("gradient_accumulation_steps")
    if flag is None and isinstance(total, int):
        return ScriptFacts(
            {key: value for key, value in sizes.items() if key in wanted},
            *(probed["device_bytes"], world_size, total),
        )
    return ScriptFacts(
        {key: value for key, value in sizes.items() if key in wanted},
        probed["device_bytes"],
        world_size * (steps if isinstance(steps, int) else 1),
    )


def find_batch_flag(args: Sequence[str], settings: AutotuningConfig) -> str | None:
    """The script's argument for the micro-batch; None if it takes that from its config."""
    named = (settings.arg_mappings or {}).get(MICRO_BATCH)
    given = {arg.partition("=")[0] for arg in args}
    return named or next((flag for flag in _BATCH_FLAGS if flag in given), None)


def apply(
    candidate: Candidate, launch: LaunchSpec, document: dict[str, Any], flag: str | None
) -> LaunchSpec:
    """How the script is launched with the candidate's settings."""
    changes: dict[str, Any] = {
        "zero_optimization": {"stage": candidate.stage},
        "autotuning": {"enabled": False},
    }
    if flag is None:
        changes[MICRO_BATCH] = candidate.micro_batch
        # A global batch that is given is kept; else it follows.
        derived = isinstance(document.get("train_batch_size"), int)
        changes["gradient_accumulation_steps" if derived else "train_batch_size"] = None
        args = launch.args
    else:
        args = [*_replaced(launch.args, flag, str(candidate.micro_batch))]
    overrides = launch.overrides | changes
    return launch.model_copy(update={"args": args, "overrides": overrides})


def _replaced(args: Sequence[str], flag: str, value: str) -> Iterator[str]:
    """The arguments with another value of a flag, which is added if it is not among them."""
    is_value = found = False
    for arg in args:
        if is_value:
            is_value = False
        elif arg == flag:
            is_value = found = True
            yield from (flag, value)
        elif arg.startswith(f"{flag}="):
            found = True
            yield f"{flag}={value}"
        else:
            yield arg
    if not found:
        yield from (flag, value)


def describe(result: TryResult) -> str:
    """A line for the console."""
    if result.step_s is None:
        return result.failure
    return f"{result.samples_per_s:.4g} samples/s, {result.step_s:.3g} s a step"
