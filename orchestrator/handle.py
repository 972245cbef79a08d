"""A handle on a running job: how it stands, what it tells, and what can be wished for."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rayzero.orchestrator.bounds import bounds
from rayzero.orchestrator.cluster import Cluster
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.head import reach
from rayzero.orchestrator.head.follower import POLL_S, Follower
from rayzero.orchestrator.head.log import lines
from rayzero.orchestrator.head.outcome import Ended, JobStatus
from rayzero.orchestrator.head.reading import Readers, left, live
from rayzero.orchestrator.head.records import Record, recall
from rayzero.orchestrator.notices import Notice, Observer, Unwatched
from rayzero.orchestrator.result import JobResult
from rayzero.orchestrator.wishes import Inject, Scale, Wish

STOP_S = 15.0
"""How long a stopped job may take to be gone, without its last checkpoint."""
CLOSE_S = 1.0
"""How long the follower may take to end, beyond a question for news."""
READ_S = 10.0
"""How long the connection is kept for those who read the log to its end."""
WISH_S = 15.0
"""How long a running job may take to answer."""


class JobHandle:
    """A job in a process of its own on the cluster, which goes on without this handle, unless the
    cluster is our own and ends with this process. Owns a `Follower`, and the connection if we made
    it: both last until the job ends."""

    def __init__(
        self,
        name: str,
        actor: Any,
        cluster: Cluster,
        observer: Observer,
        since: int = 0,
        notice_s: float = 0.0,
        record: Record | None = None,
    ) -> None:
        """
        Args:
            actor: None if the job has ended, and `record` says how.
            since: as for `Feed.news`.
            notice_s: how long a stop may take for a last checkpoint.
        """
        self.name = name
        self._notice_s = notice_s
        self._actor = actor
        self._record = record
        self._readers = Readers()
        self._cluster = cluster
        self._at_exit = self.end if cluster.is_ours else self.close
        atexit.register(self._at_exit)  # an orderly end, before the connection's
        self._follower = Follower(actor, since, observer, self._ended, self._recall)

    @classmethod
    def of_ended(cls, record: Record) -> JobHandle:
        """On a job that has ended: `status`, `result` and `logs` tell of it."""
        nobody = Cluster(owned=False, can_grow=True)
        handle = cls(record.status.name, None, nobody, Unwatched(), record=record)
        handle.wait()
        return handle

    @property
    def without(self) -> str:
        """What becomes of the job when this process ends at once, in words."""
        return "kills it" if self._cluster.is_ours else "leaves that to the cluster"

    def logs(self, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        """What the workers printed, from the beginning, a line at a time, as `[rank 0] text`.

        Args:
            follow: to the job's end; else what there is now.
            rank: of this one only.

        Raises:
            JobFailedError: it does not answer, or its log cannot be read from here any more.
        """
        with self._readers:
            try:
                for line in lines(self._log(follow), rank):
                    if line.startswith("[rank "):
                        yield line
            except (reach.AwayError, reach.GoneError) as error:
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
        return (self._follower.ended or Ended()).outcome()

    def events(self) -> Iterator[Notice]:
        """Everything the job told and tells, in order, to its end: the newest 10,000 of what came
        before are kept."""
        return self._follower.notices()

    def stop(self) -> None:
        """Asks the job to end. Returns at once; may be called twice."""
        if self._follower.is_alive:
            reach.tell(self._actor, "stop")

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
        self.wait(STOP_S + self._notice_s)

    def close(self) -> None:
        """Lets the job go on unseen. A handle is closed when its job ends, and at exit."""
        self._follower.close()
        self.wait(POLL_S + CLOSE_S)

    def _log(self, follow: bool) -> Iterator[bytes]:
        if self._follower.is_alive:
            return live(self._actor, self.status().log, follow)
        return left(self.status().log)

    def _wish(self, wish: Wish) -> str:
        return str(self._call("grant", wish))

    def _call(self, method: str, *args: Any) -> Any:
        if not self._follower.is_alive:
            raise JobFailedError(f"job {self.name!r} is not running")
        try:
            return reach.call(self._actor, method, *args, timeout_s=WISH_S)
        except (reach.AwayError, reach.GoneError) as error:
            raise JobFailedError(f"job {self.name!r}: {error.seen}") from None

    def _recall(self) -> Record | None:
        return self._record or recall(self.name)

    def _ended(self) -> None:
        self._readers.wait(READ_S)
        with suppress(Exception):  # the interpreter may be on its way out
            self._cluster.close()
        atexit.unregister(self._at_exit)
