"""A client's handle on a job: status, events, logs, and commands."""

from __future__ import annotations

import atexit
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from threading import Condition, Event, Thread
from typing import TypeVar

from rayzero.engine.errors import RayzeroError, first_line
from rayzero.orchestrator.cluster.connect import ClusterConnection
from rayzero.orchestrator.errors import JobFailedError, internal_error, short_traceback
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job.client import (
    CALL_TIMEOUT_S,
    JobProcess,
    JobProcessLostError,
    JobUnavailableError,
    read_job_log,
)
from rayzero.orchestrator.job.ended_jobs import load_ended
from rayzero.orchestrator.job.log import iter_log_lines
from rayzero.orchestrator.job_events import (
    JobEvent,
    JobObserver,
    JobWarning,
    NullObserver,
    StateEntered,
)
from rayzero.orchestrator.job_file import parse_worker_limits
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import EndedJob, EventPage, JobResult, JobStatus
from rayzero.orchestrator.spec import JobSpec
from rayzero.workers.bounded_queue import BoundedQueue

T = TypeVar("T")

STOP_MARGIN_S = 15.0
FOLLOWER_CLOSE_S = 1.0  # how long `close` waits for the thread, beyond its current poll
LOG_READ_S = 10.0  # how long the connection is kept for readers of the log after the job's end
LONG_POLL_S = 1.0  # how long a poll waits in the job's process for an event
ANSWER_MARGIN_S = 30.0  # how much longer than `LONG_POLL_S` the reply to a poll may take
UNAVAILABLE_LIMIT_S = 60.0
"""A process that does not answer is polled for at least this long: Ray may be restarting it."""
_RETRY_PAUSE_S = 0.2
_ACKNOWLEDGE_TIMEOUT_S = 5.0


def stop_limit_s(spec: JobSpec) -> float:
    """Returns how long a clean stop may take: the end of the training functions, a last checkpoint,
    and the end of the journal on a slow disk."""
    return spec.checkpoint.grace_period_s + spec.recovery.patience_s + STOP_MARGIN_S


def head_limit_s(spec: JobSpec) -> float:
    """Returns how long clients wait for a job whose process is lost with the cluster's head node.
    Its workers train on, and Ray restarts the process once the head is back."""
    return max(UNAVAILABLE_LIMIT_S, spec.recovery.orphan_s)


class JobHandle:
    """A submitted job. It continues without this handle, unless it runs in a local cluster, which
    ends with this process. Owns the thread `rayzero-follower`, which polls for events, and
    the cluster connection if this process opened it; both last until the job ends, or `close`."""

    def __init__(
        self,
        process: JobProcess,
        cluster: ClusterConnection,
        observer: JobObserver,
        since: int = 0,
        spec: JobSpec | None = None,
        ended: EndedJob | None = None,
    ) -> None:
        """
        Args:
            observer: gets every event, in the thread `rayzero-follower`.
            since: as for `EventBuffer.fetch_since`.
            spec: the job's spec; None if the job has ended.
            ended: the record of the job's end, if the job has ended.
        """
        self.name = process.name
        self._spec = spec
        self._process = process
        self._since = since
        self._observer = observer
        self._ended = ended  # set before the thread ends, unless it was closed
        self._events: BoundedQueue[JobEvent] = BoundedQueue()
        self._events_changed = Condition()
        self._closed = Event()
        self._stops = False  # a stop was requested
        self._log_readers = 0
        self._log_readers_changed = Condition()
        self._cluster = cluster
        self._at_exit = self.end if cluster.is_local else self.close
        atexit.register(self._at_exit)  # an orderly end, before the connection's
        self._thread = Thread(target=self._run, name="rayzero-follower", daemon=True)
        self._thread.start()

    @classmethod
    def of_ended(cls, ended: EndedJob) -> JobHandle:
        """Returns a handle on a job that has ended, for `status`, `result` and `logs`."""
        process, no_cluster = JobProcess(ended.status.name, None), ClusterConnection(False, True)
        handle = cls(process, no_cluster, NullObserver(), ended=ended)
        handle.wait()
        return handle

    def __repr__(self) -> str:
        if self._ended is not None:
            return f"<JobHandle {self.name!r}: {self._ended.status.describe()}>"
        state, step = self._newest(StateEntered), self._newest(StepRecord)
        shown = "starting" if state is None else str(state.state)
        if step is not None:
            shown += f" at step {step.step}"
        return f"<JobHandle {self.name!r}: {shown}{'' if self._thread.is_alive() else ', closed'}>"

    @property
    def on_hard_exit(self) -> str:
        """The effect on the job if this process no longer waits for it, for messages."""
        return "kills it" if self._cluster.is_local else "leaves that to the cluster"

    def logs(self, follow: bool = False, rank: int | None = None, role: str = "") -> Iterator[str]:
        """Yields the lines that the workers have printed, from the beginning of the log. A line of
        a rank is `[rank 0] text`, a line of a role's worker `[rollout 0] text`.

        Args:
            follow: waits for new lines until the job's end, instead of ending with the log.
            rank: yields only this rank's lines; with a `role`, only those of its worker `rank`.
            role: yields the lines of this role's workers instead of the ranks'.

        Raises:
            JobFailedError: the job does not answer, or its log cannot be read from this machine.
        """
        with self._log_readers_changed:
            self._log_readers += 1
        try:
            status = self.status()
            if not status.log:
                raise JobFailedError(status.error)  # the process was lost
            process = self._process if self._ended is None else None
            lines = iter_log_lines(read_job_log(status.log, process, follow), rank, role)
            yield from (line for line in lines if line.startswith(f"[{role or 'rank'} "))
        finally:
            with self._log_readers_changed:
                self._log_readers -= 1
                self._log_readers_changed.notify_all()

    def status(self) -> JobStatus:
        """Returns the current status; after the job's end, the final one. Raises JobFailedError if
        the job does not answer."""
        if self._ended is not None:
            return self._ended.status
        return self._running_process().call(JobActor.status)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the job's end. Returns False when `timeout_s` passed before it."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @short_traceback
    def result(self) -> JobResult:
        """Waits for the job's end and returns its result. Raises JobFailedError or ConfigError if
        the job failed, JobStoppedError if it was stopped."""
        self.wait()
        if self._ended is None:
            raise JobFailedError(f"job {self.name!r}: this handle was closed before the job's end")
        return self._ended.result()

    def events(self) -> Iterator[JobEvent]:
        """Yields the job's events in order until its end. Of the events before this call, only the
        newest 10,000 are kept."""
        index = 0
        while True:
            with self._events_changed:
                self._events_changed.wait_for(
                    lambda index=index: self._events.end > index or not self._thread.is_alive(),  # type: ignore[misc]
                    LONG_POLL_S,
                )
                page, index = list(self._events.since(index)), self._events.end
            yield from page
            if not page and not self._thread.is_alive():
                return

    def stop(self) -> None:
        """Requests the job's end. Returns at once; may be called twice. If Ray is restarting the
        job's process, the request is repeated to the new process."""
        if self._thread.is_alive():
            self._stops = True
            self._process.request_stop()

    def scale(self, workers: int | tuple[int, int] | str, role: str = "") -> str:
        """Changes the limits for the number of workers. Limits of ranks take effect at the next
        step boundary, limits of a role at once.

        Args:
            workers: a number, or the least and the most: 4, (2, 4), "2:4".
            role: changes the limits of this role's workers instead of the ranks'.

        Returns:
            A description of the new limits.

        Raises:
            ConfigError: the engine config does not work with these numbers, or there is no such
                role.
            JobFailedError: the job has ended, or does not answer.
        """
        limits = parse_worker_limits(workers)
        return self._running_process().call(JobActor.scale, *limits, role)

    def inject(self, *faults: str) -> str:
        """Injects faults into the running job, such as `kill(rank=1)`.

        Args:
            faults: faults in the fault language; `step` defaults to the current step.

        Returns:
            The scheduled faults, one per line.

        Raises:
            ConfigError: a fault cannot be parsed, or cannot be injected into this job.
            JobFailedError: the job has ended, or does not answer.
        """
        return self._running_process().call(JobActor.inject, faults)

    def end(self) -> None:
        """Stops the job and waits for its end, for at most `stop_limit_s`."""
        self.stop()
        self.wait(STOP_MARGIN_S if self._spec is None else stop_limit_s(self._spec))

    def abandon(self) -> None:
        """Detaches at once; a local cluster is killed, and the job with it. Safe in a signal
        handler."""
        self._closed.set()
        if self._cluster.local is not None:
            self._cluster.local.kill()

    def close(self) -> None:
        """Detaches from the job, which continues. Happens automatically at the job's end and when
        this process exits."""
        self._closed.set()
        self.wait(LONG_POLL_S + FOLLOWER_CLOSE_S)

    def _running_process(self) -> JobProcess:
        if not self._thread.is_alive():
            raise JobFailedError(f"job {self.name!r} is not running")
        return self._process

    def _on_end(self) -> None:
        with self._log_readers_changed:
            self._log_readers_changed.wait_for(lambda: self._log_readers == 0, LOG_READ_S)
        with suppress(Exception):  # the interpreter may be exiting
            self._cluster.close()
        atexit.unregister(self._at_exit)

    def _newest(self, kind: type[T]) -> T | None:
        """Returns the newest kept event of type `kind`."""
        with self._events_changed:
            events = list(self._events.since(0))
        return next((event for event in reversed(events) if isinstance(event, kind)), None)

    def _run(self) -> None:
        try:
            if self._ended is None:
                self._follow()
        except Exception as error:  # noqa: BLE001  # `JobHandle.result` must raise it
            outcome = error if isinstance(error, RayzeroError) else internal_error(error)
            status = JobStatus(self._process.name, None, error=first_line(outcome))
            self._ended = EndedJob(status, outcome)
        finally:
            self._on_end()

    def _follow(self) -> None:
        page = EventPage(next_index=self._since)
        while not self._closed.is_set():
            page = self._fetch_page(page.run, page.next_index)
            if page.dropped:
                text = f"{page.dropped} events were dropped: this client is slower than the job"
                self._deliver(JobWarning(text))
            for event in page.events:
                self._deliver(event)
            if page.ended is not None:
                self._ended = page.ended
                with suppress(RayzeroError):  # another client has done so, and the process is gone
                    self._process.call(JobActor.acknowledge_end, timeout_s=_ACKNOWLEDGE_TIMEOUT_S)
                return

    def _fetch_page(self, run: str, since: int) -> EventPage:
        """Returns the next events. Retries while Ray may be restarting the process; returns no
        events after `close`. Raises JobFailedError if the process does not answer, or has ended
        without a record of the job's end."""
        since_s, warned = time.monotonic(), False
        while True:
            try:
                page = self._process.call(
                    JobActor.fetch_events,
                    run,
                    since,
                    LONG_POLL_S,
                    timeout_s=LONG_POLL_S + ANSWER_MARGIN_S,
                )
                if self._stops and page.run != run:  # a new process, which the request has missed
                    self._process.request_stop()
                return page
            except JobUnavailableError as unavailable:
                away_s, limit_s = time.monotonic() - since_s, self._away_limit_s
                if away_s > limit_s:
                    raise _given_up(self.name, unavailable, limit_s) from None
                if away_s > CALL_TIMEOUT_S and not warned:
                    warned = True
                    self._deliver(_awaited(unavailable, limit_s))
            except JobProcessLostError as lost:
                # If another client has acknowledged the end, the process has exited as it should.
                if (ended := load_ended(self._process.name)) is None:
                    raise JobFailedError(lost.seen) from None
                return EventPage(run, (), since, ended=ended)
            if self._closed.wait(_RETRY_PAUSE_S):
                return EventPage(run, (), since)

    @property
    def _away_limit_s(self) -> float:
        """How long a process that does not answer is polled. The head of a local cluster is never
        restarted, so a longer `recovery.orphan_s` does not count there."""
        if self._spec is None or self._cluster.is_local:
            return UNAVAILABLE_LIMIT_S
        return head_limit_s(self._spec)

    def _deliver(self, event: JobEvent) -> None:
        with self._events_changed:
            self._events.append(event)
            self._events_changed.notify_all()
        if self._closed.is_set():
            return  # the observer's owner has detached
        try:
            self._observer.on_event(event)
        except Exception:  # noqa: BLE001  # user code must not end this thread
            traceback.print_exc()
            self._observer = NullObserver()


def _awaited(unavailable: JobUnavailableError, limit_s: float) -> JobWarning:
    return JobWarning(
        f"{unavailable.seen}; the workers may train on without it: waiting at most {limit_s:g} s "
        "(recovery.orphan_s)"
    )


def _given_up(job: str, unavailable: JobUnavailableError, limit_s: float) -> JobFailedError:
    return JobFailedError(
        f"{unavailable.seen}, for {limit_s:g} s",
        fix=f"start the cluster's head again; then `rayzero logs -f {job}` follows the job if it "
        "has lived on, and `rayzero resume` continues it if not",
    )
