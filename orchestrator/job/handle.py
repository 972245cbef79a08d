"""A client's handle on a job: status, events, logs, and commands."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rayzero.orchestrator.cluster.connect import ClusterConnection
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.interfaces import InjectFaults, JobCommand, ScaleWorkers
from rayzero.orchestrator.job import client
from rayzero.orchestrator.job.client import LogReaders, read_ended, tail_running
from rayzero.orchestrator.job.ended_jobs import EndedJobRecord, load_ended
from rayzero.orchestrator.job.log import iter_log_lines
from rayzero.orchestrator.job.subscriber import LONG_POLL_S, EventSubscriber
from rayzero.orchestrator.job_events import JobEvent, JobObserver, NullObserver
from rayzero.orchestrator.job_file import parse_worker_limits
from rayzero.orchestrator.results import JobEnd, JobResult, JobStatus

STOP_TIMEOUT_S = 15.0
"""Limit for a clean stop, without the last checkpoint."""


FOLLOWER_CLOSE_S = 1.0
"""Limit for the subscriber's end, beyond its current poll."""


LOG_READ_S = 10.0
"""How long the connection is kept for readers of the log after the job's end."""


CALL_TIMEOUT_S = 15.0
"""Limit for a reply of a running job."""


class JobHandle:
    """A submitted job. It continues without this handle, unless it runs in a local cluster, which
    ends with this process. Owns an `EventSubscriber`, and the cluster connection if this process
    opened it; both last until the job ends."""

    def __init__(
        self,
        name: str,
        actor: Any,
        cluster: ClusterConnection,
        observer: JobObserver,
        since: int = 0,
        grace_period_s: float = 0.0,
        record: EndedJobRecord | None = None,
    ) -> None:
        """
        Args:
            actor: None if the job has ended, as described by `record`.
            since: as for `EventBuffer.fetch_since`.
            grace_period_s: how much longer a stop may take for a last checkpoint.
        """
        self.name = name
        self._grace_period_s = grace_period_s
        self._actor = actor
        self._record = record
        self._log_readers = LogReaders()
        self._cluster = cluster
        self._at_exit = self.end if cluster.is_local else self.close
        atexit.register(self._at_exit)  # an orderly end, before the connection's
        self._follower = EventSubscriber(actor, since, observer, self._on_end, self._lookup_ended)

    @classmethod
    def from_record(cls, record: EndedJobRecord) -> JobHandle:
        """A handle on a job that has ended, for `status`, `result` and `logs`."""
        no_cluster = ClusterConnection(owned=False, can_grow=True)
        handle = cls(record.status.name, None, no_cluster, NullObserver(), record=record)
        handle.wait()
        return handle

    @property
    def _on_hard_exit(self) -> str:
        """What happens to the job when this process is killed, for messages."""
        return "kills it" if self._cluster.is_local else "leaves that to the cluster"

    def logs(self, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        """The output of the workers from the beginning, as lines `[rank 0] text`.

        Args:
            follow: until the job's end, instead of the current end of the log.
            rank: only this rank's lines.

        Raises:
            JobFailedError: the job does not answer, or its log cannot be read from this machine.
        """
        with self._log_readers:
            try:
                for line in iter_log_lines(self._read_log(follow), rank):
                    if line.startswith("[rank "):
                        yield line
            except (client.JobUnavailableError, client.JobProcessLostError) as error:
                raise JobFailedError(f"job {self.name!r}: {error.seen}") from None

    def status(self) -> JobStatus:
        """The current status; after the job's end, the final one.

        Raises:
            JobFailedError: the job does not answer.
        """
        if self._follower.status is not None:
            return self._follower.status
        status: JobStatus = self._call("status")
        return status

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the job's end. Returns False when `timeout_s` passed before it."""
        return self._follower.wait(timeout_s)

    def result(self) -> JobResult:
        """Waits for the job's end and returns its result.

        Raises:
            JobFailedError, ConfigError: the job failed.
            JobStoppedError: the job was stopped.
        """
        self.wait()
        return (self._follower.ended or JobEnd()).unwrap()

    def events(self) -> Iterator[JobEvent]:
        """The job's events in order, to its end; of those before this call, the newest 10,000."""
        return self._follower.iter_events()

    def stop(self) -> None:
        """Requests the job's end. Returns at once; may be called twice."""
        if self._follower.is_alive:
            client.call_async(self._actor, "stop")

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
        return self._command(ScaleWorkers(*parse_worker_limits(workers)))

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
        return self._command(InjectFaults(faults))

    def end(self) -> None:
        """Stops the job and waits for its end, up to the limit of a clean stop."""
        self.stop()
        self.wait(STOP_TIMEOUT_S + self._grace_period_s)

    def close(self) -> None:
        """Detaches from the job, which continues. Happens by itself at the job's end and at
        exit."""
        self._follower.close()
        self.wait(LONG_POLL_S + FOLLOWER_CLOSE_S)

    def _read_log(self, follow: bool) -> Iterator[bytes]:
        if self._follower.is_alive:
            return tail_running(self._actor, self.status().log, follow)
        return read_ended(self.status().log)

    def _command(self, command: JobCommand) -> str:
        return str(self._call("execute", command))

    def _call(self, method: str, *args: Any) -> Any:
        if not self._follower.is_alive:
            raise JobFailedError(f"job {self.name!r} is not running")
        try:
            return client.call(self._actor, method, *args, timeout_s=CALL_TIMEOUT_S)
        except (client.JobUnavailableError, client.JobProcessLostError) as error:
            raise JobFailedError(f"job {self.name!r}: {error.seen}") from None

    def _lookup_ended(self) -> EndedJobRecord | None:
        return self._record or load_ended(self.name)

    def _on_end(self) -> None:
        self._log_readers.wait_idle(LOG_READ_S)
        with suppress(Exception):  # the interpreter may be exiting
            self._cluster.close()
        atexit.unregister(self._at_exit)
