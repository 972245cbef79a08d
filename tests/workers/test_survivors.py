"""What survives the changes of a job's ranks: the training function, its objects.

Real processes and a vault, without Ray. The oracle is plain torch.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayzero.workers.chaos.inject import FaultRecord
from tests.workers.event_controller import (
    MOST,
    SPACING,
    Event,
    EventController,
    draw,
)
from tests.workers.local_workers import LocalWorkers
from tests.workers.recovery_jobs import engine_config
from tests.workers.support import mirrored_setup
from tests.workers.survivor_jobs import NOTES, compiled_config
from tests.workers.test_recovery import check_results

EVENTS = int(os.environ.get("RAYZERO_SURVIVOR_EVENTS", "6"))
COMPILES = EVENTS >= 50
"""Compiling takes a new worker seconds."""
SEED = int(os.environ.get("RAYZERO_SURVIVOR_SEED", "0"))
pytestmark = pytest.mark.slow


def run_events(
    folder: Path,
    events: Sequence[Event],
    config: dict[str, Any],
    *,
    order: int | None = None,
    look: Callable[[list[int]], None] = lambda pids: None,
    **args: Any,
) -> EventController:
    """A job of three workers that ends like plain torch, each step told once. For `order` and
    `look` see `EventController`."""
    steps = events[-1].step + SPACING
    gates = [event.step for event in events if not event.faults]
    faults = tuple(fault for event in events for fault in event.faults)
    spec = mirrored_setup(
        folder,
        "tests.workers.survivor_jobs:train",
        engine_config=config,
        args={"gates": gates} | args,
        faults=faults,
        steps=steps,
    )
    local = LocalWorkers(spec, MOST)
    try:
        controller = EventController(local, events, order, look)
        controller.run(240 + 10 * len(events))
        assert controller.wrong == []
        assert sorted(fired.fault for fired in FaultRecord(folder).read()) == sorted(faults)
        told = local.told_steps(controller.starts)
        assert told == [*range(1, steps + 1)], "no step was lost, or done again"
        check_results(local, steps)
        return controller
    finally:
        local.close()


def read_notes(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What each process has noted, by its id."""
    notes: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in (folder / NOTES).read_text().splitlines():
        values = json.loads(line)
        notes[values.pop("pid")].append(values)
    return notes


def test_function_and_its_objects_survive_random_events(tmp_path: Path) -> None:
    """Kills, stops, resizes and drains: each process enters the function once, and has the same
    objects before and after each of them."""
    events = draw(SEED, EVENTS)
    config = compiled_config(SEED % 4) if COMPILES else engine_config(SEED % 4)
    controller = run_events(tmp_path, events, config, order=SEED)
    assert len(controller.starts) > len(events)
    changes = 0
    for entry, *later in read_notes(tmp_path).values():
        assert entry == {"entries": 1}
        graphs = {values.pop("graphs") for values in later} - {0}  # 0: before its first forward
        assert len(graphs) <= COMPILES, later
        assert all(values == later[0] for values in later), later
        changes += len(later)
    assert changes > len(events)
