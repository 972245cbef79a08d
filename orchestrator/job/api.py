"""The Python job API: describe a job, submit it, attach to it, run it to its end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias, cast

import ray
from ray import cloudpickle
from ray.util import inspect_serializability

from rayzero.engine.errors import ConfigError, first_line
from rayzero.engine.validation import validate_document
from rayzero.orchestrator import job_file
from rayzero.orchestrator.cluster.addresses import head_address
from rayzero.orchestrator.cluster.connect import ClusterConnection, await_lost_head, connect
from rayzero.orchestrator.cluster.local_cluster import LocalCluster
from rayzero.orchestrator.console import open_console
from rayzero.orchestrator.errors import (
    JobFailedError,
    JobInterrupted,
    JobStoppedError,
    short_traceback,
)
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job.client import JobProcess, JobProcessLostError, JobUnavailableError
from rayzero.orchestrator.job.entrypoint_check import check_early, check_entrypoint
from rayzero.orchestrator.job.handle import JobHandle, head_limit_s
from rayzero.orchestrator.job.lookup import find_any
from rayzero.orchestrator.job.recorder import LATEST
from rayzero.orchestrator.job.source_hash import hash_source
from rayzero.orchestrator.job.stop_signals import StopSignals, wait_stoppable
from rayzero.orchestrator.job_events import JobObserver, NullObserver
from rayzero.orchestrator.plan import JobPlan, forked_worker_env, make_plan
from rayzero.orchestrator.results import EndedJob, JobResult
from rayzero.orchestrator.spec import JobSpec, RecoverySpec, Rollouts, Workers, with_resume
from rayzero.workers.entrypoint import check_function

EXIT_TIMEOUT_S = 60.0  # limit for the exit of the process of a job that has ended
_RETRY_INTERVAL_S = 0.05

__all__ = ["Job", "JobHandle", "JobResult", "Role", "Rollouts", "Workers"]

EntryPoint: TypeAlias = str | Callable[[Any], Any]


@dataclass(frozen=True)
class Role:
    """Workers of a job that are not ranks and run a function of their own, such as generators,
    reward models or servers. A worker that is lost is restarted without affecting the others.

    Args:
        entrypoint: `module:function`, or a function of one argument, `RoleContext`.
        workers: number and resources of the workers.
        args: available to the function as ctx.args.
        recovery: as in `roles:` of a job file.
        takes: source of the role's tasks: "prompts", or the name of another role; see
            `RoleContext.tasks`.
    """

    entrypoint: EntryPoint
    workers: Workers | dict[str, Any] | None = None
    args: dict[str, Any] | None = None
    recovery: dict[str, Any] | None = None
    takes: str | None = None

    def document(self) -> dict[str, Any]:
        """Returns the role as in a job file, with the name of its function."""
        if not isinstance(self.entrypoint, str):
            check_function(self.entrypoint)
        values = {**vars(self), "entrypoint": _entrypoint_name(self.entrypoint)}
        return {key: value for key, value in values.items() if value is not None}


class Job:
    """A job to run.

    Args:
        name: letters, digits, '.', '_' and '-'.
        entrypoint: `module:function`, or a function of one argument, ctx.
        engine: a DeepSpeed config: a file relative to the working directory, or a dict.
        workers: number and resources of the workers.
        args: available to the function as ctx.args.
        steps: optimizer steps, available as ctx.steps.
        roles: other workers of the job, by the name of their role.
        restart: starts from scratch, and moves the files of the last run of this name to NAME.1, or
            the next free number (checkpoint.resume: scratch).
        settings: any other key of the job file, such as seed, checkpoint, recovery.

    Raises:
        ConfigError: a value is invalid.
    """

    @short_traceback
    def __init__(
        self,
        name: str,
        entrypoint: EntryPoint,
        engine: str | Path | dict[str, Any] | None = None,
        workers: Workers | dict[str, Any] | None = None,
        args: dict[str, Any] | None = None,
        steps: int | None = None,
        roles: dict[str, Role] | None = None,
        restart: bool = False,
        **settings: Any,
    ) -> None:
        self._function = None if isinstance(entrypoint, str) else entrypoint
        self._role_functions = {
            name: role.entrypoint
            for name, role in (roles or {}).items()
            if not isinstance(role.entrypoint, str)
        }
        if not isinstance(entrypoint, str):
            check_function(entrypoint)
        settings = {
            "name": name,
            "entrypoint": _entrypoint_name(entrypoint),
            "engine": str(engine) if isinstance(engine, Path) else engine,
            "workers": workers,
            "args": args,
            "steps": steps,
            "roles": {name: role.document() for name, role in (roles or {}).items()},
            **settings,
        }
        document = {key: value for key, value in settings.items() if value is not None}
        spec = validate_document(JobSpec, document, "job")
        spec = with_resume(spec, "scratch") if restart else spec
        self.spec = job_file.resolve_engine_config(spec, Path())

    @classmethod
    def from_spec(cls, spec: JobSpec) -> Job:
        """Returns a job with a validated spec, as `job_file` loads it."""
        job = cls.__new__(cls)
        job._function = None
        job._role_functions = {}
        job.spec = spec
        return job

    def __repr__(self) -> str:
        workers, steps = self.spec.workers, self.spec.steps
        limits = (
            f"{workers.min}" if workers.most == workers.min else f"{workers.min}:{workers.most}"
        )
        launch = self.spec.launch
        code = self.spec.entrypoint if launch is None else (launch.script or launch.module)
        of_steps = "" if steps is None else f", {steps} steps"
        return f"<Job {self.spec.name!r}: {code}, workers {limits}{of_steps}>"

    @short_traceback
    def submit(self, address: str | None = None, observer: JobObserver | None = None) -> JobHandle:
        """Starts the job in a process of its own on the head node. The job continues when this
        process ends, except in a local cluster, which ends with this process.

        Args:
            address: address of a Ray cluster. The default is RAY_ADDRESS, or else a new local
                cluster.
            observer: gets the job's events, in a thread of this process.

        Raises:
            ConfigError: there is no such cluster, the output folder cannot be created, or a
                different job of that name is running.
            JobFailedError: the local cluster could not be started, or the running job of that name
                does not answer.
        """
        return self.submit_with(None, address, observer or NullObserver())

    def submit_with(
        self, local: LocalCluster | None, address: str | None, observer: JobObserver
    ) -> JobHandle:
        """Submits as `submit` does.

        Args:
            local: the local cluster to start if there is no address; by default a new one.
        """
        plan = self._make_plan()
        is_local = _starts_cluster(address)
        folder = plan.worker_spec.working_dir
        if is_local:
            check_early(self.spec, folder, has_function=self._function is not None)
        elif self._function is None:
            check_entrypoint(self.spec.entrypoint, folder, only_here=False)
        if is_local and local is None:
            local = LocalCluster(forked_worker_env(self.spec))
        if not is_local:
            await_lost_head(head_limit_s(self.spec))
        return self._start(plan, connect(address, local), observer)

    def submit_to(self, cluster: ClusterConnection, observer: JobObserver) -> JobHandle:
        """Submits as `submit` does, to a cluster to which this process is connected."""
        return self._start(self._make_plan(), cluster, observer)

    def _start(self, plan: JobPlan, cluster: ClusterConnection, observer: JobObserver) -> JobHandle:
        try:
            process = start_or_attach(plan, cluster.can_grow)
        except BaseException:
            cluster.close()
            raise
        return JobHandle(process, cluster, observer, 0, self.spec)

    @classmethod
    @short_traceback
    def attach(
        cls, name: str, address: str | None = None, observer: JobObserver | None = None
    ) -> JobHandle:
        """Returns a handle on a running job. For a job that has ended, the handle offers `status`,
        `result` and `logs`, as long as the cluster keeps the record of the end.

        Args:
            address: address of the job's Ray cluster. The default is RAY_ADDRESS, or else every
                cluster whose head node is this machine.
            observer: gets the newest state and step, and then all later events.

        Raises:
            ConfigError: no cluster has a job of that name.
            JobFailedError: the job does not answer.
        """
        await_lost_head(RecoverySpec().orphan_s)  # the job's own can only be known afterwards
        job = find_any(name, address)
        if isinstance(job, EndedJob):
            return JobHandle.of_ended(job)
        return JobHandle(job.process, job.cluster, observer or NullObserver(), LATEST, job.spec)

    @short_traceback
    def run(self, address: str | None = None, observer: JobObserver | None = None) -> JobResult:
        """Runs the job and waits for its end. The first Ctrl-C stops the job, with a last
        checkpoint, and waits for that. The second one kills a local cluster; on any other cluster
        the job completes the stop by itself. Another exception in this process stops the job, too.

        Args:
            address: as for `submit`.
            observer: as for `submit`; by default a console like that of `rayzero run` on stdout.

        Raises:
            JobFailedError, ConfigError: the job failed.
            JobStoppedError: the job was stopped, but not by Ctrl-C.
            KeyboardInterrupt: the job was stopped by Ctrl-C.
        """
        with StopSignals.of_caller() as signals:
            if observer is not None:
                return self._run(address, observer, signals)
            with open_console(sys.stdout) as console:
                console.start(self.spec.name, self.spec.steps)
                if _starts_cluster(address):
                    console.await_next("starting Ray on this machine")
                elif not ray.is_initialized() and (named := head_address(address)).is_named:
                    console.await_next(f"connecting to the Ray cluster at {named.shown}")
                result = self._run(address, console, signals)
                console.finish_ok(result)
                return result

    def _run(self, address: str | None, observer: JobObserver, signals: StopSignals) -> JobResult:
        handle = self.submit(address, observer)
        try:
            signals.on_second = handle.abandon
            signals.graceful()
            wait_stoppable(handle, signals, observer)
            return handle.result()
        except JobStoppedError as stopped:
            if signals.first is None:
                raise
            raise JobInterrupted(str(stopped)) from None
        except KeyboardInterrupt:
            if signals.first is not None:  # this is the second Ctrl-C
                handle.close()
                text = f"job {self.spec.name!r}: a second Ctrl-C {handle.on_hard_exit}"
                raise JobInterrupted(text) from None
            handle.end()
            raise
        except BaseException:
            handle.end()
            raise

    def _make_plan(self) -> JobPlan:
        source = hash_source(self.spec, os.getcwd(), self._function)
        functions = {name: _pickle(function) for name, function in self._role_functions.items()}
        entrypoint = self.spec.entrypoint if self._function is None else _pickle(self._function)
        by_value = self._function is not None or bool(functions)
        paths = tuple(sys.path) if by_value else ()
        return make_plan(self.spec, entrypoint, paths, source, functions)


def start_or_attach(plan: JobPlan, can_grow: bool) -> JobProcess:
    """Returns the process of a running job with the same spec, or else starts one. Raises
    ConfigError if a different job of that name is running; JobFailedError if the job of that name
    does not answer."""
    name = plan.spec.name
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            if (process := JobProcess.find(name)) is None:
                return JobProcess.start(plan, can_grow)
            if (running := process.call(JobActor.spec)) is not None:
                _attach_to_running(process, running, plan.spec)
                return process
            process.call(JobActor.acknowledge_end)
        except ConfigError:
            raise
        except (ValueError, JobProcessLostError):
            pass  # another client has just started the job, or its last process has just exited
        except JobUnavailableError as unavailable:
            raise JobFailedError(f"a job called {name!r} is running: {unavailable.seen}") from None
        time.sleep(_RETRY_INTERVAL_S)
    raise JobFailedError(
        f"the process of the last run of job {name!r} did not exit within {EXIT_TIMEOUT_S:g} s",
        fix="choose another name",
    )


def _attach_to_running(process: JobProcess, running: JobSpec, spec: JobSpec) -> None:
    old, new = job_file.to_document(running), job_file.to_document(spec)
    diffs = job_file.diff_documents(old, new)
    if other := job_file.not_covered_by(diffs, job_file.LIVE_KEYS):
        lines = "\n".join(f"    {line}" for line in other)
        raise ConfigError(
            f"a different job called {spec.name!r} is running:\n{lines}",
            allowed="the same job, to attach to it; workers.min and workers.max may differ",
            fix=f"run `rayzero stop {spec.name}`, or choose another name",
        )
    if diffs:
        process.call(JobActor.scale, spec.workers.min, spec.workers.most)


def _starts_cluster(address: str | None) -> bool:
    return not ray.is_initialized() and head_address(address).text in ("", "local")


def _pickle(function: Callable[[Any], Any]) -> bytes:
    """Pickles a function, by value if the workers cannot import it. Raises a ConfigError that names
    what cannot be pickled."""
    try:
        return cast(bytes, cloudpickle.dumps(function))  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001  # also of the user's __reduce__
        name = _entrypoint_name(function)
        failures: Any  # older versions of Ray have other attributes
        _, failures = inspect_serializability(function, name, print_file=StringIO())
        paths = [
            failure.path if hasattr(failure, "path") else (name, failure.name)
            for failure in failures
        ]
        used = sorted({".".join(map(str, path[1:3])) for path in paths if len(path) > 1})
        what = f"uses {' and '.join(used)}, which" if used else "which"
        raise ConfigError(
            f"the training function {name} {what} cannot be sent to the workers: "
            f"{first_line(error)}",
            allowed="a function over what pickle can copy: no lock, open file, connection or "
            "generator",
            fix="make it inside the function; or name a function of a module, "
            "entrypoint='module:function'",
        ) from None


def _entrypoint_name(entrypoint: EntryPoint) -> str:
    if isinstance(entrypoint, str):
        return entrypoint
    name = getattr(entrypoint, "__qualname__", type(entrypoint).__qualname__)
    return f"{getattr(entrypoint, '__module__', '__main__')}:{name}"
