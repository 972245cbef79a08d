"""From the lines of a journal to what is known of the last run. Pure.

A line is a JSON object with `at_s` (Unix time), `kind`, and what the kind has. A line that is torn
or of a later version is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rayzero.orchestrator.policies.failure import Cause, Fault
from rayzero.orchestrator.states import FINAL
from rayzero.workers.messages import WorkerInfo

TURNS = 256
_SHOWN = ("fault", "repaired", "resized", "checkpoint")


@dataclass(frozen=True)
class Past:
    """What the journal knows of a job's last run.

    Args:
        spec: of its last process, without secrets.
        run: the id of the last process.
        working_dir: the submitter's.
        by_value: whether the training function was no name but a function.
        began_at_s, at_s: of its first and last line, as Unix time.
        step: it had finished so many at least.
        best_step: the most it ever had, before it went back.
        scaled: the limits for the number of workers, if they were changed while it ran.
        counted: what its metrics had counted: `seconds` by cause, and totals.
        faults: that count, their times Unix times.
        repaired: how many repairs, by cause.
        written, failed: checkpoints.
        adoptions: how often it was gone on with.
        ended: how it ended; empty while it has not.
        turns: the newest `TURNS` lines of each kind that a page shows, by kind.
    """

    spec: dict[str, Any]
    run: str
    working_dir: str
    by_value: bool
    began_at_s: float
    at_s: float
    state: str = "pending"
    step: int = 0
    best_step: int = 0
    generation: int = 0
    world_size: int = 0
    scaled: tuple[int, int] | None = None
    counted: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = field(default_factory=tuple)
    repaired: Mapping[str, int] = field(default_factory=dict)
    resizes: int = 0
    steps_redone: int = 0
    checkpoint_step: int | None = None
    checkpoint_at_s: float = 0.0
    written: int = 0
    failed: int = 0
    adoptions: int = 0
    ended: str = ""
    error: str = ""
    turns: Mapping[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)

    @property
    def repairs(self) -> int:
        return sum(self.repaired.values())


def begins_run(line: str) -> bool:
    """Whether what is before that line is of other runs."""
    found = _line(line)
    return found.get("kind") == "begun" and not found.get("adopted")


def is_step(line: str) -> bool:
    """Whether it says nothing but how far the run is."""
    return '"kind": "step"' in line and _line(line).get("kind") == "step"


def parse(lines: Iterable[str]) -> Past | None:
    """The run that the lines end with; None if they tell of none."""
    past: Past | None = None
    for line in lines:
        found = _line(line)
        if not found:
            continue
        try:
            past = _begun(past, found) if found["kind"] == "begun" else _after(past, found)
        except (KeyError, TypeError, ValueError):
            continue
    return past


def _line(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    known = isinstance(found, dict) and isinstance(found.get("at_s"), int | float)
    return found if known and isinstance(found.get("kind"), str) else {}


def _begun(past: Past | None, found: dict[str, Any]) -> Past:
    at_s, spec, run = float(found["at_s"]), dict(found["spec"]), str(found["run"])
    if past is not None and found.get("adopted"):
        return replace(
            past, spec=spec, run=run, at_s=at_s, adoptions=past.adoptions + 1, ended="", error=""
        )
    return Past(spec, run, str(found["working_dir"]), bool(found["by_value"]), at_s, at_s)


def _after(past: Past | None, found: dict[str, Any]) -> Past | None:
    if past is None:
        return None
    past = replace(past, at_s=float(found["at_s"]))
    if isinstance(counted := found.get("counted"), dict):
        past = replace(past, counted=counted)
    if found["kind"] in _SHOWN or found.get("state") == "running":
        past = replace(past, turns=_with(past.turns, found))
    match found["kind"]:
        case "moved":
            state = str(found["state"])
            return replace(
                past,
                state=state,
                generation=max(past.generation, int(found["generation"])),
                world_size=int(found["world_size"]),
                ended=state if state in FINAL else past.ended,
                **_reached(past, int(found["step"])),
            )
        case "step":
            return replace(past, **_reached(past, int(found["step"])))
        case "picked":
            redone = past.steps_redone + int(found["steps_redone"])
            return replace(past, step=int(found["step"]), steps_redone=redone)
        case "fault":
            return replace(past, faults=(*past.faults, _fault(found)))
        case "repaired":
            cause = str(found["cause"])
            repaired = {**past.repaired, cause: past.repaired.get(cause, 0) + 1}
            return replace(past, repaired=repaired)
        case "resized":
            return replace(past, resizes=past.resizes + 1)
        case "checkpoint":
            step = int(found["step"])
            return replace(
                past,
                checkpoint_step=step,
                checkpoint_at_s=past.at_s,
                written=past.written + 1,
                **_reached(past, max(past.step, step)),
            )
        case "checkpointfailed":
            return replace(past, failed=past.failed + 1)
        case "scaled":
            return replace(past, scaled=(int(found["least"]), int(found["most"])))
        case "ended":
            return replace(past, ended=str(found["state"]), error=str(found.get("error", "")))
    return past


def _with(
    turns: Mapping[str, tuple[dict[str, Any], ...]], found: dict[str, Any]
) -> dict[str, tuple[dict[str, Any], ...]]:
    kind = found["kind"]
    return {**turns, kind: (*turns.get(kind, ()), found)[-TURNS:]}


def _reached(past: Past, step: int) -> dict[str, Any]:
    return {"step": step, "best_step": max(past.best_step, step)}


def _fault(found: dict[str, Any]) -> Fault:
    rank = found["rank"]
    return Fault(
        Cause(found["cause"]),
        WorkerInfo(**found["worker"]),
        None if rank is None else int(rank),
        int(found["step"]),
        str(found["detail"]),
        float(found["at_s"]),
        int(found["generation"]),
    )
