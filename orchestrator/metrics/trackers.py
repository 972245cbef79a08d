"""Finished steps in experiment trackers, Weights & Biases and MLflow, through their packages.

They have a thread of their own: a tracker is a network away, and the journal must not wait for it.
A tracker that cannot be reached costs a warning, never a step. One tracker's run is one run of the
job, with its repairs and adoptions.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import isfinite
from typing import Any, ClassVar

from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.monitors import is_installed
from rayzero.engine.redact import redact_document
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job_events import StateEntered
from rayzero.orchestrator.job_file import to_document
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.metrics.step_files import scalars_of
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.progress import StepRecord

FLUSH_INTERVAL_S = 2.0
END_LIMIT_S = 20.0
"""How long the end of a job waits for its trackers."""
MAX_MLFLOW_BATCH = 500
"""Metrics of a request; MLflow's limit is 1000, of which 100 may be params."""
_MAX_PARAM_CHARACTERS = 500
_MLFLOW_INVALID = re.compile(r"[^\w\-. /:]")
_MLFLOW_STATUS = {State.SUCCEEDED: "FINISHED", State.STOPPED: "KILLED"}


class Tracker(ABC):
    """A run in a tracker, which is opened by the first call. Does nothing once the tracker's
    package could not be imported: trying again is of no use.

    Args:
        settings: the tracker's, in the job file.
        key: identifies the run, so that a process which adopts the job continues it.
    """

    name: ClassVar[str]
    package: ClassVar[str]

    def __init__(self, settings: Any, plan: JobPlan, key: str, warn: Callable[[str], None]) -> None:
        self._settings = settings
        self._plan = plan
        self._key = key
        self._warn = warn
        self._module: Any = None
        self._is_broken = False

    def write(self, events: Sequence[StepRecord | StateEntered]) -> None:
        """Steps, and the job's end. May raise anything, and is called again with the same then."""
        if not self._has_module():
            return
        if records := [event for event in events if isinstance(event, StepRecord)]:
            self.log(records)
        for event in events:
            if isinstance(event, StateEntered):
                self.end(event.state)

    @abstractmethod
    def log(self, records: Sequence[StepRecord]) -> None:
        """Adds these steps; one that was done again replaces nothing."""

    @abstractmethod
    def end(self, state: State) -> None:
        """Marks the run as ended."""

    def _has_module(self) -> bool:
        """Imports the package, once."""
        if self._module is None and not self._is_broken:
            try:
                self._module = import_module(self.package)
            except Exception as error:  # noqa: BLE001 -- a package raises what it wants
                self._is_broken = True
                self._warn(
                    f"{self.name} does not get this job's steps: its package fails: "
                    f"{type(error).__name__}: {first_line(error)}"
                )
        return not self._is_broken

    def _config(self) -> dict[str, Any]:
        """The job file without secrets."""
        config: dict[str, Any] = redact_document(to_document(self._plan.spec))
        return config


class WandbRun(Tracker):
    """A run in Weights & Biases, by its id."""

    name = "W&B"
    package = "wandb"
    _run: Any = None

    def log(self, records: Sequence[StepRecord]) -> None:
        run = self._open()
        for record in records:
            # Not W&B's own step, which must not go back: that of steps that are done again does.
            run.log({"step": record.step, **scalars_of(record)})

    def end(self, state: State) -> None:
        exit_code = int(state is State.FAILED)
        self._open().finish(exit_code=exit_code)
        self._module.teardown(exit_code=exit_code)  # its service process

    def _open(self) -> Any:
        if self._run is None:
            self._run = self._module.init(
                project=self._settings.project,
                entity=self._settings.entity,
                group=self._plan.spec.name,
                name=self._plan.spec.name,
                id=self._key,
                resume="allow",
                mode=self._settings.mode,
                dir=str(self._plan.output_dir),
                config=self._config(),
                settings=self._module.Settings(console="off", silent=True),
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        return self._run


class MlflowRun(Tracker):
    """A run in MLflow; the key is a tag of the run."""

    name = "MLflow"
    package = "mlflow"
    _client: Any = None
    _run_id = ""

    def log(self, records: Sequence[StepRecord]) -> None:
        self._open()
        metric = self._module.entities.Metric
        metrics = [
            metric(_MLFLOW_INVALID.sub("_", name), value, int(record.at_s * 1000), record.step)
            for record in records
            for name, value in scalars_of(record).items()
            if isfinite(value)  # its stores differ in what they make of others
        ]
        for start in range(0, len(metrics), MAX_MLFLOW_BATCH):
            batch = metrics[start : start + MAX_MLFLOW_BATCH]
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)

    def end(self, state: State) -> None:
        self._open()
        self._client.set_terminated(self._run_id, _MLFLOW_STATUS.get(state, "FAILED"))

    def _open(self) -> None:
        if self._run_id:
            return
        self._client = client = self._module.MlflowClient(self._settings.tracking_uri)
        name = self._settings.experiment
        experiment = client.get_experiment_by_name(name)
        folder = client.create_experiment(name) if experiment is None else experiment.experiment_id
        earlier = client.search_runs([folder], f"tags.`rayzero.run` = '{self._key}'")
        if earlier:
            self._run_id = earlier[0].info.run_id
            client.update_run(self._run_id, "RUNNING")
            return
        tags = {"rayzero.run": self._key, "rayzero.job": self._plan.spec.name}
        run_id = client.create_run(folder, tags=tags, run_name=self._plan.spec.name).info.run_id
        param = self._module.entities.Param
        params = [
            param(_MLFLOW_INVALID.sub("_", key), str(value)[:_MAX_PARAM_CHARACTERS])
            for key, value in _flatten(self._config())
        ]
        client.log_batch(run_id, params=params[:100])
        self._run_id = run_id


class Trackers:
    """The trackers of the job file. Owns their thread, from `subscribe_to` to `close`. Raises
    ConfigError if a package is not installed here.

    Args:
        began_s: Unix time of the run's first journal entry, the same after an adoption.
        warn: called in the trackers' thread.
    """

    def __init__(self, plan: JobPlan, began_s: float, warn: Callable[[str], None]) -> None:
        metrics, key = plan.spec.metrics, f"{plan.spec.name}-{int(began_s)}"
        kinds = {WandbRun: metrics.wandb, MlflowRun: metrics.mlflow}
        runs = [kind(it, plan, key, warn) for kind, it in kinds.items() if it is not None]
        for run in runs:
            if not is_installed(run.package):
                raise ConfigError(
                    f"metrics.{run.package}: the package {run.package} is not installed on the "
                    "cluster's head node",
                    allowed=f"a head node with {run.package}, where the job's controller runs",
                    fix=f"pip install {run.package} there, or remove metrics.{run.package}",
                )
        self._warn = warn
        self._writer = BackgroundWriter(warn)
        self._queues = [
            self._writer.add_queue(f"the job's run in {run.name}", run.write, FLUSH_INTERVAL_S)
            for run in runs
        ]

    def subscribe_to(self, events: EventBus) -> None:
        if self._queues:
            events.subscribe(self._on_event, (StepRecord, StateEntered))

    def close(self) -> None:
        """Waits, `END_LIMIT_S` at most, until the trackers have everything."""
        if any(queue.failures for queue in self._queues):
            self._warn(f"waiting up to {END_LIMIT_S:g} s for a tracker to take the last values")
        if not self._writer.close(END_LIMIT_S):
            self._warn(f"the last values did not reach a tracker within {END_LIMIT_S:g} s")

    def _on_event(self, event: StepRecord | StateEntered) -> None:
        if isinstance(event, StateEntered) and not event.state.is_final:
            return
        for queue in self._queues:
            queue.put(event)


def _flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, value) of what is set."""
    pairs: list[tuple[str, Any]] = []
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            pairs += _flatten(inner, f"{prefix}{key}.")
        elif inner not in (None, [], ""):
            pairs.append((f"{prefix}{key}", inner))
    return pairs
