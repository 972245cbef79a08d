"""The engines that train in one call of a training function, and what is done with all of them.

The engines share a generation's process group, and leave it together. An engine that finds the
group broken breaks it for the others. All are re-cut where the next step of the job begins
(`job_step`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from rayzero.engine.comm.process_group import LateBackend
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.layout.engine_parts import engines_of, find_part, open_part
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.recut import GroupSurvival
from rayzero.engine.state.composite import CompositeState
from rayzero.workers.job_step import JobStep

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine

log = logging.getLogger("rayzero.workers")


class JobEngines:
    """The engines that train, in the order of their construction. Used by the training thread;
    members that any thread may use say so.

    Attributes:
        state: the state of all engines.
        step: where the engines are in a step of the job.
        first_name: the name that the function gave the first engine, whose name here is empty.
    """

    def __init__(self) -> None:
        self.state = CompositeState()
        self.step = JobStep()
        self.first_name: str | None = None
        self._engines: dict[str, Engine] = {}
        self._evaluating: WeakSet[Engine] = WeakSet()
        self._unread: set[str] = set()  # parts of the restored state, whose engines are not built

    def __len__(self) -> int:
        return len(self._engines)

    def number_of(self, name: str) -> int:
        """Returns an engine's number, from 1; 0 if it is the only engine."""
        return 1 + [*self._engines].index(name) if len(self) > 1 else 0

    def choose_name(self, given: str | None) -> str:
        """Returns the name of the engine that is about to be built; empty for the first one. Raises
        ConfigError if the given name cannot be used."""
        is_name = given is None or (given.isprintable() and 0 < len(given) <= 64)
        if not is_name or (given and not {":", "/"}.isdisjoint(given)):
            raise ConfigError(
                f"initialize(name={given!r:.99}) was given",
                allowed="1 to 64 printable characters without ':' and '/'",
            )
        if self._engines and given is not None and given in {*self._engines, self.first_name}:
            raise ConfigError(
                f"initialize(name={given!r}) was given a second time in this function",
                allowed="another name for each engine that trains",
            )
        if not self._engines:
            self.first_name = given
            return ""
        return given or f"engine{len(self) + 1}"

    def expect(self, source: StateSource | None) -> None:
        """Called with the state that engines are about to be built from."""
        self._unread = {*engines_of(source)} if source is not None and not self._engines else set()

    def open_part(self, source: StateSource | None, name: str) -> StateSource | None:
        """Opens the part of the state for the engine about to be built; None if there is none."""
        found = None if source is None else self._find_part(source, name)
        if source is None or found not in self._unread:
            return None
        self._unread.discard(found)
        return open_part(source, found)

    def _find_part(self, source: StateSource, name: str) -> str | None:
        return find_part(source, name or self.first_name, is_first=not name)

    @property
    def are_built(self) -> bool:
        """Whether all engines of the restored state have been built."""
        return not self._unread

    def drop_unread(self, rank: int) -> None:
        """Called when the first step begins: drops the state of engines that are not built yet."""
        if self._unread and rank == 0:
            names = ", ".join(repr(name or "the first one") for name in sorted(self._unread))
            log.warning(
                "the restored state has engines that this call of the training function has not "
                "built before its first step: their state is dropped: %s\n  fix: build all engines "
                "before the first step, with the same names",
                names,
            )
        self._unread.clear()

    def check_step(self, name: str, finished: int) -> None:
        """Called when an engine steps. Raises ConfigError if the engine has loaded a checkpoint of
        fewer steps than the job has `finished`."""
        if (engine := self._engines.get(name)) is None:
            return
        step = engine.progress.step
        finished = self.state.finished_of(name) if len(self) > 1 else finished
        if step < finished:
            raise ConfigError(
                f"a step after load_checkpoint of step {step}, in a job that has finished "
                f"{finished} steps",
                allowed="to go back, a new job, which loads it before its first step",
            )

    @property
    def fewest_steps(self) -> int:
        """The fewest steps of an engine: the job's, if each engine has loaded a checkpoint."""
        return min(engine.progress.step for engine in self._engines.values())

    def check_end(self) -> None:
        """See `MicroBatches.check_end`. Warns if the function has ended within a step of the job,
        which is then lost."""
        for engine in self._engines.values():
            engine.internals.micro_batches.check_end()
        if self._engines and self.state.step is None:
            log.warning(
                "the training function ended where some of its engines had stepped and others had "
                "not: what they did since the last step of the job is in no copy or checkpoint"
            )

    def warn_of_idle(self, rank: int) -> None:
        """Warns, on rank 0, of engines that do not step while others do."""
        if rank != 0:
            return
        for name in self.step.waits_for():
            label = name or self.first_name or "the first engine that trains"
            log.warning(
                "%s has not stepped since the others did %d times: a step of the job ends when "
                "every engine that trains has stepped, and only then it is reported, copied and "
                "written to a checkpoint\n  fix: step it; or build it without an optimizer, if it "
                "only evaluates; or destroy() it, if it is trained",
                label,
                self.step.most_calls,
            )

    def add(self, name: str, engine: Engine) -> None:
        self._engines[name] = engine
        engine.state.engine_name = name or self.first_name
        self.state.add(name, engine.state)
        self.state.first_name = self.first_name
        self.step.engines.append(name)

    def add_evaluating(self, engine: Engine) -> None:
        """Adds an engine that only evaluates. Its collectives, if any, use the present group."""
        self._evaluating.add(engine)
        collectives = engine.internals.runtime.collectives
        if collectives.detached:
            collectives.reconnect(LateBackend())

    def close(self, name: str) -> None:
        """Called when an engine becomes unusable: later steps end without it. Its state stays."""
        if name in self.step.engines:
            self.step.engines.remove(name)

    # The members below do for all engines what those of `GroupSurvival` do for one.

    @property
    def is_enabled(self) -> bool:
        """Whether the engines outlive their group. Any thread may ask."""
        survivals = self._survivals
        return bool(survivals) and all(survival.is_enabled for survival in survivals)

    def enable(self, on_broken: Callable[[str], None] | None) -> None:
        def break_all(reason: str) -> None:
            self.break_group(reason)  # no other engine launches a collective from now on
            if on_broken is not None:
                on_broken(reason)

        for survival in self._survivals:
            survival.enable(None if on_broken is None else break_all)

    def break_group(self, reason: str) -> None:
        """Breaks the group for all engines. Any thread may call this."""
        for survival in self._survivals:
            survival.break_group(reason)

    @property
    def local_reason(self) -> str:
        reasons = (survival.local_reason for survival in self._survivals)
        return next(filter(None, reasons), "")

    @property
    def collectives_called(self) -> int:
        return sum(survival.collectives_called for survival in self._survivals)

    def can_continue(self, *, replays_epochs: bool) -> bool:
        """See `GroupSurvival.can_continue`. With several engines, False for a loop that has read
        ahead: only one of the engines would know that a batch is to be read again."""
        survivals = self._survivals
        if len(survivals) > 1 and any(survival.reads_ahead for survival in survivals):
            return False
        return self.is_enabled and all(
            survival.can_continue(replays_epochs=replays_epochs) for survival in survivals
        )

    def recut(self, source: StateSource, *, keep: bool, shares: Sequence[float]) -> None:
        """Re-cuts all engines for the ranks of the present group, from the state of a step. What
        the engines have done since that step is undone. Collective. Raises what
        `GroupSurvival.recut` raises."""
        undoes = len(self) > 1 and self.state.step != source.step
        with self.state.recutting(source.step):
            for name, engine in self._engines.items():
                found = self._find_part(source, name)
                if found is None:
                    raise EngineError(f"the state of step {source.step} has no engine {name!r}")
                part = open_part(source, found)
                engine.survival.recut(part, keep=keep, shares=shares, undoes=undoes)
        for engine in self._evaluating:
            engine.internals.runtime.collectives.reconnect(LateBackend())
        for survival in self._survivals:
            survival.begin_step()
        self.step.begin_again()

    @property
    def can_divide_anew(self) -> bool:
        """See `GroupSurvival.can_divide_anew`. False with several engines: their loops may
        differ."""
        return len(self) == 1 and all(survival.can_divide_anew for survival in self._survivals)

    def divide(self, shares: Sequence[float]) -> None:
        """See `GroupSurvival.divide`."""
        for survival in self._survivals:
            survival.divide(shares)

    @property
    def _survivals(self) -> list[GroupSurvival]:
        engines = [*self._engines.values()]  # a copy: other threads read while engines are added
        return [engine.survival for engine in engines]
