"""Job, submit.

The Python job API: describe a job, run it, wait for it, stop it.

From a plan to the process that runs it: a new one, or the one that runs the same job already.
"""

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
from rayzero.orchestrator.job import client as reach
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
"""How long a running job may take to answer."""


EXIT_TIMEOUT_S = 60.0
"""How long the process of a job that has ended may take to be gone."""


_RETRY_INTERVAL_S = 0.05


def start_or_attach(plan: JobPlan, can_grow: bool) -> Any:
    """The job's process: of the run that there is, if it is of the same spec, else a new one.

    Raises:
        ConfigError: a job of that name runs, and is another.
        JobFailedError: it does not answer.
    """
    name = plan.spec.name
    until_s = time.monotonic() + EXIT_TIMEOUT_S
    while time.monotonic() < until_s:
        actor = reach.find_job_actor(name)
        try:
            if actor is None:
                return reach.start_job_actor(plan, can_grow)
            running = reach.call(actor, "spec", timeout_s=SUBMIT_REPLY_TIMEOUT_S)
            if running is not None:
                _attach_to_running(actor, running, plan.spec)
                return actor
            reach.call(actor, "acknowledge_end", timeout_s=SUBMIT_REPLY_TIMEOUT_S)
        except ValueError:
            pass  # somebody else was faster: then it is found
        except reach.JobProcessLostError:
            pass  # it was on its way out
        except reach.JobUnavailableError as away:
            raise JobFailedError(f"job {name!r} is running and silent: {away.seen}") from None
        time.sleep(_RETRY_INTERVAL_S)
    raise JobFailedError(f"the last run of job {name!r} does not go away", fix="another name")


def _attach_to_running(actor: Any, running: JobSpec, wanted: JobSpec) -> None:
    found = diff_documents(to_document(running), to_document(wanted))
    if other := not_covered_by(found, LIVE_KEYS):
        raise ConfigError(
            f"a job called {wanted.name!r} is running, and is not the same:\n{_format_diffs(other)}",
            allowed="the same job, which is then followed; workers.min and max may differ",
            fix=f"`rayzero stop {wanted.name}`, or another name",
        )
    if found:
        reach.call(
            actor,
            "execute",
            ScaleWorkers(wanted.workers.min, wanted.workers.most),
            timeout_s=SUBMIT_REPLY_TIMEOUT_S,
        )


def _format_diffs(found: list[SpecDiff]) -> str:
    return "\n".join(f"    {one}" for one in found)


__all__ = ["Job", "JobHandle", "JobResult", "Workers"]

EntryPoint: TypeAlias = str | Callable[[Any], Any]


class Job:
    """A job to run.

    Args:
        name: letters, digits, '.', '_' and '-'.
        entrypoint: `module:function`, or a function of one argument, ctx.
        engine: a DeepSpeed config file, relative to the working directory, or the same as a dict.
        workers: how many, and what each needs.
        args: handed to the function as ctx.args.
        steps: optimizer steps, as ctx.steps.
        settings: any other key of the job file: seed, checkpoint, recovery.

    Raises:
        ConfigError: a value is wrong.
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
        given = {
            "name": name,
            "entrypoint": _entrypoint_name(entrypoint),
            "engine": str(engine) if isinstance(engine, Path) else engine,
            "workers": workers,
            "args": args,
            "steps": steps,
            **settings,
        }
        document = {key: value for key, value in given.items() if value is not None}
        self.spec = resolve_engine_config(validate_document(JobSpec, document, "job"), Path())

    @classmethod
    def from_spec(cls, spec: JobSpec) -> Job:
        """A job from a checked spec, as `loading.load_job` returns it."""
        job = cls.__new__(cls)
        job._function, job.spec = None, spec
        return job

    def submit(self, address: str | None = None, observer: JobObserver | None = None) -> JobHandle:
        """Starts the job in a process of its own on the cluster's head. It goes on when this
        process ends, unless the cluster is one of our own, which ends with it.

        Args:
            address: of a Ray cluster; by default RAY_ADDRESS, or else a cluster of our own.
            observer: is told about states, steps and log lines, in a thread of this process.

        Raises:
            ConfigError: there is no such cluster, the output folder cannot be made, or another job
                of that name is running.
            JobFailedError: a cluster of our own could not be started, or the job of that name that
                is running does not answer.
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
        """A handle on a job that runs, submitted by whomever; or on how it ended, for as long as
        its cluster knows (`status`, `result`, `logs`).

        Args:
            address: of its Ray cluster; by default RAY_ADDRESS, or every cluster whose head runs on
                this machine.
            observer: is told its newest state and step, and what comes.

        Raises:
            ConfigError: no job of that name is known there.
            JobFailedError: it does not answer.
        """
        found = find_any(name, address)
        if isinstance(found, EndedJobRecord):
            return JobHandle.from_record(found)
        observer, grace_period_s = observer or NullObserver(), _grace_period_s(found.spec)
        return JobHandle(name, found.actor, found.cluster, observer, LATEST, grace_period_s)

    def run(self, address: str | None = None, observer: JobObserver | None = None) -> JobResult:
        """Runs the job and waits for its end. An exception here, Ctrl-C too, stops the job.

        Args:
            address: as for `submit`.
            observer: as for `submit`; by default what `rayzero run` shows goes to stdout.

        Raises:
            JobFailedError, ConfigError: the job failed, and why.
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


def _grace_period_s(spec: JobSpec) -> float:
    return spec.checkpoint.grace_period_s if spec.checkpoint.every_steps is not None else 0.0


def _entrypoint_name(entrypoint: EntryPoint) -> str:
    if isinstance(entrypoint, str):
        return entrypoint
    name = getattr(entrypoint, "__qualname__", type(entrypoint).__qualname__)
    return f"{getattr(entrypoint, '__module__', '__main__')}:{name}"
