"""The Python job API: describe a job, run it, wait for it, stop it."""

from __future__ import annotations

import asyncio
import atexit
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeAlias

import ray
from ray import cloudpickle

from rayzero.engine.errors import RayzeroError
from rayzero.engine.validation import validated
from rayzero.orchestrator import events as ev
from rayzero.orchestrator.bounds import bounds
from rayzero.orchestrator.cli.console import watching
from rayzero.orchestrator.clock import Clock, SystemClock
from rayzero.orchestrator.cluster import Cluster, connect
from rayzero.orchestrator.control.desk import Ports
from rayzero.orchestrator.controller import Controller
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.loading import check
from rayzero.orchestrator.mailbox import Mailbox, serve
from rayzero.orchestrator.metrics.telemetry import Telemetry
from rayzero.orchestrator.notices import Observer, Unwatched, Warned
from rayzero.orchestrator.plan import JobPlan, make_plan
from rayzero.orchestrator.records import here
from rayzero.orchestrator.result import JobResult
from rayzero.orchestrator.spec import JobSpec, Workers
from rayzero.orchestrator.stored_archive import StoredArchive
from rayzero.orchestrator.vault_group import RayVaultGroup
from rayzero.orchestrator.wishes import Inject, Scale, Wish
from rayzero.orchestrator.worker_group import RayWorkerGroup

__all__ = ["Job", "JobHandle", "JobResult", "Workers"]

EntryPoint: TypeAlias = str | Callable[[Any], Any]

STOP_S = 10.0
"""How long a stopped job may take to be gone, without its last checkpoint."""
WISH_S = 10.0
"""How long a running job may take to answer a wish."""


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
        """Starts the job in the background of this process; it ends with this process.

        Args:
            address: of a Ray cluster; by default RAY_ADDRESS, or else a cluster of our own.
            observer: is told about states, steps and log lines, in the controller's thread.

        Raises:
            ConfigError: there is no such cluster, or the output folder cannot be made.
        """
        plan = self._plan()
        return JobHandle(plan, connect(address), observer or Unwatched())

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


class JobHandle:
    """A running job. Owns the controller's thread, and the connection to the cluster."""

    def __init__(self, plan: JobPlan, cluster: Cluster, observer: Observer) -> None:
        self._plan = plan
        self._cluster = cluster
        self._observer = observer
        self._controller: Controller | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_wanted = Event()
        self._result: JobResult | None = None
        self._error: RayzeroError | None = None
        self._thread = Thread(target=self._run, name="rayzero-controller", daemon=True)
        atexit.register(self.end)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the job's end; whether it came in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> JobResult:
        """Waits for the job's end and returns its result.

        Raises:
            JobFailedError, ConfigError: the job failed, and why.
            JobStoppedError: it was stopped.
        """
        self.wait()
        if self._result is None:
            raise self._error or JobFailedError("the controller ended without a result")
        return self._result

    def stop(self) -> None:
        """Asks the job to end. Returns at once; may be called from a signal handler, and twice."""
        self._stop_wanted.set()
        if self._controller is not None and self._loop is not None:
            with suppress(RuntimeError):  # its loop is closed: the job has ended
                self._loop.call_soon_threadsafe(self._controller.feed, ev.StopWanted())

    def scale(self, workers: int | tuple[int, int] | str) -> str:
        """Changes how many workers the job may have, at its next step boundary.

        Args:
            workers: how many, or the least and the most: 4, (2, 4), "2:4".

        Returns:
            What comes of it, in words.

        Raises:
            ConfigError: the job cannot have so many.
            JobFailedError: the job has ended, or does not answer.
        """
        return self._wish(Scale(*bounds(workers)))

    def inject(self, *faults: str) -> str:
        """Makes something break in the running job, such as `kill(rank=1)`.

        Args:
            faults: in the fault language; a step that is left out is the one at work.

        Returns:
            What was scheduled, a line for each fault.

        Raises:
            ConfigError: one is no fault, or cannot happen in this job.
            JobFailedError: the job has ended, or does not answer.
        """
        return self._wish(Inject(faults))

    def end(self) -> None:
        """Asks the job to end and waits for it: at most as long as a clean stop takes."""
        self.stop()
        checkpoint = self._plan.spec.checkpoint
        keeps = checkpoint.every_steps is not None
        self.wait(STOP_S + (checkpoint.notice_s if keeps else 0.0))

    def _wish(self, wish: Wish) -> str:
        controller, loop, name = self._controller, self._loop, self._plan.spec.name
        if controller is None or loop is None or not self._thread.is_alive():
            raise JobFailedError(f"job {name!r} is not running")
        granting = controller.grant(wish)
        try:
            return asyncio.run_coroutine_threadsafe(granting, loop).result(WISH_S)
        except (TimeoutError, CancelledError):
            raise JobFailedError(f"job {name!r} does not answer") from None
        except RuntimeError:  # its loop is closed
            granting.close()
            raise JobFailedError(f"job {name!r} has just ended") from None

    def _run(self) -> None:
        try:
            self._result = asyncio.run(self._main())
        except RayzeroError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  # the thread's end: nothing may be lost
            self._error = JobFailedError(f"rayzero itself failed: {type(error).__name__}: {error}")
        finally:
            self._cluster.close()
            atexit.unregister(self.end)

    async def _main(self) -> JobResult:
        clock, spec = SystemClock(), self._plan.spec
        output_dir = self._plan.output_dir
        vaults = RayVaultGroup(spec.name, faults=spec.faults, output_dir=str(output_dir))
        workers = RayWorkerGroup(self._plan.setup, clock, self._cluster.can_grow, vaults)
        archive = StoredArchive(self._plan, self._warn)
        with Telemetry(self._plan, self._observer, clock) as told:
            ports = Ports(workers, vaults, archive, told, clock, told)
            try:
                return await self._controlled(Controller(self._plan, ports), clock)
            finally:
                await told.heard()

    async def _controlled(self, controller: Controller, clock: Clock) -> JobResult:
        self._loop, self._controller = asyncio.get_running_loop(), controller
        if self._stop_wanted.is_set():  # before there was somebody to tell
            controller.feed(ev.StopWanted())
        driver = ray.get_runtime_context().get_job_id()
        mailbox = Mailbox(here(), self._plan.spec.name, driver)
        requests = asyncio.ensure_future(serve(mailbox, clock, controller.grant, self._warn))
        try:
            return await controller.run()
        finally:
            requests.cancel()
            await asyncio.wait({requests})

    def _warn(self, text: str) -> None:
        self._observer.see(Warned(text))


def _named(entrypoint: EntryPoint) -> str:
    if isinstance(entrypoint, str):
        return entrypoint
    name = getattr(entrypoint, "__qualname__", type(entrypoint).__qualname__)
    return f"{getattr(entrypoint, '__module__', '__main__')}:{name}"
