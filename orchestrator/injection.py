"""Makes those faults happen that no worker can: a vault's death, and damage to what is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rayzero.orchestrator.archive import Archive
from rayzero.orchestrator.control.desk import Ports
from rayzero.orchestrator.notices import FaultSeen, Notice, Observer, WorkersUp
from rayzero.orchestrator.policies import placement
from rayzero.orchestrator.policies.failure import Cause
from rayzero.orchestrator.policies.recovery import Stored
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.faults import parse
from rayzero.workers.injector import FaultRecord, Schedule, StoreFaults
from rayzero.workers.messages import RankFile, WorkerInfo


def injected(
    ports: Ports, faults: Sequence[str], output_dir: Path, crash: Callable[[str], None]
) -> Ports:
    """The ports of a job in which these faults are to happen. Called at its start."""
    injection = Injection(faults, output_dir, ports.observer, crash)
    return replace(ports, observer=injection, archive=injection.around(ports.archive))


class Injection:
    """An observer between the controller and the job's own, used in the controller's thread.

    Args:
        faults: of the job, in the fault language; those of other places are left to them.
        observer: is told everything, and the faults that happen here.
        crash: ends a node's vault without a word, at once.
    """

    def __init__(
        self,
        faults: Sequence[str],
        output_dir: Path,
        observer: Observer,
        crash: Callable[[str], None],
    ) -> None:
        self._observer = observer
        self._crash = crash
        self._workers: dict[int, WorkerInfo] = {}
        parsed = [parse(text) for text in faults]
        record = FaultRecord(output_dir)
        record.clear()  # this is the start of a job
        vaults = [fault for fault in parsed if fault.kind == "kill_vault"]
        torn = [fault for fault in parsed if fault.kind == "tear_file"]
        self._vaults = Schedule(vaults, record, observer.see)
        self._torn = StoreFaults(Schedule(torn, record, observer.see))

    def see(self, notice: Notice) -> None:
        self._observer.see(notice)
        match notice:
            case WorkersUp(workers):
                self._workers |= {one.index: one for one in workers}
            case FaultSeen(worker=worker, cause=Cause.NODE_LOST):
                self._workers.pop(worker.index, None)
            case StepRecord(step=step):
                self._step_finished(step)

    def around(self, archive: Archive) -> Archive:
        """The archive, with files that are torn as soon as they are durable."""
        return _TornArchive(archive, self._torn)

    def _step_finished(self, step: int) -> None:
        for fault in self._vaults.due(step + 1):
            nodes = self._nodes()
            if fault.node < len(nodes):
                self._vaults.fire(fault, 0, step + 1)
                self._crash(nodes[fault.node])

    def _nodes(self) -> list[str]:
        """The job's nodes in the order of the ranks on them."""
        places = placement.ranks(list(self._workers.values()))
        return list(dict.fromkeys(self._workers[place.worker].node_id for place in places))


class _TornArchive:
    """An Archive on a local disk that damages what it was given."""

    def __init__(self, archive: Archive, faults: StoreFaults) -> None:
        self._archive = archive
        self._faults = faults

    def folder(self, step: int) -> str:
        return self._archive.folder(step)

    async def begin(self) -> Stored | None:
        return await self._archive.begin()

    async def newest(self, excluding: frozenset[int]) -> Stored | None:
        return await self._archive.newest(excluding)

    async def commit(self, step: int, generation: int, files: Sequence[RankFile]) -> None:
        await self._archive.commit(step, generation, files)
        folder = Path(self.folder(step))
        self._faults.after_commit(step, {one.rank: folder / one.name for one in files})

    async def prune(self) -> None:
        await self._archive.prune()
