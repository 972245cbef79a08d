"""Learning-rate schedules of a script's own, which go where the job goes."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from rayzero.engine.errors import CollectiveError

log = logging.getLogger("rayzero.workers")

KEPT_STEPS = 256
"""More than lie between two copies of the state in memory, and between many checkpoints."""


class KeptSchedules(list[Any]):
    """Schedules of torch's, and their states at the beginning of each of the last steps."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, list[dict[str, Any]]] = {}
        self._positions: list[int] = []  # at the end of this step, if `plain_states` was called
        self._late: list[int] = []

    def states(self) -> list[dict[str, Any]]:
        return [schedule.state_dict() for schedule in self]

    def load(self, states: list[dict[str, Any]]) -> None:
        """Sets the schedules, and the rates of their optimizers, which loading does not."""
        for schedule, state in zip(self, states, strict=False):
            schedule.load_state_dict(state)
            apply_rates(schedule)

    def keep(self, step: int) -> None:
        """Keeps the states after that step, to which the job may go back."""
        self._kept[step] = self.states()
        self._kept.pop(step - KEPT_STEPS, None)
        if len(self._positions) == len(self):
            self._late = [_position(it) - at for it, at in zip(self, self._positions, strict=True)]
        self._positions = []  # of this step only: not each one is copied

    def restore(self, step: int) -> None:
        """Raises CollectiveError if they were not kept: the script is run again."""
        if step not in self._kept:
            raise CollectiveError(f"the job went back to step {step}, whose schedules are not kept")
        self.load(self._kept[step])

    def plain_states(self) -> list[dict[str, Any]]:
        """The numbers and texts of the states, at the end of a step within `engine.step()`; and how
        often the script calls a schedule's `step` between that and the next step."""
        self._positions = [_position(schedule) for schedule in self]
        late = self._late if len(self._late) == len(self) else [0] * len(self)
        return [
            {"position": at, "late": more, "state": _plain(schedule.state_dict())}
            for schedule, at, more in zip(self, self._positions, late, strict=True)
        ]

    def catch_up(self, found: list[dict[str, Any]]) -> None:
        """Sets the schedules of a script that was run again as `plain_states` has found them.
        One that is stepped once an epoch may have come there by itself."""
        behind = []
        for schedule, it in zip(self, found, strict=False):
            position = it.get("position", it["state"].get("last_epoch", 0))
            if _position(schedule) < position + it["late"]:
                schedule.load_state_dict(schedule.state_dict() | it["state"])
                behind.append((schedule, it["late"]))
        for schedule, _ in behind:  # those within another one, which sets the rates, are before it
            apply_rates(schedule)
        inner = {id(it) for schedule in self for it in getattr(schedule, "_schedulers", ())}
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


def apply_rates(schedule: Any) -> None:
    """Sets the rates of its optimizer: loading a torch schedule restores its position only."""
    for group, lr in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = lr


def _position(schedule: Any) -> int:
    """Calls of its `step`."""
    if hasattr(schedule, "last_epoch"):
        return int(schedule.last_epoch)
    return max(map(_position, getattr(schedule, "_schedulers", ())), default=0)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
