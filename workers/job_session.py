"""The engine's session in a worker: where it begins from, and what happens around its steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.data.ledger import Ledger
from rayzero.engine.session import Wishes
from rayzero.engine.state.source import StateSource
from rayzero.workers.injector import Injector
from rayzero.workers.interrupt import Interrupted
from rayzero.workers.keeper import Keeper
from rayzero.workers.messages import Assign, Message, Restored, Setup
from rayzero.workers.mirror import Mirror
from rayzero.workers.readings import Readings
from rayzero.workers.reports import Reports
from rayzero.workers.wire import Wire

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine


class JobSession:
    """One generation's. Used from the training thread only.

    Attributes:
        engine: None until `initialize` has made it.
        reports: what is told of steps, by the engine and by the user.
    """

    def __init__(
        self, setup: Setup, assign: Assign, wire: Wire, keeper: Keeper, injector: Injector
    ) -> None:
        self.engine: Engine | None = None
        self.reports = Reports(assign, wire)
        self._setup = setup
        self._assign = assign
        self._wire = wire
        self._keeper = keeper
        self._injector = injector
        self._mirror = Mirror(setup.mirror, assign, setup.steps, keeper.vault, wire.post)
        self._readings = Readings(self._mirror)
        self._ledger = _ledger(setup, assign)
        self._hooks: list[RemovableHandle] = []

    @property
    def engine_config(self) -> dict[str, Any] | None:
        return self._setup.engine_config

    @property
    def seed(self) -> int:
        return self._setup.seed

    @property
    def shares(self) -> Sequence[float]:
        return self._assign.shares

    def resume_from(self) -> AbstractContextManager[StateSource | None]:
        self.phase("load")
        return self._keeper.source(self._assign.restore)

    def engine_ready(self, engine: Engine) -> None:
        self.engine = engine
        self._keeper.keep(engine)
        self._readings.begin(engine)
        self._look_between_blocks(engine)
        step = engine.progress.step
        took_s = {"load": self.reports.begin_at(step)}
        self._wire.post(Restored(self._assign.generation, self._assign.rank, step, took_s))

    def phase(self, name: str) -> None:
        self._enter(name)
        self.check()

    def post(self, message: Message) -> None:
        self._wire.post(message)

    def check(self) -> None:
        """Raises Interrupted once the generation is over."""
        self._wire.interrupt.check()

    def waiting(self, collective: int, entered: bool) -> None:
        self._wire.progress.waits(collective, entered)
        self.check()

    def consumed(self, samples: Sequence[int]) -> None:
        if self._ledger is not None:
            self._ledger.consumed(samples)

    def wishes(self) -> Wishes:
        """Asked for just before the vote. The ledger is written then: whoever goes on from this
        step has passed the vote, and then every rank has written its line."""
        step = self._wire.progress.step
        if self._ledger is not None:
            self._ledger.write(step)
        return replace(self._mirror.wishes(step), drain=self._wire.drain.requested)

    def step_done(self, metrics: dict[str, float], agreed: Wishes) -> None:
        """Mirrored, and only then reported: a reported step is never lost. An interrupt waits
        for both."""
        step = int(metrics["step"])
        self._enter("mirror")
        self.reports.add(metrics | self._readings.of(metrics))
        if self.engine is not None:
            begun_s = perf_counter()
            self._mirror.step_done(step, agreed, self.engine.state)
            self.reports.add(self._readings.mirrored(perf_counter() - begun_s, step))
        self.post(self.reports.finish(step))
        self._keeper.tidy()
        self.check()
        if agreed.drain:
            raise Interrupted

    def close(self) -> None:
        """The function is over, by whatever way."""
        for hook in self._hooks:
            hook.remove()

    def _look_between_blocks(self, engine: Engine) -> None:
        """A long forward is left at its next block once the generation is over; backward looks
        whenever a sum is launched. The hooks go when the session is closed."""

        def look(*_: object) -> None:
            self.check()

        for module in engine.module.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                self._hooks += [child.register_forward_pre_hook(look) for child in module]

    def _enter(self, phase: str) -> None:
        self._wire.progress.entered(phase)
        self._injector.at(phase, self._wire.progress.step)


def _ledger(setup: Setup, assign: Assign) -> Ledger | None:
    if not setup.ledger:
        return None
    folder = Path(setup.output_dir, "ledger", setup.run)
    return Ledger(folder, assign.generation, assign.rank, assign.world_size)
