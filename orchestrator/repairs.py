"""Times the ways between two generations, and keeps a record of each. Pure but for `append`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rayzero.orchestrator.notices import Repaired, Resized

Passed = Repaired | Resized


@dataclass
class _Way:
    """One under way. A fault on a resize's way makes a repair of it."""

    reason: str
    cause: str | None
    world_size: int
    at_s: float
    part: str
    lost: list[str] = field(default_factory=list)
    step: int = 0
    steps_redone: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Repairs:
    """At most one way is open: what happens on it belongs to it, until a step is finished again."""

    def __init__(self) -> None:
        self.repairs = 0
        self.resizes = 0
        self.steps_redone = 0
        self._way: _Way | None = None

    def noticed(
        self, cause: str, lost: Iterable[str], world_size: int, since_s: float, now_s: float
    ) -> None:
        """A fault was judged to be repaired; its first sign came at `since_s`."""
        way = self._way
        if way is None:
            way = self._way = _Way("", cause, world_size, since_s, "notice")
        way.cause = way.cause or cause
        way.lost += lost
        self.enter("notice", now_s)

    def wished(self, reason: str, world_size: int, now_s: float) -> None:
        """A resize begins."""
        if self._way is None:
            self._way = _Way(reason, None, world_size, now_s, "drain")

    def enter(self, part: str, now_s: float) -> None:
        """The part under way is over, and `part` begins."""
        way = self._way
        if way is not None:
            way.seconds[way.part] += now_s - way.at_s
            way.at_s, way.part = now_s, part

    def picked(self, step: int, steps_redone: int) -> None:
        """The step that is gone back to. A second way back counts only what is lost besides."""
        if self._way is not None:
            self._way.step = step
            self._way.steps_redone += steps_redone
        self.steps_redone += steps_redone

    def finished(self, step_s: float, world_size: int, now_s: float) -> Passed | None:
        """A step was finished that took `step_s`: what is now passed, if something was open."""
        way = self._way
        if way is None or way.part not in ("load", "redo"):
            return None  # a step of the generation that is being left
        self._way = None
        way.seconds[way.part] += max(0.0, now_s - way.at_s - step_s)
        seconds = dict(way.seconds)
        if way.cause is None:
            self.resizes += 1
            return Resized(way.reason, way.step, way.world_size, world_size, seconds)
        self.repairs += 1
        return Repaired(
            way.cause,
            tuple(way.lost),
            way.step,
            way.steps_redone,
            way.world_size,
            world_size,
            seconds,
        )


def append(output_dir: Path, passed: Passed) -> None:
    """Adds one line to `repairs.jsonl`."""
    kind = {"kind": type(passed).__name__.lower(), "total_s": passed.total_s}
    with (output_dir / "repairs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(kind | asdict(passed)) + "\n")
