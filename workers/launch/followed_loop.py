"""A launched script's loop that continues where it is when ranks are lost and others come.

Before each batch, what feeds the loop waits for all ranks and asks what has happened since the
previous one (`follow`). If nothing has, or its step has ended, the loop reads on. If a step was
lost, the job is where that step began, which may be before the end of a step that this rank has
counted: the batches since are read again, cut for the present ranks.

- Here: schedules go back with the job; `kept` has what each of the last steps has read; survivors
  send new members their state.
- torch's DataLoaders (`own_loader`) yield what is kept: any sampler may have ordered it.
- Accelerate's (`rayzero/huggingface/accelerated_loop.py`) begin the epoch again, behind what is
  trained on: by their own state the script knows where a step ends.
- Trainer (`rayzero/huggingface/trainer_steps.py`) has a fixed number of turns: it runs the step
  again within its turn, with what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from rayzero.engine.comm.process_group import all_gather_objects
from rayzero.engine.engine import Engine
from rayzero.engine.errors import CollectiveError
from rayzero.workers.launch.kept_schedules import KeptSchedules
from rayzero.workers.session import JobSession


class FollowedLoop:
    """The position of a loop in the job. Used by the training thread.

    Args:
        schedules: of the script, which the engine does not have.

    Attributes:
        step: finished ones, when `follow` was last called.
        ranks: this rank and their number, for which the loop's batches are cut.
        kept: what was kept of a step, by the number of finished ones before it; of as many steps as
            the job may go back.
        knows_state: False for a new member to which no survivor has sent its state.
    """

    def __init__(
        self, session: JobSession, engine: Engine, schedules: KeptSchedules | None = None
    ) -> None:
        self.step = engine.progress.step
        self.ranks = present_ranks()
        self.kept: dict[int, Any] = {}
        self.knows_state = not session.assignment.survivors_stay
        self._schedules = KeptSchedules() if schedules is None else schedules
        self._session = session
        self._engine = engine
        self._seen = self._changes()
        self._met = session.assignment.generation if self.knows_state else 0
        self._schedules.keep(self.step)

    @property
    def has_changed(self) -> bool:
        """Whether a step was lost, or the ranks may be others, since `follow` was last called."""
        return self._changes() != self._seen

    def follow(self) -> bool:
        """Waits for all ranks if some are missing, and comes to where the job is. Returns what
        `has_changed` is then. Raises CollectiveError if that is before what was kept."""
        self._session.on_phase("data")
        if self._session.loop.yields_again:
            self._engine.survival.await_group()
        step, has_changed = self._engine.progress.step, self.has_changed
        if step > self.step:
            self._schedules.keep(step)
        elif has_changed:
            self._schedules.restore(step)
        oldest = step - self._session.steps_to_go_back
        for old in [it for it in self.kept if it < oldest]:
            del self.kept[old]
        self.step, self._seen = step, self._changes()
        return has_changed

    def meet(self, place: Any) -> list[tuple[bool, Any]] | None:
        """Returns each rank's `knows_state` and `place`, at the first call in a generation; else
        None, and if the group broke: they meet in the next one. Collective."""
        if self._met != self._session.assignment.generation:
            self._met = self._session.assignment.generation
            with suppress(CollectiveError):
                return all_gather_objects((self.knows_state, place))
        return None

    def send(self, sender: int, state: Callable[[], Any]) -> Any | None:
        """Returns the `state` of the rank `sender` to new members; None to others, and if the group
        broke. Collective."""
        sent = None
        with suppress(CollectiveError):
            sent = all_gather_objects(state() if sender == dist.get_rank() else None)[sender]
        if self.knows_state or sent is None:
            return None
        self.knows_state = True
        return sent

    def _changes(self) -> tuple[int, int]:
        return self._engine.progress.lost_steps, self._session.assignment.generation


def present_ranks() -> tuple[int, int]:
    """This rank, and how many there are."""
    return dist.get_rank(), dist.get_world_size()
