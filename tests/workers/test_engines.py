"""Several engines that train in one function, through kills, resizes and drains.

Real processes and a vault, without Ray. The oracle is plain torch, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.messages import StepReport
from tests.workers.engine_jobs import SECOND, WEIGHTS, Oracle, kill_name, plain_gan
from tests.workers.event_controller import MOST, SPACING, Event, EventController
from tests.workers.local_workers import LocalWorkers
from tests.workers.support import mirrored_setup

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
pytestmark = pytest.mark.slow


def run_job(
    folder: Path, function: str, events: Sequence[Event], kills: Sequence[Any] = (), **args: Any
) -> tuple[LocalWorkers, EventController]:
    """A job of three workers; `events` whose fault is one of `kills` replace the killed one."""
    steps = max(event.step for event in events) + SPACING
    gates = [event.step for event in events if not event.faults]
    spec = mirrored_setup(
        folder,
        f"tests.workers.engine_jobs:{function}",
        args={"gates": gates, "kills": [[*kill] for kill in kills]} | args,
        ledger=False,
        steps=steps,
    )
    local = LocalWorkers(spec, MOST)
    try:
        controller = EventController(local, events, None)
        controller.run(240)
        assert controller.wrong == []
    finally:
        local.close()
    fired = {it.fault for it in FaultRecord(folder).read()}
    assert fired == {kill_name(*kill) for kill in kills}, fired
    assert local.told_steps(controller.starts) == [*range(1, steps + 1)]
    return local, controller


def check(local: LocalWorkers, oracle: Oracle) -> None:
    """Losses of each step, and the last weights."""
    steps = local.setup.steps or 0
    told: dict[int, set[tuple[float, float]]] = {}
    for message in (it for messages in local.seen.values() for it in messages):
        if isinstance(message, StepReport):
            losses = message.gauges["loss"], message.gauges[f"{SECOND}/loss"]
            told.setdefault(message.step, set()).add(losses)
    done = [*islice(oracle, steps)]
    for step, (losses, _) in enumerate(done, 1):
        for values in told[step]:
            assert values == pytest.approx(losses, rel=1e-9), step
    for name, weights in zip(WEIGHTS, done[-1][1], strict=True):
        saved = torch.load(Path(local.setup.output_dir, name), weights_only=True)
        torch.testing.assert_close(saved, weights, **TOLERANCE)


def kill_event(rank: int, step: int, point: int) -> Event:
    return Event(step, "replace", (kill_name(rank, step, point),))


def test_gan_survives(tmp_path: Path) -> None:
    kills = [(1, 3, 10)]
    local, _ = run_job(tmp_path, "gan", [kill_event(*it) for it in kills], kills, stages=[1, 2])
    check(local, plain_gan())
