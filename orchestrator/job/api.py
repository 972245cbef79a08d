"""The Python job API: describe a job, submit it, attach to it, run it to its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ray import cloudpickle

from rayzero.engine.errors import ConfigError
from rayzero.engine.validation import validate_document
from rayzero.orchestrator.cluster.connect import connect
from rayzero.orchestrator.console import open_console
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.interfaces import ScaleWorkers
from rayzero.orchestrator.job import client
from rayzero.orchestrator.job.ended_jobs import EndedJobRecord
from rayzero.orchestrator.job.handle import JobHandle
from rayzero.orchestrator.job.lookup import find_any
from rayzero.orchestrator.job.recorder import LATEST
from rayzero.orchestrator.job_events import JobObserver, NullObserver
from rayzero.orchestrator.job_file import (
    LIVE_KEYS,
    SpecDiff,
    diff_documents,
    not_covered_by,
    resolve_engine_config,
    to_document,
)
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.results import JobResult
from rayzero.orchestrator.spec import JobSpec, Workers

SUBMIT_REPLY_TIMEOUT_S = 15.0
"""Limit for a reply of a running job."""


EXIT_TIMEOUT_S = 60.0
"""Limit for the exit of the process of a job that has ended."""


_RETRY_INTERVAL_S = 0.05


__all__ = ["Job", "JobHandle", "JobResult", "Workers"]

EntryPoint: TypeAlias = str | Callable[[Any], Any]


class Job:
    """A job to run.

    Args:
        name: letters, digits, '.', '_' and '-'.
        entrypoint: `module:function`, or a function of one argument, ctx.
        engine: a DeepSpeed config: a file relative to the working directory, or a dict.
        workers: number and resources of the workers.
        args: available to the function as ctx.args.
        steps: optimizer steps, available as ctx.steps.
        settings: any other key of the job file, such as seed, checkpoint, recovery.

    Raises:
        ConfigError: a value is invalid.
    """

    def __init__(
        self,
        name: str,
        entrypoint: EntryPoint,
        engine: str | Path | dict[str, Any] | None = None,
        workers: Workers | dict[str, Any] | None = None,
        args: dict[str, Any] | None = None,
        steps: int | None = None,
        **settings: Any,
    ) -> None:
        self._function = None if isinstance(entrypoint, str) else entrypoint
        settings = {
            "name": name,
            "entrypoint": _entrypoint_name(entrypoint),
            "engine": str(engine) if isinstance(engine, Path) else engine,
            "workers": workers,
            "args": args,
            "steps": steps,
            **settings,
        }
        document = {key: value for key, value in settings.items() if value is not None}
        self.spec = resolve_engine_config(validate_document(JobSpec, document, "job"), Path())

    @classmethod
    def from_spec(cls, spec: JobSpec) -> Job:
        """A job from a validated spec, as `job_file` loads it."""
        job = cls.__new__(cls)
        job._function, job.spec = None, spec
        return job

    def submit(self, address: str | None = None, observer: JobObserver | None = None) -> JobHandle:
        """Starts the job in a process of its own on the head node. The job continues when this
        process ends, except in a local cluster, which ends with this process.

        Args:
            address: of a Ray cluster; by default RAY_ADDRESS, or else a new local cluster.
            observer: gets the job's events, in a thread of this process.

        Raises:
            ConfigError: there is no such cluster, the output folder cannot be created, or a
                different job of that name is running.
            JobFailedError: the local cluster could not be started, or the running job of that name
                does not answer.
        """
        plan = self._make_plan()
        cluster = connect(address)
        try:
            actor = start_or_attach(plan, cluster.can_grow)
        except BaseException:
            cluster.close()
            raise
        return JobHandle(
            self.spec.name,
            actor,
            cluster,
            observer or NullObserver(),
            grace_period_s=_grace_period_s(self.spec),
        )

    @classmethod
    def attach(
        cls, name: str, address: str | None = None, observer: JobObserver | None = None
    ) -> JobHandle:
        """A handle on a running job, or on one that has ended, as long as its cluster has the
        record of the end (`status`, `result`, `logs`).

        Args:
            address: of its Ray cluster; by default RAY_ADDRESS, or every cluster whose head node
                is this machine.
            observer: gets the newest state and step, and then the events to come.

        Raises:
            ConfigError: no cluster has a job of that name.
            JobFailedError: the job does not answer.
        """
        job = find_any(name, address)
        if isinstance(job, EndedJobRecord):
            return JobHandle.from_record(job)
        observer, grace_period_s = observer or NullObserver(), _grace_period_s(job.spec)
        return JobHandle(name, job.actor, job.cluster, observer, LATEST, grace_period_s)

    def run(self, address: str | None = None, observer: JobObserver | None = None) -> JobResult:
        """Runs the job and waits for its end. An exception in this process, such as Ctrl-C, stops
        the job.

        Args:
            address: as for `submit`.
            observer: as for `submit`; by default a console like that of `rayzero run` on stdout.

        Raises:
            JobFailedError, ConfigError: the job failed.
        """
        if observer is not None:
            return self._run_with_observer(address, observer)
        with open_console(sys.stdout) as console:
            console.start(self.spec.name, self.spec.steps)
            result = self._run_with_observer(address, console)
            console.finish_ok(result)
            return result

    def _run_with_observer(self, address: str | None, observer: JobObserver) -> JobResult:
        handle = self.submit(address, observer)
        try:
            return handle.result()
        finally:
            handle.end()

    def _make_plan(self) -> JobPlan:
        if self._function is None:
            return make_plan(self.spec, self.spec.entrypoint)
        return make_plan(self.spec, cloudpickle.dumps(self._function), tuple(sys.path))  # type: ignore[no-untyped-call]


def start_or_attach(plan: JobPlan, can_grow: bool) -> Any:
    """The job's actor: that of a running job with the same spec, or else a new one.

    Raises:
        ConfigError: a different job of that name is running.
        JobFailedError: the job of that name does not answer.
    """
    name = plan.spec.name
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while time.monotonic() < deadline_s:
        actor = client.find_job_actor(name)
        try:
            if actor is None:
                return client.start_job_actor(plan, can_grow)
            running = client.call(actor, "spec", timeout_s=SUBMIT_REPLY_TIMEOUT_S)
            if running is not None:
                _attach_to_running(actor, running, plan.spec)
                return actor
            client.call(actor, "acknowledge_end", timeout_s=SUBMIT_REPLY_TIMEOUT_S)
        except ValueError:
            pass  # another client has started it: attach to that
        except client.JobProcessLostError:
            pass  # the last run has just exited
        except client.JobUnavailableError as away:
            raise JobFailedError(
                f"job {name!r} is running and does not answer: {away.seen}"
            ) from None
        time.sleep(_RETRY_INTERVAL_S)
    raise JobFailedError(
        f"the process of the last run of job {name!r} did not exit within {EXIT_TIMEOUT_S:g} s",
        fix="another name",
    )


def _attach_to_running(actor: Any, running: JobSpec, spec: JobSpec) -> None:
    diffs = diff_documents(to_document(running), to_document(spec))
    if other := not_covered_by(diffs, LIVE_KEYS):
        raise ConfigError(
            f"a different job called {spec.name!r} is running:\n{_format_diffs(other)}",
            allowed="the same job, to attach to it; workers.min and workers.max may differ",
            fix=f"`rayzero stop {spec.name}`, or another name",
        )
    if diffs:
        client.call(
            actor,
            "execute",
            ScaleWorkers(spec.workers.min, spec.workers.most),
            timeout_s=SUBMIT_REPLY_TIMEOUT_S,
        )


def _format_diffs(diffs: list[SpecDiff]) -> str:
    return "\n".join(f"    {diff}" for diff in diffs)


def _grace_period_s(spec: JobSpec) -> float:
    return spec.checkpoint.grace_period_s if spec.checkpoint.every_steps is not None else 0.0


def _entrypoint_name(entrypoint: EntryPoint) -> str:
    if isinstance(entrypoint, str):
        return entrypoint
    name = getattr(entrypoint, "__qualname__", type(entrypoint).__qualname__)
    return f"{getattr(entrypoint, '__module__', '__main__')}:{name}"
