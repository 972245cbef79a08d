"""Learning-rate schedules that belong to the script, not to its engine."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from rayzero.engine.engine import Engine
from rayzero.engine.errors import CollectiveError
from rayzero.workers.session import JobSession

log = logging.getLogger("rayzero.workers")

KEPT_STEPS = 256
"""More steps than lie between two copies of the state in memory, and between most checkpoints."""


class KeptSchedules:
    """The script's schedules, and their states at the start of each recent step.

    A script calls a schedule's `step` after `engine.step()`, within which the training state is
    copied. A copied state therefore has each schedule's position before that call, and the number
    of calls that usually follow.

    Attributes:
        schedules: torch's, in the order in which the script made them.
    """

    def __init__(self) -> None:
        self.schedules: list[Any] = []
        self._kept: dict[int, list[dict[str, Any]]] = {}
        # Set where the training state was copied within the step that has just ended.
        self._copied_positions: list[int] = []
        self._late_calls: list[int] = []

    def begin(self, engine: Engine, found: dict[str, Any]) -> None:
        """Takes over the schedules before the first step. One given to `initialize` is not kept
        here: its state is part of the engine's.

        Args:
            found: the restored state's `schedules`, as of `plain_states`; may be empty.
        """
        given = getattr(engine, "lr_scheduler", None)
        self.schedules = [schedule for schedule in self.schedules if schedule is not given]
        self.catch_up(found.get("schedules", []))

    def states(self) -> list[dict[str, Any]]:
        return [schedule.state_dict() for schedule in self.schedules]

    def load(self, states: list[dict[str, Any]]) -> None:
        """Sets the schedules, and the learning rates of their optimizers."""
        for schedule, state in zip(self.schedules, states, strict=False):
            schedule.load_state_dict(state)
            apply_rates(schedule)

    def follow(self, step: int, *, has_finished: bool) -> None:
        """Goes where the job is: at the start of the step after `step`.

        Args:
            has_finished: whether `step` has ended since the previous call. Otherwise the step in
                progress was lost, or steps before it, and begins again.

        Raises:
            CollectiveError: the states at that step were not kept. The script is run again.
        """
        if has_finished:
            self.keep(step)
        elif step in self._kept:
            self.load(self._kept[step])
        else:
            raise CollectiveError(f"the job went back to step {step}, whose schedules are not kept")

    def keep(self, step: int) -> None:
        """Keeps the states after a step, to which the job may go back."""
        self._kept[step] = self.states()
        self._kept.pop(step - KEPT_STEPS, None)
        if len(self._copied_positions) == len(self.schedules):
            self._late_calls = [
                _position(schedule) - copied
                for schedule, copied in zip(self.schedules, self._copied_positions, strict=True)
            ]
        self._copied_positions = []

    def plain_states(self) -> list[dict[str, Any]]:
        """Returns each schedule's state for the training state, which is copied within
        `engine.step()`: its numbers and texts, its position, and how often the script will call its
        `step` before the next training step (`late`)."""
        self._copied_positions = [_position(schedule) for schedule in self.schedules]
        late_calls = self._late_calls
        if len(late_calls) != len(self.schedules):
            late_calls = [0] * len(self.schedules)
        return [
            {"position": position, "late": late, "state": _plain(schedule.state_dict())}
            for schedule, position, late in zip(
                self.schedules, self._copied_positions, late_calls, strict=True
            )
        ]

    def catch_up(self, states: list[dict[str, Any]]) -> None:
        """Sets the schedules of a script that was run again to the result of `plain_states`. A
        schedule that the script has stepped that far by itself, such as one that is stepped once an
        epoch, stays as it is."""
        behind = []
        for schedule, found in zip(self.schedules, states, strict=False):
            position = found.get("position", found["state"].get("last_epoch", 0))
            if _position(schedule) < position + found["late"]:
                schedule.load_state_dict(schedule.state_dict() | found["state"])
                behind.append((schedule, found["late"]))
        # A schedule that contains others was made after them, and sets the optimizer's rates last.
        for schedule, _ in behind:
            apply_rates(schedule)
        inner = {
            id(contained)
            for schedule in self.schedules
            for contained in getattr(schedule, "_schedulers", ())
        }
        for schedule, late in behind:
            if isinstance(schedule, ReduceLROnPlateau) and late:
                log.warning(
                    "ReduceLROnPlateau continues without the last %d of the values that it was "
                    "given: they came after the step's state was copied",
                    late,
                )
            elif id(schedule) not in inner:
                with warnings.catch_warnings():  # torch's: the optimizer was not stepped before
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                    for _ in range(late):
                        schedule.step()


class StepwiseSchedules:
    """Returns a script's schedules to the job's step, where the script trains on the loader of
    `training_data=`, and therefore has no `FollowedLoop`. Used by the training thread.

    Attributes:
        found: what the restored state has of this rank; empty without one.
    """

    def __init__(self, session: JobSession, kept: KeptSchedules) -> None:
        self.found: dict[str, Any] = {}
        self._session = session
        self._kept = kept
        self._finds_place = False  # the script finds its place itself
        # Finished steps, lost steps and the generation at the latest `follow`.
        self._seen: tuple[int, int, int] | None = None

    @property
    def has_begun(self) -> bool:
        return self._seen is not None

    def follow(self, engine: Engine) -> None:
        """Called where a step may begin.

        Raises:
            CollectiveError: the schedules' states at the job's step were not kept. The script is
                run again.
        """
        if engine.training_dataloader is None or self._finds_place:
            return
        progress, seen = engine.progress, self._seen
        # A script in a new worker may ask for its place where finished epochs are left out.
        if seen is None and progress.place_asked_at is not None and not self.found:
            self._finds_place = True
            return
        self._seen = progress.step, progress.lost_steps, self._session.assignment.generation
        if seen is None:
            self._kept.begin(engine, self.found)
        has_finished = seen is None or progress.step > seen[0]
        if has_finished or (self._seen != seen and self._kept.schedules):
            self._kept.follow(progress.step, has_finished=has_finished)


def apply_rates(schedule: Any) -> None:
    """Sets the learning rates of a schedule's optimizer. Loading a torch schedule restores the
    schedule's position, and leaves the optimizer as it is."""
    for group, lr in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = lr


def _position(schedule: Any) -> int:
    """Returns how often the schedule's `step` was called."""
    if hasattr(schedule, "last_epoch"):
        return int(schedule.last_epoch)
    return max(map(_position, getattr(schedule, "_schedulers", ())), default=0)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
