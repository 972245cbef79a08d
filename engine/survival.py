"""How an engine outlives its process group: the host's view."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from rayzero.engine.comm.collectives import DETACHED
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.recut import recut_engine
from rayzero.engine.state.kept import KeptSource
from rayzero.engine.training_step import TrainingStep


class GroupSurvival:
    """Lets an engine outlive its process group.

    Args:
        step, model: of the engine.
        after_recut: called where the ranks have changed.
    """

    def __init__(
        self, step: TrainingStep, model: nn.Module, after_recut: Callable[[], None]
    ) -> None:
        self._step = step
        self._model = model
        self._after_recut = after_recut
        self._collectives = step.runtime.collectives

    def enable(self, on_broken: Callable[[str], None] | None) -> None:
        """Makes a process group that breaks a state, in which the host's session is asked to
        `reform`: see `Collectives`. None makes it an error again."""
        self._collectives.on_broken = on_broken

    @property
    def is_enabled(self) -> bool:
        return self._collectives.on_broken is not None

    def follow_host_loader(self) -> None:
        """The host yields the script's batches from now on, and calls `await_group` before each."""
        self._step.reforming.by_host = True

    def await_group(self) -> None:
        """Asks the host for another group, if this one is broken and no step is running."""
        if not self._step.tracker.has_gradients:
            self._step.reforming.reform_if_broken()

    @property
    def local_reason(self) -> str:
        """Why this rank computes on its own; empty if it does not."""
        return self._collectives.broken or (DETACHED if self._collectives.detached else "")

    def can_continue(self, *, replays_epochs: bool) -> bool:
        """Whether the script's loop gets the samples again of a step that is lost with its group:
        not if it has read all of them before, as `list(loader)` does; and whether no rank would
        need its peers where they are not.

        `replays_epochs`: a new rank runs what follows a finished epoch, alone.
        """
        if not self._step.micro_batches.can_read_again:
            return False
        return not (replays_epochs and self._step.reforming.gathered_between_steps)

    @property
    def collectives_called(self) -> int:
        """Collectives of the engine, so far."""
        return self._collectives.counters.sequence

    def break_group(self, reason: str) -> None:
        """The process group is to be used no more. By any thread."""
        self._collectives.break_off(reason)

    def begin_step(self) -> None:
        """The ranks of another process group begin a step: its time starts here."""
        self._step.meter.restart_step()

    def recut(self, source: StateSource, *, keep: bool, shares: Sequence[float] = ()) -> KeptSource:
        """Continues on the ranks of the present process group, after those of the previous one are
        gone: see `recut_engine`. Collective."""
        moved = recut_engine(self._step, self._model, source, keep=keep, shares=shares)
        self._after_recut()
        return moved
