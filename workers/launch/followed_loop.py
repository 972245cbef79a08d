"""The loop of a launched script, which continues while ranks are lost and others join.

Before each batch, the loop waits until all ranks are present, and asks what has happened since the
previous batch (`follow`). If nothing has, or the step has finished, the loop reads the next batch.
If a step was lost, the job is at the start of that step, which may be before the end of a step that
this rank has already counted: the batches since then are read again, divided among the present
ranks.

- `FollowedLoop`: returns the script's schedules to the job's step, keeps what each recent step has
  read (`kept`), and sends a survivor's state to new members.
- torch's DataLoaders (`own_loader`) yield the kept batches again, because any sampler may have
  ordered them.
- Accelerate's loaders (`rayzero/huggingface/accelerated_loop.py`) begin the epoch again, after the
  batches that were trained on. The script knows from Accelerate's state where a step ends.
- Trainer (`rayzero/huggingface/trainer_steps.py`) has a fixed number of iterations. It runs the
  lost step again within one of them, with the kept batches.
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
    """A loop's position in the job. Used by the training thread.

    Args:
        schedules: the script's own, which the engine's state does not contain.

    Attributes:
        step: the number of finished steps at the latest call of `follow`.
        ranks: this rank and the number of ranks for which the loop's batches are divided.
        kept: what the steps have read, by the number of steps finished before each; for as many
            steps as the job may go back.
        knows_state: False for a new member to which no survivor has sent its state yet.
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
        """Whether a step was lost, or the ranks may have changed, since the latest `follow`."""
        return self._changes() != self._seen

    def follow(self) -> bool:
        """Waits until all ranks are present, and sets `step` to the job's.

        Returns:
            Whether a step was lost, or the ranks may have changed, since the previous call.

        Raises:
            CollectiveError: the job is at a step before the earliest that was kept.
        """
        self._session.on_phase("data")
        if self._session.loop.yields_again:
            self._engine.survival.await_group()
        step, has_changed = self._engine.progress.step, self.has_changed
        if step > self.step or has_changed:
            self._schedules.follow(step, has_finished=step > self.step)
        oldest = step - self._session.steps_to_go_back
        for began in [began for began in self.kept if began < oldest]:
            del self.kept[began]
        self.step, self._seen = step, self._changes()
        return has_changed

    def meet(self, place: Any) -> list[tuple[bool, Any]] | None:
        """Exchanges the ranks' places at the first call in a generation. Collective.

        Returns:
            Each rank's `knows_state` and `place`. None at later calls, and if the group broke: the
            ranks then meet in the next generation.
        """
        if self._met != self._session.assignment.generation:
            self._met = self._session.assignment.generation
            with suppress(CollectiveError):
                return all_gather_objects((self.knows_state, place))
        return None

    def send(self, sender: int, state: Callable[[], Any]) -> Any | None:
        """Sends the state of the rank `sender` to new members. Collective.

        Returns:
            The state on new members. None on other ranks, and if the group broke.
        """
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
    """Returns this rank and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()
