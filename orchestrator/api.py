"""The Python job API: describe a job, run it, wait for it, stop it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ray import cloudpickle

from rayzero.engine.validation import validated
from rayzero.orchestrator.cli.console import watching
from rayzero.orchestrator.cluster import connect
from rayzero.orchestrator.finding import look
from rayzero.orchestrator.handle import JobHandle
from rayzero.orchestrator.head.feed import FROM_NOW
from rayzero.orchestrator.head.records import Record
from rayzero.orchestrator.loading import check
from rayzero.orchestrator.notices import Observer, Unwatched
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.result import JobResult
from rayzero.orchestrator.spec import JobSpec, Workers
from rayzero.orchestrator.submitting import begin

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
            "entrypoint": _named(entrypoint),
            "engine": str(engine) if isinstance(engine, Path) else engine,
            "workers": workers,
            "args": args,
            "steps": steps,
            **settings,
        }
        document = {key: value for key, value in given.items() if value is not None}
        self.spec = check(validated(JobSpec, document, "job"), Path())

    @classmethod
    def from_spec(cls, spec: JobSpec) -> Job:
        """A job from a checked spec, as `loading.load_job` returns it."""
        job = cls.__new__(cls)
        job._function, job.spec = None, spec
        return job

    def submit(self, address: str | None = None, observer: Observer | None = None) -> JobHandle:
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
        plan = self._plan()
        cluster = connect(address)
        try:
            actor = begin(plan, cluster.can_grow)
        except BaseException:
            cluster.close()
            raise
        return JobHandle(
            self.spec.name, actor, cluster, observer or Unwatched(), notice_s=_notice_s(self.spec)
        )

    @classmethod
    def attach(
        cls, name: str, address: str | None = None, observer: Observer | None = None
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
        found = look(name, address)
        if isinstance(found, Record):
            return JobHandle.of_ended(found)
        observer, notice_s = observer or Unwatched(), _notice_s(found.spec)
        return JobHandle(name, found.actor, found.cluster, observer, FROM_NOW, notice_s)

    def run(self, address: str | None = None, observer: Observer | None = None) -> JobResult:
        """Runs the job and waits for its end. An exception here, Ctrl-C too, stops the job.

        Args:
            address: as for `submit`.
            observer: as for `submit`; by default what `rayzero run` shows goes to stdout.

        Raises:
            JobFailedError, ConfigError: the job failed, and why.
        """
        if observer is not None:
            return self._watched(address, observer)
        with watching(sys.stdout) as console:
            console.expect(self.spec.name, self.spec.steps)
            result = self._watched(address, console)
            console.succeeded(result)
            return result

    def _watched(self, address: str | None, observer: Observer) -> JobResult:
        handle = self.submit(address, observer)
        try:
            return handle.result()
        finally:
            handle.end()

    def _plan(self) -> JobPlan:
        if self._function is None:
            return make_plan(self.spec, self.spec.entrypoint)
        return make_plan(self.spec, cloudpickle.dumps(self._function), tuple(sys.path))  # type: ignore[no-untyped-call]


def _notice_s(spec: JobSpec) -> float:
    return spec.checkpoint.notice_s if spec.checkpoint.every_steps is not None else 0.0


def _named(entrypoint: EntryPoint) -> str:
    if isinstance(entrypoint, str):
        return entrypoint
    name = getattr(entrypoint, "__qualname__", type(entrypoint).__qualname__)
    return f"{getattr(entrypoint, '__module__', '__main__')}:{name}"
