"""From a job's name to its process, wherever it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rayzero.engine.errors import ConfigError, nearest
from rayzero.orchestrator.cluster import Cluster, each
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.head import reach
from rayzero.orchestrator.head.records import Record, recall
from rayzero.orchestrator.spec import JobSpec

ANSWER_S = 15.0
"""How long a job may take to answer: recovery may keep it busy."""


@dataclass(frozen=True)
class FoundJob:
    """A running job. `cluster` is the connection to it, which is the finder's to close."""

    spec: JobSpec
    actor: Any
    cluster: Cluster

    def ask(self, method: str, *args: Any) -> Any:
        """
        Raises:
            JobFailedError: it does not answer, or has ended.
            ConfigError: what is asked for cannot be.
        """
        try:
            return reach.call(self.actor, method, *args, timeout_s=ANSWER_S)
        except (reach.AwayError, reach.GoneError) as error:
            raise JobFailedError(f"job {self.spec.name!r}: {error.seen}") from None


def find(name: str, address: str | None) -> FoundJob:
    """The running job of that name, in the cluster at `address` or RAY_ADDRESS, or else in any
    whose head runs on this machine.

    Raises:
        ConfigError: there is none.
        JobFailedError: it does not answer.
    """
    found = look(name, address)
    if isinstance(found, Record):
        ended_s = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.status.at_s))
        raise ConfigError(
            f"no running job is called {name!r}: it {found.status.state} at {ended_s}",
            fix=f"`rayzero status {name}` or `rayzero logs {name}`, or submit it again",
        )
    return found


def look(name: str, address: str | None) -> FoundJob | Record:
    """As `find`; how it ended, if it does not run any more and one of the clusters knows.

    Raises:
        ConfigError: no cluster knows of it.
        JobFailedError: it does not answer.
    """
    running: list[str] = []
    ended: list[Record] = []
    for cluster in each(address):
        try:
            if (found := _there(name, cluster)) is not None:
                return found
            running += reach.running()
            if (record := recall(name)) is not None:
                ended.append(record)
        except BaseException:
            cluster.close()
            raise
    if ended:
        return max(ended, key=lambda one: one.status.at_s)
    raise ConfigError(
        f"no running job is called {name!r}{nearest(name, running)}",
        allowed=f"a running job: {', '.join(sorted(running))}" if running else "",
        fix="the name, or --address or RAY_ADDRESS, which say in which cluster to look",
    )


def _there(name: str, cluster: Cluster) -> FoundJob | None:
    actor = reach.find(name)
    if actor is None:
        return None
    try:
        spec = reach.call(actor, "spec", timeout_s=ANSWER_S)
    except reach.GoneError:
        return None
    except reach.AwayError as away:
        raise JobFailedError(f"job {name!r}: {away.seen}") from None
    return None if spec is None else FoundJob(spec, actor, cluster)
