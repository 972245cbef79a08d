"""Which workers there are, and which of them may take part. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rayzero.orchestrator.policies.membership import Candidate, Choice, Members, Wanted, choose
from rayzero.workers.messages import WorkerInfo


class Crew:
    """Every worker the job ever had, by index, and what became of it.

    A worker is ready from `add` on: its process answers, and its node has a vault. It stays so
    until it is lost, or is let go.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.leaving: frozenset[str] = frozenset()
        """Ids of nodes that are about to go."""
        self.members: frozenset[int] = frozenset()
        """Of the newest generation."""
        self.vacant: list[WorkerInfo] = []
        """Workers that are gone and whose seats wait for a replacement."""
        self._known: dict[int, WorkerInfo] = {}
        self._alive: dict[int, WorkerInfo] = {}
        self._there: tuple[WorkerInfo, ...] | None = ()
        self._nodes: tuple[str, ...] | None = ()
        self._choice: tuple[tuple[object, ...], Choice] | None = None
        """The last one, and what it was made of."""
        self._changes = 0

    def add(self, workers: Iterable[WorkerInfo]) -> None:
        new = {worker.index: worker for worker in workers}
        self._known |= new
        self._alive |= new
        self._changed()

    def info(self, worker: int) -> WorkerInfo:
        return self._known[worker]

    def knows(self, worker: int, pid: int) -> bool:
        """Whether that was this worker's process, and not one of an earlier job's."""
        return worker in self._known and self._known[worker].pid == pid

    def alive(self, worker: int) -> bool:
        return worker in self._alive

    @property
    def there(self) -> tuple[WorkerInfo, ...]:
        """Everyone who is ready, members or not, by index."""
        if self._there is None:
            self._there = tuple(map(self._alive.__getitem__, sorted(self._alive)))
        return self._there

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of those who are ready, each once, in order of their first worker."""
        if self._nodes is None:
            self._nodes = tuple(dict.fromkeys(worker.node_id for worker in self.there))
        return self._nodes

    def lost(self, worker: int) -> None:
        """Its process is gone; its seat waits for a replacement."""
        self.let_go(worker)
        self.vacant.append(self._known[worker])

    def let_go(self, worker: int) -> None:
        """It is about to be ended, by wish."""
        self._alive.pop(worker, None)
        self._changed()

    def choose(self) -> Choice:
        """Who takes part next, as things stand. It is asked for at every turn of things, and
        worked out again only when something changed."""
        made_of = (self._changes, self.wanted, self.leaving, self.members)
        if self._choice is None or self._choice[0] != made_of:
            self._choice = (made_of, self._chosen())
        return self._choice[1]

    def _chosen(self) -> Choice:
        there, wanted = self.there, self.wanted
        if not self.leaving and wanted.least <= len(there) <= wanted.most:
            return Members(there)  # as mostly: all of them, whoever is a member now
        return choose(
            [
                Candidate(one, one.index in self.members, one.node_id in self.leaving)
                for one in there
            ],
            wanted,
        )

    def _changed(self) -> None:
        self._there = self._nodes = None
        self._changes += 1
