"""Acts out the faults that no worker can: a vault's, a node's, and damage to what is stored.

Those of workers, and of vaults that write, happen there; what is wished for while the job runs is
handed on to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rayzero.engine.checkpoint.store import is_remote
from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.control.desk import COMMAND_S, Desk
from rayzero.orchestrator.control.tasks import within
from rayzero.orchestrator.group import VaultLostError
from rayzero.orchestrator.notices import Warned
from rayzero.workers.faults import Fault, parse
from rayzero.workers.injector import FaultRecord, Schedule, StoreFaults
from rayzero.workers.messages import RankFile

ANSWER_S = 5.0
"""How long a vault may take to answer: somebody may be waiting for what comes of it."""


class Chaos:
    """Owns the record of the faults that happened, from `begin` on. Does nothing without faults."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._faults = [parse(text) for text in desk.plan.setup.faults]
        self._record = FaultRecord(desk.plan.output_dir)
        self._schedule = Schedule(self._faults, self._record, desk.see)
        self._store = StoreFaults(self._schedule)
        self._striking: set[Fault] = set()
        self._given_up: set[Fault] = set()

    def begin(self, *, resumed: bool) -> None:
        """A run begins. What happened in an earlier one counts only if it is gone on with.

        Raises:
            ConfigError: the record cannot be written.
        """
        self._record.keep_only({str(fault) for fault in self._faults} if resumed else ())
        self._schedule.want(self._faults)

    async def inject(self, texts: Sequence[str]) -> str:
        """Further faults, at the next chance if they name no step; what was scheduled, in words.

        Raises:
            ConfigError: one is no fault, or can never happen in this job. Then none is taken.
        """
        desk = self._desk
        here = desk.progress.steps + 1
        faults = [parse(text, here) for text in texts]
        for fault in faults:
            if why := await self._never(fault):
                raise ConfigError(f"fault {str(fault)!r} cannot happen: {why}")
        desk.injected += tuple(map(str, faults))
        self._schedule.want([*self._faults, *map(parse, desk.injected)])
        with suppress(TimeoutError):  # a vault that does not answer is taken for lost elsewhere
            await within(desk.ports.clock, ANSWER_S, desk.ports.vaults.inject(desk.injected))
        for worker in desk.generation.still_in:  # the next generation's members are told with it
            desk.tasks.spawn(desk.ask(worker, desk.ports.workers.inject(worker, desk.injected)))
        when = {fault: "" if fault.step <= here else " from that step on" for fault in faults}
        name = desk.plan.spec.name
        return "\n".join(f"{name}: {one} at the next chance{when[one]}" for one in faults)

    def step_finished(self, step: int) -> None:
        """The next one is being worked on."""
        for fault in self._schedule.due(step + 1):
            if fault.where in ("vault", "cluster") and fault not in self._striking | self._given_up:
                self._striking.add(fault)
                self._desk.tasks.spawn(self._strike(fault, step + 1))

    def stored(self, step: int, folder: str, files: Sequence[RankFile]) -> None:
        """A checkpoint exists now."""
        torn = [fault for fault in self._schedule.due(step) if fault.kind == "tear_file"]
        if torn and is_remote(folder):
            for fault in torn:
                self._give_up(fault, f"{folder} is not on a disk")
        elif torn:
            path = folder.removeprefix("file://")
            self._store.after_commit(step, {one.rank: Path(path, one.name) for one in files})

    async def _strike(self, fault: Fault, step: int) -> None:
        desk = self._desk
        try:
            nodes = self._nodes()
            if fault.node >= len(nodes):
                return  # there may be one later
            if why := await self._obstacle(fault):
                self._give_up(fault, why)
                return
            node = nodes[fault.node]
            members = desk.generation.workers
            rank = next(rank for rank, one in enumerate(members) if one.node_id == node)
            self._schedule.fire(fault, rank, step)
            await within(desk.ports.clock, COMMAND_S, desk.ports.vaults.strike(node, str(fault)))
        except (VaultLostError, TimeoutError):
            pass  # it is gone, or was gone before: then the next step's end is another chance
        finally:
            self._striking.discard(fault)

    def _give_up(self, fault: Fault, why: str) -> None:
        if fault not in self._given_up:
            self._given_up.add(fault)
            self._desk.see(Warned(f"fault {fault} was not acted out: {why}"))

    async def _never(self, fault: Fault) -> str:
        """Why a fault cannot happen in this job as it stands; empty when it can."""
        desk = self._desk
        most, nodes = desk.crew.wanted.most, len(self._nodes())
        if fault.where == "worker":
            return f"the job has at most {most} workers" if fault.rank >= most else ""
        if fault.where in ("vault", "cluster"):
            if fault.node >= nodes:
                return f"the job is on {nodes} node{'s' * (nodes != 1)} now, counted from 0"
            try:
                return await self._obstacle(fault)
            except (VaultLostError, TimeoutError):
                return "that node's vault does not answer"
        if desk.plan.setup.mirror.checkpoint_every_steps is None:
            return "the job writes no checkpoints (checkpoint.every_steps)"
        if fault.kind == "tear_file" and is_remote(desk.plan.archive):
            return f"{desk.plan.archive} is not on a disk"
        return ""

    async def _obstacle(self, fault: Fault) -> str:
        desk = self._desk
        command = desk.ports.vaults.obstacle(self._nodes()[fault.node], str(fault))
        return await within(desk.ports.clock, ANSWER_S, command)

    def _nodes(self) -> list[str]:
        """The nodes in the order of their first ranks."""
        return list(dict.fromkeys(one.node_id for one in self._desk.generation.workers))
