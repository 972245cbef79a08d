"""A handle on a running job: how it stands, what it tells, and what can be wished for."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rayzero.orchestrator.cluster.connect import ClusterConnection
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.interfaces import InjectFaults, JobCommand, ScaleWorkers
from rayzero.orchestrator.job import client as reach
from rayzero.orchestrator.job.client import LogReaders, read_ended, tail_running
from rayzero.orchestrator.job.ended_jobs import EndedJobRecord, load_ended
from rayzero.orchestrator.job.log import iter_log_lines
from rayzero.orchestrator.job.subscriber import LONG_POLL_S, EventSubscriber
from rayzero.orchestrator.job_events import JobEvent, JobObserver, NullObserver
from rayzero.orchestrator.job_file import parse_worker_limits
from rayzero.orchestrator.results import JobEnd, JobResult, JobStatus

STOP_TIMEOUT_S = 15.0
"""How long a stopped job may take to be gone, without its last checkpoint."""


FOLLOWER_CLOSE_S = 1.0
"""How long the follower may take to end, beyond a question for news."""


LOG_READ_S = 10.0
"""How long the connection is kept for those who read the log to its end."""


CALL_TIMEOUT_S = 15.0
"""How long a running job may take to answer."""


class JobHandle:
    """A job in a process of its own on the cluster, which goes on without this handle, unless the
    cluster is our own and ends with this process. Owns a `EventSubscriber`, and the connection if we made
    it: both last until the job ends."""

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
            actor: None if the job has ended, and `record` says how.
            since: as for `EventBuffer.news`.
            grace_period_s: how long a stop may take for a last checkpoint.
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
        """On a job that has ended: `status`, `result` and `logs` tell of it."""
        nobody = ClusterConnection(owned=False, can_grow=True)
        handle = cls(record.status.name, None, nobody, NullObserver(), record=record)
        handle.wait()
        return handle

    @property
    def _on_hard_exit(self) -> str:
        """What becomes of the job when this process ends at once, in words."""
        return "kills it" if self._cluster.is_local else "leaves that to the cluster"

    def logs(self, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        """What the workers printed, from the beginning, a line at a time, as `[rank 0] text`.

        Args:
            follow: to the job's end; else what there is now.
            rank: of this one only.

        Raises:
            JobFailedError: it does not answer, or its log cannot be read from here any more.
        """
        with self._log_readers:
            try:
                for line in iter_log_lines(self._read_log(follow), rank):
                    if line.startswith("[rank "):
                        yield line
            except (reach.JobUnavailableError, reach.JobProcessLostError) as error:
                raise JobFailedError(f"job {self.name!r}: {error.seen}") from None

    def status(self) -> JobStatus:
        """How the job stands; at its end, how it stood.

        Raises:
            JobFailedError: it does not answer.
        """
        if self._follower.status is not None:
            return self._follower.status
        found: JobStatus = self._call("status")
        return found

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the job's end; whether it came in time."""
        return self._follower.wait(timeout_s)

    def result(self) -> JobResult:
        """Waits for the job's end and returns its result.

        Raises:
            JobFailedError, ConfigError: the job failed, and why.
            JobStoppedError: it was stopped.
        """
        self.wait()
        return (self._follower.ended or JobEnd()).unwrap()

    def events(self) -> Iterator[JobEvent]:
        """Everything the job told and tells, in order, to its end: the newest 10,000 of what came
        before are kept."""
        return self._follower.iter_events()

    def stop(self) -> None:
        """Asks the job to end. Returns at once; may be called twice."""
        if self._follower.is_alive:
            reach.call_async(self._actor, "stop")

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
        return self._command(ScaleWorkers(*parse_worker_limits(workers)))

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
        return self._command(InjectFaults(faults))

    def end(self) -> None:
        """Asks the job to end and waits for it: at most as long as a clean stop takes."""
        self.stop()
        self.wait(STOP_TIMEOUT_S + self._grace_period_s)

    def close(self) -> None:
        """Lets the job go on unseen. A handle is closed when its job ends, and at exit."""
        self._follower.close()
        self.wait(LONG_POLL_S + FOLLOWER_CLOSE_S)

    def _read_log(self, follow: bool) -> Iterator[bytes]:
        if self._follower.is_alive:
            return tail_running(self._actor, self.status().log, follow)
        return read_ended(self.status().log)

    def _command(self, wish: JobCommand) -> str:
        return str(self._call("execute", wish))

    def _call(self, method: str, *args: Any) -> Any:
        if not self._follower.is_alive:
            raise JobFailedError(f"job {self.name!r} is not running")
        try:
            return reach.call(self._actor, method, *args, timeout_s=CALL_TIMEOUT_S)
        except (reach.JobUnavailableError, reach.JobProcessLostError) as error:
            raise JobFailedError(f"job {self.name!r}: {error.seen}") from None

    def _lookup_ended(self) -> EndedJobRecord | None:
        return self._record or load_ended(self.name)

    def _on_end(self) -> None:
        self._log_readers.wait_idle(LOG_READ_S)
        with suppress(Exception):  # the interpreter may be on its way out
            self._cluster.close()
        atexit.unregister(self._at_exit)
