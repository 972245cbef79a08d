"""A client's handle on a job: status, events, logs, and commands."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import suppress
from threading import Condition

from rayzero.orchestrator.cluster.connect import ClusterConnection
from rayzero.orchestrator.errors import JobFailedError, short_traceback
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job.client import JobProcess, read_ended_log, tail_log
from rayzero.orchestrator.job.log import iter_log_lines
from rayzero.orchestrator.job.subscriber import LONG_POLL_S, EventSubscriber
from rayzero.orchestrator.job_events import JobEvent, JobObserver, NullObserver, StateEntered
from rayzero.orchestrator.job_file import parse_worker_limits
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import EndedJob, JobResult, JobStatus
from rayzero.orchestrator.spec import JobSpec

STOP_MARGIN_S = 15.0
FOLLOWER_CLOSE_S = 1.0  # limit for the subscriber's end, beyond its current poll
LOG_READ_S = 10.0  # how long the connection is kept for readers of the log after the job's end


def stop_limit_s(spec: JobSpec) -> float:
    """How long a clean stop may take: the functions and a last checkpoint, then the journal's end
    on a slow disk."""
    return spec.checkpoint.grace_period_s + spec.recovery.hang_timeout_s + STOP_MARGIN_S


class JobHandle:
    """A submitted job. It continues without this handle, unless it runs in a local cluster, which
    ends with this process. Owns an `EventSubscriber`, and the cluster connection if this process
    opened it; both last until the job ends."""

    def __init__(
        self,
        process: JobProcess,
        cluster: ClusterConnection,
        observer: JobObserver,
        since: int = 0,
        stop_limit_s: float = STOP_MARGIN_S,
        ended: EndedJob | None = None,
    ) -> None:
        """
        Args:
            since: as for `EventBuffer.fetch_since`.
            stop_limit_s: how long a clean stop may take.
            ended: the end of the job, if it has ended before.
        """
        self.name = process.name
        self._stop_limit_s = stop_limit_s
        self._process = process
        self._log_readers = 0
        self._log_readers_changed = Condition()
        self._cluster = cluster
        self._at_exit = self.end if cluster.is_local else self.close
        atexit.register(self._at_exit)  # an orderly end, before the connection's
        self._subscriber = EventSubscriber(process, since, observer, self._on_end, ended)

    @classmethod
    def of_ended(cls, ended: EndedJob) -> JobHandle:
        """A handle on a job that has ended, for `status`, `result` and `logs`."""
        process, no_cluster = JobProcess(ended.status.name, None), ClusterConnection(False, True)
        handle = cls(process, no_cluster, NullObserver(), ended=ended)
        handle.wait()
        return handle

    def __repr__(self) -> str:
        if (ended := self._subscriber.ended) is not None:
            return f"<JobHandle {self.name!r}: {ended.status.describe()}>"
        state, step = self._subscriber.newest(StateEntered), self._subscriber.newest(StepRecord)
        shown = "starting" if state is None else str(state.state)
        if step is not None:
            shown += f" at step {step.step}"
        return (
            f"<JobHandle {self.name!r}: {shown}{'' if self._subscriber.is_alive else ', closed'}>"
        )

    @property
    def on_hard_exit(self) -> str:
        """The effect on the job when this process no longer waits for it, for messages."""
        return "kills it" if self._cluster.is_local else "leaves that to the cluster"

    def logs(self, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        """The output of the workers from the beginning, as lines `[rank 0] text`.

        Args:
            follow: until the job's end, instead of the current end of the log.
            rank: only this rank's lines.

        Raises:
            JobFailedError: the job does not answer, or its log cannot be read from this machine.
        """
        with self._log_readers_changed:
            self._log_readers += 1
        try:
            if (ended := self._subscriber.ended) is None:
                parts = tail_log(self._process, follow)
            elif not ended.status.log:
                raise JobFailedError(ended.status.error)  # the process was lost
            else:
                parts = read_ended_log(ended.status.log)
            lines = iter_log_lines(parts, rank)
            yield from (line for line in lines if line.startswith("[rank "))
        finally:
            with self._log_readers_changed:
                self._log_readers -= 1
                self._log_readers_changed.notify_all()

    def status(self) -> JobStatus:
        """The current status; after the job's end, the final one. Raises JobFailedError if the job
        does not answer."""
        if self._subscriber.ended is not None:
            return self._subscriber.ended.status
        return self._running_process().call(JobActor.status)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the job's end. Returns False when `timeout_s` passed before it."""
        return self._subscriber.wait(timeout_s)

    @short_traceback
    def result(self) -> JobResult:
        """Waits for the job's end and returns its result. Raises JobFailedError or ConfigError if
        the job failed, JobStoppedError if it was stopped."""
        self.wait()
        if self._subscriber.ended is None:
            raise JobFailedError(f"job {self.name!r}: this handle was closed before the job's end")
        return self._subscriber.ended.result()

    def events(self) -> Iterator[JobEvent]:
        """The job's events in order, to its end; of those before this call, the newest 10,000."""
        return self._subscriber.iter_events()

    def stop(self) -> None:
        """Requests the job's end. Returns at once; may be called twice."""
        if self._subscriber.is_alive:
            self._process.request_stop()

    def scale(self, workers: int | tuple[int, int] | str) -> str:
        """Changes the limits for the number of workers, at the next step boundary.

        Args:
            workers: a number, or the least and the most: 4, (2, 4), "2:4".

        Returns:
            A description of the new limits.

        Raises:
            ConfigError: the engine config does not work with these numbers.
            JobFailedError: the job has ended, or does not answer.
        """
        return self._running_process().call(JobActor.scale, *parse_worker_limits(workers))

    def inject(self, *faults: str) -> str:
        """Injects faults into the running job, such as `kill(rank=1)`.

        Args:
            faults: in the fault language; the step defaults to the current one.

        Returns:
            The scheduled faults, one per line.

        Raises:
            ConfigError: a fault cannot be parsed, or cannot be injected into this job.
            JobFailedError: the job has ended, or does not answer.
        """
        return self._running_process().call(JobActor.inject, faults)

    def end(self) -> None:
        """Stops the job and waits for its end, up to the limit of a clean stop."""
        self.stop()
        self.wait(self._stop_limit_s)

    def abandon(self) -> None:
        """Detaches at once; a local cluster is killed, and the job with it. Safe in a signal
        handler."""
        self._subscriber.close()
        if self._cluster.local is not None:
            self._cluster.local.kill()

    def close(self) -> None:
        """Detaches from the job, which continues. Happens by itself at the job's end and at
        exit."""
        self._subscriber.close()
        self.wait(LONG_POLL_S + FOLLOWER_CLOSE_S)

    def _running_process(self) -> JobProcess:
        if not self._subscriber.is_alive:
            raise JobFailedError(f"job {self.name!r} is not running")
        return self._process

    def _on_end(self) -> None:
        with self._log_readers_changed:
            self._log_readers_changed.wait_for(lambda: self._log_readers == 0, LOG_READ_S)
        with suppress(Exception):  # the interpreter may be exiting
            self._cluster.close()
        atexit.unregister(self._at_exit)
