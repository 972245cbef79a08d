"""The engines that train in one call of a training function, and what is done with all of them.

They share the process group of a generation, and leave it together: one that finds it broken breaks
it for the others, and all are re-cut where the next step of the job begins (`job_step`).
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
    """In the order of their construction. Used by the training thread, but for what says otherwise.

    Attributes:
        state: of all of them.
        step: where they are in a step of the job.
        first_name: the name that the function gave the first one, whose own is empty.
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
        """An engine's number, from 1; 0 if it is the only one."""
        return 1 + [*self._engines].index(name) if len(self) > 1 else 0

    def choose_name(self, given: str | None) -> str:
        """The name of the engine that is about to be built; empty for the first one. Raises
        ConfigError if it cannot be used."""
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
        """A state that engines are about to be built from."""
        self._unread = {*engines_of(source)} if source is not None and not self._engines else set()

    def open_part(self, source: StateSource | None, name: str) -> StateSource | None:
        """The part of the state of the engine that is about to be built; None if it has none."""
        found = None if source is None else self._find_part(source, name)
        if source is None or found not in self._unread:
            return None
        self._unread.discard(found)
        return open_part(source, found)

    def _find_part(self, source: StateSource, name: str) -> str | None:
        return find_part(source, name or self.first_name, is_first=not name)

    @property
    def are_built(self) -> bool:
        """Whether all engines of the restored state are."""
        return not self._unread

    def drop_unread(self, rank: int) -> None:
        """The first step begins: what was not built until now has no engine."""
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
        """An engine steps. Raises ConfigError if it has loaded a checkpoint behind the steps that
        the job has `finished`."""
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
        """Of one engine: the job's, where each has loaded a checkpoint of its own."""
        return min(engine.progress.step for engine in self._engines.values())

    def check_end(self) -> None:
        """See `MicroBatches.check_end`. Warns if the function has ended within a step of the job,
        which nothing has of it."""
        for engine in self._engines.values():
            engine.internals.micro_batches.check_end()
        if self._engines and self.state.step is None:
            log.warning(
                "the training function ended where some of its engines had stepped and others had "
                "not: what they did since the last step of the job is in no copy or checkpoint"
            )

    def warn_of_idle(self, rank: int) -> None:
        """Names engines that do not step, while others do."""
        for name in self.step.waits_for() if rank == 0 else ():
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
        """One that only evaluates: its collectives, if it makes any, are of the present group."""
        self._evaluating.add(engine)
        collectives = engine.internals.runtime.collectives
        if collectives.detached:
            collectives.reconnect(LateBackend())

    def close(self, name: str) -> None:
        """An engine cannot be used any more: steps end without it. Its state stays."""
        if name in self.step.engines:
            self.step.engines.remove(name)

    # As `GroupSurvival`, of all engines.

    @property
    def is_enabled(self) -> bool:
        """By any thread."""
        return bool(self._engines) and all(it.is_enabled for it in self._survivals)

    def enable(self, on_broken: Callable[[str], None] | None) -> None:
        def break_all(reason: str) -> None:
            self.break_group(reason)  # nothing is launched by another one from now on
            if on_broken is not None:
                on_broken(reason)

        for survival in self._survivals:
            survival.enable(None if on_broken is None else break_all)

    def break_group(self, reason: str) -> None:
        """By any thread."""
        for survival in self._survivals:
            survival.break_group(reason)

    @property
    def local_reason(self) -> str:
        return next((it.local_reason for it in self._survivals if it.local_reason), "")

    @property
    def collectives_called(self) -> int:
        return sum(it.collectives_called for it in self._survivals)

    def can_continue(self, *, replays_epochs: bool) -> bool:
        """See `GroupSurvival.can_continue`. With several engines not a loop that has read ahead:
        only one of them would know that a batch is to be read again."""
        survivals = self._survivals
        if len(survivals) > 1 and any(it.reads_ahead for it in survivals):
            return False
        return self.is_enabled and all(
            it.can_continue(replays_epochs=replays_epochs) for it in survivals
        )

    def recut(self, source: StateSource, *, keep: bool, shares: Sequence[float]) -> None:
        """Re-cuts all engines for the ranks of the present group, from the state of a step: what
        they have done since is undone. Collective; raises as `GroupSurvival.recut`."""
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
        """See `GroupSurvival.can_divide_anew`. Not with several engines: their loops may differ."""
        return len(self) == 1 and all(it.can_divide_anew for it in self._survivals)

    def divide(self, shares: Sequence[float]) -> None:
        """See `GroupSurvival.divide`."""
        for survival in self._survivals:
            survival.divide(shares)

    @property
    def _survivals(self) -> list[GroupSurvival]:
        return [engine.survival for engine in [*self._engines.values()]]
